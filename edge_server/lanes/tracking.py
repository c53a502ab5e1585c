"""LaneTracker: over frames a marking keeps its number, and lanes on the ground are smooth."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from edge_server.lanes.paint import (
    NO_EVIDENCE,
    MarkingEvidence,
    accumulated,
    color_of,
    type_of,
)
from edge_server.lanes.types import GroundLane, Polynomial

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from edge_server.lanes.types import Lane, Side, VehicleState

    Projection = Callable[[NDArray[np.float64]], NDArray[np.float64]]

# 90 % of the chi-squared distribution with four degrees of freedom: a detection that differs more
# is an outlier and counts for less.
_GATE = 7.8
# At these shares of the detected range polynomials are compared.
_SAMPLES = np.linspace(0.0, 1.0, 4)
# Standard deviations before anything was measured of c0..c3: half a lane, 15 degrees, a bend of
# 65 m radius, and its change within 50 m; and of how fast the lane turns to the vehicle, rad/s: one
# that steers accelerates by half a metre a second squared across its lane at 25 m/s, for a second.
_PRIOR = np.array([2.0, 0.25, 0.015, 1e-4, 0.02])
_TURNING, _TURNING_S = 4, 1.0
# Growth of the standard deviations of c0..c3 in one second; all lines have it in common, as the
# vehicle moves and the road bends; how the vehicle steers is in c1 already. That of c2 was fitted
# to drives 0 to 19 (a bend that changes evenly has c3), the others to drives 20 to 39, see
# benchmarks/paint.py. And the growth of c0 without the vehicle's speed.
_GROWTH = np.array([0.025, 0.0, 8e-5, 6e-6])
_GROWTH_SPEED_UNKNOWN = 0.2
# No detection is better than this, nor than rounding allows beside what was expected: what is known
# for certain cannot be weighed.
_LEAST_STD_M, _LEAST_SHARE = 0.001, 1e-9
_DIAGONAL = np.arange(4)
_STATES = len(_PRIOR)
# A vehicle moves aside of where it points, in bends and in side wind: an error that all lines have
# in common, for seconds.
_PITCH, _SLIP, _SLIP_STD_RAD = 0, 3, math.radians(0.05)


class LaneFilter:
    """The polynomial of one boundary, moved by the vehicle's motion, corrected by detections.

    Args:
        first: what the first detection will correct; the prior only bounds what it leaves open.

    Attributes:
        mean: (5,) float64, c0..c3, see `Polynomial`, and how fast c1 changes, rad/s.
        covariance: (5, 5) float64, without what the lines have in common.
        moved: (5, 5) float64, covariance of what the vehicle's motion and the road's bends made of
            all lines alike.
        by_angles: (5, 4) float64, what these, and the vehicle's slip, make of the estimate; see
            `Polynomial`.
        x_min_m, x_max_m: the range that is still ahead of what was last detected.
    """

    def __init__(self, first: Polynomial) -> None:
        self.mean: NDArray[np.float64] = np.append(first.coefficients, 0.0)
        of_line = np.arange(_STATES) != _TURNING
        self.covariance: NDArray[np.float64] = np.diag(of_line * _PRIOR**2)
        self.moved: NDArray[np.float64] = np.diag(~of_line * _PRIOR**2)
        self.by_angles = np.pad(first.by_angles, ((0, 1), (0, 1)))
        self.x_min_m, self.x_max_m = first.x_min_m, first.x_max_m

    def at(self, x_m: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return (N,) y in m at (N,) `x_m`."""
        c0, c1, c2, c3, _ = self.mean.tolist()
        return np.asarray(((c3 * x_m + c2) * x_m + c1) * x_m + c0)


