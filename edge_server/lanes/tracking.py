"""LaneTracker: over frames a marking keeps its number, and lanes on the ground are smooth."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from edge_server.lanes.lane_filter import LaneFilter
from edge_server.lanes.marking import (
    NO_EVIDENCE,
    MarkingEvidence,
    accumulated,
    color_of,
    type_of,
)
from edge_server.lanes.types import GroundLane

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from edge_server.lanes.lane_filter import Motion
    from edge_server.lanes.types import Lane, Side

    # (N, 2) float64 points on the ground, m, to (N, 2) px of the original frame; NaN where the
    # camera does not see the point.
    Projection = Callable[[NDArray[np.float64]], NDArray[np.float64]]

# After a longer gap between frames nothing is known of where the markings went.
_LONGEST_GAP_S = 1.0
# A marking that is not detected is continued for so long; at 30 m/s that is 15 m, a dash and a half
# of a US highway's broken line.
_COASTING_S = 0.5
_CONFIDENCE_HALVES_S = 0.25
# A track is confirmed by three detections within five frames.
_CONFIRMING, _WITHIN = 3, 5
# Two markings of a lane are at least 2.5 m apart; a detection belongs to a track that is nearer.
_NEAREST_M = 1.0
# A marking changes its side once it is so far on the other one, for so long.
_CROSSED_M, _CROSSED_S = 0.3, 0.3
# Shorter polynomials are not continued.
_SHORTEST_M = 5.0


@dataclass(eq=False)
class _Track:
    id: int
    lane: Lane  # as detected last
    filter: LaneFilter
    left: bool  # of the vehicle
    seen: list[bool] = field(default_factory=list)  # in the last frames
    confirmed: bool = False
    marking: MarkingEvidence = NO_EVIDENCE
    unseen_s: float = 0.0
    crossed_s: float = 0.0

    @property
    def offset_m(self) -> float:
        return float(self.filter.mean[0])


class LaneTracker:
    """Gives the lanes of one camera identity and smoothness; for one thread.

    A detection is always returned; its ground polynomial is the filter's estimate, its type and
    colour are what the last frames show together. A marking that
    was confirmed and is not detected is continued for half a second, `predicted` and with decaying
    confidence. Nothing is returned that was not detected before.

    Args:
        half_width_m: from the vehicle's middle to the outer edge of its wheels.

    Attributes:
        lane_change: the side to which the vehicle is changing its lane, from when a marking is
            below its inner half until it has passed the vehicle.
    """

    def __init__(self, half_width_m: float = 0.95) -> None:
        self.lane_change: Side = "none"
        self._half_width_m = half_width_m
        self._tracks: list[_Track] = []
        self._ids = itertools.count(1)
        self._last_ns: int | None = None
        self._crossing: _Track | None = None

    def reset(self) -> None:
        """Forget every marking, for example with a new calibration; numbers are not used again."""
        self._tracks.clear()
        self._last_ns = None
        self._crossing, self.lane_change = None, "none"

    def update(
        self, lanes: Sequence[Lane], mono_ns: int, motion: Motion, to_image: Projection
    ) -> tuple[Lane, ...]:
        """Return the lanes of one frame, tracked: the detected ones in their order, then predicted.

        Lanes without `ground` are returned as they are. A detection has the number of its track
        once the track is confirmed; before that its id and index are 0.

        Args:
            lanes: as located on the ground.
            mono_ns: CLOCK_MONOTONIC of the capture; a frame that is not newer than the last one
                moves nothing.
            motion: of the vehicle since the last frame.
            to_image: projects the points of a predicted lane.
        """
        passed_s = self._pass(mono_ns)
        for track in self._tracks:
            track.filter.predict(passed_s, motion)
        track_of = self._assign(lanes)
        for number, lane in enumerate(lanes):
            if lane.ground is not None:
                track_of[number] = self._see(track_of.get(number), lane, lane.ground)
        self._count({track.id for track in track_of.values()}, passed_s)
        self._take_sides(passed_s)
        index_of = self._indices()
        detected = [
            _smoothed(lane, track_of[number], index_of) if number in track_of else lane
            for number, lane in enumerate(lanes)
        ]
        continued = [
            _continued(track, index_of, to_image)
            for track in self._tracks
            if track.confirmed and track.unseen_s
        ]
        return (*detected, *(lane for lane in continued if lane is not None))

    def _pass(self, mono_ns: int) -> float:
        """Return the time since the last frame, in s, and forget everything after a long gap."""
        last_ns = mono_ns if self._last_ns is None else self._last_ns
        if mono_ns - last_ns > _LONGEST_GAP_S * 1e9:
            self.reset()
            last_ns = mono_ns
        self._last_ns = max(mono_ns, last_ns)
        return max(0, mono_ns - last_ns) / 1e9

    def _assign(self, lanes: Sequence[Lane]) -> dict[int, _Track]:
        """Return the tracks of the detections, by the detections' number: the nearest pairs first,
        as markings are farther from each other than a detection is from its own."""
        pairs = sorted(
            (
                (track.filter.distance_m(lane.ground.polynomial), number, track)
                for number, lane in enumerate(lanes)
                if lane.ground is not None
                for track in self._tracks
            ),
            key=lambda pair: pair[0],
        )
        track_of: dict[int, _Track] = {}
        taken: set[int] = set()
        for distance_m, number, track in pairs:
            if distance_m <= _NEAREST_M and number not in track_of and track.id not in taken:
                track_of[number] = track
                taken.add(track.id)
        return track_of

    def _see(self, track: _Track | None, lane: Lane, ground: GroundLane) -> _Track:
        """Correct `track` by its detection, or begin a track."""
        if track is None:
            track = _Track(next(self._ids), lane, LaneFilter(ground.polynomial), left=False)
            self._tracks.append(track)
        else:
            track.filter.correct(ground.polynomial)
            track.lane = lane
        track.marking = accumulated(
            track.marking, MarkingEvidence(lane.solid_evidence, lane.yellow_evidence)
        )
        return track

    def _count(self, seen: set[int], passed_s: float) -> None:
        """Confirm the tracks that are seen often enough, and drop those that are not."""
        for track in self._tracks:
            is_seen = track.id in seen
            track.seen = [*track.seen, is_seen][-_WITHIN:]
            track.confirmed |= sum(track.seen) >= _CONFIRMING
            track.unseen_s = 0.0 if is_seen else track.unseen_s + max(passed_s, 1e-6)
        self._tracks = [track for track in self._tracks if _is_worth_keeping(track)]

    def _take_sides(self, passed_s: float) -> None:
        """Let a marking that the vehicle has crossed change its side, and watch lane changes."""
        for track in self._tracks:
            beyond_m = -track.offset_m if track.left else track.offset_m
            track.crossed_s = track.crossed_s + passed_s if beyond_m > _CROSSED_M else 0.0
            if not track.confirmed:
                track.left = track.offset_m > 0
            elif track.crossed_s > _CROSSED_S:
                track.left = not track.left
                track.crossed_s = 0.0
        crossing = self._crossing
        if crossing is not None and (
            crossing not in self._tracks or abs(crossing.offset_m) > self._half_width_m
        ):
            crossing, self.lane_change = None, "none"
        if crossing is None:
            for track in self._tracks:
                across = abs(track.offset_m) < self._half_width_m / 2
                if track.confirmed and not track.unseen_s and across:
                    crossing, self.lane_change = track, "left" if track.left else "right"
                    break
        self._crossing = crossing

    def _indices(self) -> dict[int, int]:
        """Return the place of each confirmed track, by its id."""
        confirmed = sorted(
            (track for track in self._tracks if track.confirmed), key=lambda t: abs(t.offset_m)
        )
        left = [track.id for track in confirmed if track.left]
        right = [track.id for track in confirmed if not track.left]
        return {id_: -1 - i for i, id_ in enumerate(left)} | {
            id_: 1 + i for i, id_ in enumerate(right)
        }


def _is_worth_keeping(track: _Track) -> bool:
    if not track.unseen_s:
        return True
    x_min_m, x_max_m = track.filter.x_min_m, track.filter.x_max_m
    is_long = x_max_m - x_min_m >= _SHORTEST_M
    return track.unseen_s <= _COASTING_S and (is_long if track.confirmed else any(track.seen))


def _smoothed(lane: Lane, track: _Track, index_of: dict[int, int]) -> Lane:
    """Return the detection with the identity and the polynomial of its confirmed track."""
    if not track.confirmed or lane.ground is None:
        return replace(lane, index=0)
    x_m = lane.ground.points[:, 0].astype(np.float64)
    points = np.stack((x_m, track.filter.at(x_m)), axis=1).astype(np.float32)
    ground = GroundLane(points, track.filter.polynomial)
    return replace(
        lane,
        id=track.id,
        index=index_of[track.id],
        type=type_of(track.marking.solid),
        color=color_of(track.marking.yellow),
        ground=ground,
    )


def _continued(track: _Track, index_of: dict[int, int], to_image: Projection) -> Lane | None:
    """Return the lane of a track that is not detected; None where the camera does not see it."""
    x_m = np.linspace(track.filter.x_min_m, track.filter.x_max_m, 24)
    ground = np.stack((x_m, track.filter.at(x_m)), axis=1)
    image = to_image(ground)
    seen = np.isfinite(image).all(axis=1)
    if np.count_nonzero(seen) < 2:
        return None
    return replace(
        track.lane,
        points=image[seen].astype(np.float32),
        score=track.lane.score * 0.5 ** (track.unseen_s / _CONFIDENCE_HALVES_S),
        id=track.id,
        index=index_of[track.id],
        type=type_of(track.marking.solid),
        color=color_of(track.marking.yellow),
        ground=GroundLane(ground[seen].astype(np.float32), track.filter.polynomial),
        predicted=True,
    )