def predict(filters: Sequence[LaneFilter], passed_s: float, motion: VehicleState) -> None:
    """Move the polynomials into the vehicle's axes `passed_s` later."""
    if not filters:
        return
    ahead_m = (motion.speed_mps or 0.0) * passed_s
    keep = math.exp(-passed_s / _TURNING_S)
    step = np.array(
        [
            [1.0, ahead_m, ahead_m**2, ahead_m**3, ahead_m * passed_s / 2],
            [0.0, 1.0, 2 * ahead_m, 3 * ahead_m**2, passed_s],
            [0.0, 0.0, 1.0, 3 * ahead_m, 0.0],
            [0.0, 0.0, 0.0, 1.0, 0.0],
            [0.0, 0.0, 0.0, 0.0, keep],
        ]
    )
    turned_rad = 0.0
    if motion.speed_mps is None or motion.yaw_rate_radps is None:
        # A vehicle turns with its road.
        step[:2, 2:4] = 0.0
    else:
        turned_rad = motion.yaw_rate_radps * passed_s
    means = np.array([each.mean for each in filters]) @ step.T
    # On its way ahead the vehicle had turned by half on average.
    means[:, 0] -= turned_rad * ahead_m / 2
    means[:, 1] -= turned_rad
    growth = _GROWTH.copy()
    if motion.speed_mps is None:
        growth[0] = _GROWTH_SPEED_UNKNOWN
    # Each frame measures the pitch anew: lines of one frame have its error in common, frames not.
    by_pitch = np.array([each.by_angles[:, _PITCH] for each in filters])
    covariances = np.array([each.covariance for each in filters])
    covariances += by_pitch[:, :, None] * by_pitch[:, None]
    covariances = step @ covariances @ step.T
    moved = step @ np.array([each.moved for each in filters]) @ step.T
    moved[:, _DIAGONAL, _DIAGONAL] += growth**2 * passed_s
    moved[:, _TURNING, _TURNING] += _PRIOR[_TURNING] ** 2 * (1.0 - keep**2)
    for number, each in enumerate(filters):
        each.mean, each.covariance, each.moved = means[number], covariances[number], moved[number]
        each.by_angles = step @ each.by_angles
        each.by_angles[:, _PITCH] = 0.0
        each.by_angles[0, _SLIP] += ahead_m * _SLIP_STD_RAD
        each.x_max_m -= ahead_m


def correct(filters: Sequence[LaneFilter], detections: Sequence[Polynomial]) -> None:
    if not filters:
        return
    ends = np.array([(each.x_min_m, each.x_max_m) for each in detections])
    x_m = ends[:, :1] + _SAMPLES * (ends[:, 1:] - ends[:, :1])
    at = np.ones((*x_m.shape, _STATES))
    at[..., _TURNING] = 0.0
    for power in (1, 2, 3):
        np.multiply(at[..., power - 1], x_m, out=at[..., power])
    powers = at[..., :4]
    by_angles = np.array([each.by_angles for each in detections])
    apart = np.array([each.covariance for each in detections])
    apart -= by_angles @ by_angles.transpose(0, 2, 1)
    # Samples of one polynomial err together.
    noise = powers @ apart @ powers.transpose(0, 2, 1)
    mean = np.array([each.mean for each in filters])
    difference = np.array([each.coefficients for each in detections]) - mean[:, :4]
    difference = powers @ difference[..., None]
    covariance = np.array([each.covariance for each in filters])
    moved = np.array([each.moved for each in filters])
    projected = at @ (covariance + moved)
    expected = projected @ at.transpose(0, 2, 1)
    least = _LEAST_STD_M**2 + _LEAST_SHARE * expected[:, _DIAGONAL, _DIAGONAL]
    noise[:, _DIAGONAL, _DIAGONAL] += least
    surprise = difference.transpose(0, 2, 1) @ np.linalg.solve(expected + noise, difference)
    noise *= np.maximum(1.0, surprise / _GATE)
    gain = np.linalg.solve(expected + noise, projected).transpose(0, 2, 1)
    mean += (gain @ difference)[..., 0]
    # Joseph's form stays symmetric and positive.
    rest = np.eye(_STATES) - gain @ at
    moved = rest @ moved @ rest.transpose(0, 2, 1)
    covariance = rest @ covariance @ rest.transpose(0, 2, 1)
    covariance += gain @ noise @ gain.transpose(0, 2, 1)
    # Errors of the angles pass through the estimate: more frames do not tell what they have in
    # common, but a vehicle that keeps its place shows where the camera looks.
    after = rest @ np.array([each.by_angles for each in filters])
    after[:, :, :_SLIP] += gain @ powers @ by_angles
    for number, (each, detection) in enumerate(zip(filters, detections, strict=True)):
        each.mean, each.covariance, each.moved = mean[number], covariance[number], moved[number]
        each.by_angles = after[number]
        each.x_min_m, each.x_max_m = detection.x_min_m, detection.x_max_m


def polynomials(filters: Sequence[LaneFilter]) -> list[Polynomial]:
    # The symmetric root, as it is alike for lines alike: an error that they have in common does not
    # change the lane's width. In units of the prior, as the coefficients are of unlike sizes.
    prior = _PRIOR[:4]
    scaled = np.array([each.moved[:4, :4] for each in filters]) / np.outer(prior, prior)
    values, vectors = np.linalg.eigh(scaled)
    roots = np.sqrt(np.maximum(values, 0.0))[:, None]
    moved = prior[:, None] * ((vectors * roots) @ vectors.transpose(0, 2, 1))
    by_angles = np.array([each.by_angles[:4] for each in filters])
    in_common = np.concatenate([by_angles, moved], axis=2)
    covariances = in_common @ in_common.transpose(0, 2, 1)
    covariances += np.array([each.covariance[:4, :4] for each in filters])
    return [
        Polynomial(each.mean[:4], covariance, each.x_min_m, each.x_max_m, common)
        for each, covariance, common in zip(filters, covariances, in_common, strict=True)
    ]


def distances_m(
    detections: Sequence[Polynomial], filters: Sequence[LaneFilter]
) -> NDArray[np.float64]:
    """Return the mean distance of each detection to each filter, (D, F) in m, where both hold; over
    the nearer half of the detection where they hardly overlap."""
    ends = np.array([(each.x_min_m, each.x_max_m) for each in detections])[:, :, None]
    first, last = ends[:, 0], ends[:, 1]
    known = np.minimum(last, [each.x_max_m for each in filters])
    last = np.maximum(known, (first + last) / 2)
    x_m = first[..., None] + _SAMPLES * (last - first)[..., None]
    means = np.array([each.mean[:4] for each in filters])
    apart = means - np.array([each.coefficients for each in detections])[:, None]
    c0, c1, c2, c3 = apart.transpose(2, 0, 1)[..., None]
    return np.asarray(np.abs(((c3 * x_m + c2) * x_m + c1) * x_m + c0).mean(axis=2))


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
        self, lanes: Sequence[Lane], mono_ns: int, motion: VehicleState, to_image: Projection
    ) -> tuple[Lane, ...]:
        """Return the lanes of one frame, tracked: the detected ones in their order, then predicted.

        Lanes without `ground` are returned as they are. A detection has the number of its track
        once the track is confirmed; before that its id and index are 0.

        Args:
            mono_ns: CLOCK_MONOTONIC of the capture; a frame that is not newer than the last one
                moves nothing.
            motion: what is known of the vehicle between the last frame and this one.
        """
        passed_s = self._pass(mono_ns)
        predict([track.filter for track in self._tracks], passed_s, motion)
        track_of = self._assign(lanes)
        detections = []
        for number, lane in enumerate(lanes):
            if lane.ground is not None:
                track_of[number] = self._see(track_of.get(number), lane, lane.ground)
                detections.append((track_of[number].filter, lane.ground.polynomial))
        correct([filter_ for filter_, _ in detections], [detection for _, detection in detections])
        self._count({track.id for track in track_of.values()}, passed_s)
        self._take_sides(passed_s)
        if not self._tracks:
            return tuple(lanes)
        index_of = self._indices()
        estimates = polynomials([track.filter for track in self._tracks])
        estimate_of = {each.id: made for each, made in zip(self._tracks, estimates, strict=True)}
        detected = [
            _smoothed(lane, track_of[number], index_of, estimate_of) if number in track_of else lane
            for number, lane in enumerate(lanes)
        ]
        continued = [
            _continued(track, index_of, estimate_of[track.id], to_image)
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
        located = {n: lane.ground for n, lane in enumerate(lanes) if lane.ground is not None}
        track_of: dict[int, _Track] = {}
        if not (located and self._tracks):
            return track_of
        apart_m = distances_m(
            [ground.polynomial for ground in located.values()],
            [track.filter for track in self._tracks],
        )
        pairs = [(number, track) for number in located for track in self._tracks]
        taken: set[int] = set()
        for pair in np.argsort(apart_m, axis=None, kind="stable").tolist():
            number, track = pairs[pair]
            if not apart_m.flat[pair] <= _NEAREST_M:
                break
            if number not in track_of and track.id not in taken:
                track_of[number] = track
                taken.add(track.id)
        return track_of

    def _see(self, track: _Track | None, lane: Lane, ground: GroundLane) -> _Track:
        """Note that `track` is detected, or begin a track."""
        if track is None:
            track = _Track(next(self._ids), lane, LaneFilter(ground.polynomial), left=False)
            self._tracks.append(track)
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


def _smoothed(
    lane: Lane, track: _Track, index_of: dict[int, int], estimate_of: dict[int, Polynomial]
) -> Lane:
    if not track.confirmed or lane.ground is None:
        return replace(lane, index=0)
    points = lane.ground.points.copy()
    points[:, 1] = track.filter.at(points[:, 0].astype(np.float64))
    ground = GroundLane(points, estimate_of[track.id])
    return replace(
        lane,
        id=track.id,
        index=index_of[track.id],
        type=type_of(track.marking.solid),
        color=color_of(track.marking.yellow),
        ground=ground,
    )


def _continued(
    track: _Track, index_of: dict[int, int], estimate: Polynomial, to_image: Projection
) -> Lane | None:
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
        ground=GroundLane(ground[seen].astype(np.float32), estimate),
        predicted=True,
    )
