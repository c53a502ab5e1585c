"""LaneTracker: over frames a marking keeps its number, and lanes on the ground are smooth."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edge_server.lanes.types import GroundLane, Polynomial
from edge_server.pixels import ColourRange, PixelFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from edge_server.lanes.camera_model import CameraModel
    from edge_server.lanes.types import Lane, MarkingColor, MarkingType, Side, VehicleState
    from edge_server.pixels import Image

    Projection = Callable[[NDArray[np.float64]], NDArray[np.float64]]

# 99 % of the chi-squared distribution with four degrees of freedom: a detection that differs more
# is an outlier and counts for less.
_GATE = 13.3
# At these shares of the detected range polynomials are compared.
_SAMPLES = np.linspace(0.0, 1.0, 4)
# Standard deviations of what a detection's covariance does not know, at 0 m and for each metre
# ahead: paint is 0.1 to 0.2 m wide.
_FLOOR_M, _FLOOR_PER_M = 0.05, 0.003
# Standard deviations of c0..c3 before anything was measured: half a lane, 15 degrees, a bend of
# 65 m radius, and its change within 50 m.
_PRIOR = np.array([2.0, 0.25, 0.015, 1e-4])
# Growth of the standard deviations of c0..c3 in one second: with speed and yaw rate known, and
# without, where steering within the lane is all that limits them.
_GROWTH_KNOWN = np.array([0.10, 0.010, 1.2e-3, 2e-5])
_GROWTH_UNKNOWN = np.array([0.35, 0.040, 2.5e-3, 4e-5])


class LaneFilter:
    """The polynomial of one boundary, moved by the vehicle's motion, corrected by detections.

    Args:
        first: the first detection; the prior only bounds what it leaves open.

    Attributes:
        mean: (4,) float64, c0..c3; see `Polynomial`.
        covariance: (4, 4) float64.
        x_min_m, x_max_m: the range that is still ahead of what was last detected.
    """

    def __init__(self, first: Polynomial) -> None:
        self.mean: NDArray[np.float64] = first.coefficients.astype(np.float64)
        self.covariance: NDArray[np.float64] = np.diag(_PRIOR**2)
        self.correct(first)

    @property
    def polynomial(self) -> Polynomial:
        """The estimate."""
        return Polynomial(self.mean, self.covariance, self.x_min_m, self.x_max_m)

    def at(self, x_m: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return (N,) y in m at (N,) `x_m`."""
        return _powers(x_m) @ self.mean

    def predict(self, passed_s: float, motion: VehicleState) -> None:
        """Move the polynomial into the vehicle's axes `passed_s` later."""
        ahead_m = (motion.speed_mps or 0.0) * passed_s
        turned_rad = (motion.yaw_rate_radps or 0.0) * passed_s
        step = np.array(
            [
                [1.0, ahead_m, ahead_m**2, ahead_m**3],
                [0.0, 1.0, 2 * ahead_m, 3 * ahead_m**2],
                [0.0, 0.0, 1.0, 3 * ahead_m],
                [0.0, 0.0, 0.0, 1.0],
            ]
        )
        self.mean = step @ self.mean
        # On its way ahead the vehicle had turned by half on average.
        self.mean[0] -= turned_rad * ahead_m / 2
        self.mean[1] -= turned_rad
        known = motion.speed_mps is not None and motion.yaw_rate_radps is not None
        growth = _GROWTH_KNOWN if known else _GROWTH_UNKNOWN
        self.covariance = step @ self.covariance @ step.T + np.diag(growth**2 * passed_s)
        self.x_max_m -= ahead_m

    def correct(self, detection: Polynomial) -> None:
        """Correct the estimate by a detection."""
        x_m = detection.x_min_m + _SAMPLES * (detection.x_max_m - detection.x_min_m)
        powers = _powers(x_m)
        difference = powers @ (detection.coefficients - self.mean)
        measured = np.einsum("ij,jk,ik->i", powers, detection.covariance, powers)
        noise = np.diag(measured + (_FLOOR_M + _FLOOR_PER_M * x_m) ** 2)
        expected = powers @ self.covariance @ powers.T
        surprise = float(difference @ np.linalg.solve(expected + noise, difference))
        noise *= max(1.0, surprise / _GATE)
        gain = np.linalg.solve(expected + noise, powers @ self.covariance).T
        self.mean = self.mean + gain @ difference
        # Joseph's form stays symmetric and positive.
        rest = np.eye(4) - gain @ powers
        self.covariance = rest @ self.covariance @ rest.T + gain @ noise @ gain.T
        self.x_min_m, self.x_max_m = detection.x_min_m, detection.x_max_m


def _powers(x_m: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (N, 4): 1, x, x^2, x^3."""
    # As `np.vander` does it, in a quarter of the time.
    powers = np.ones((len(x_m), 4))
    powers[:, 1] = x_m
    np.multiply(x_m, x_m, out=powers[:, 2])
    np.multiply(powers[:, 2], x_m, out=powers[:, 3])
    return powers


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
    means = np.array([each.mean for each in filters])
    apart = means - np.array([each.coefficients for each in detections])[:, None]
    c0, c1, c2, c3 = apart.transpose(2, 0, 1)[..., None]
    return np.asarray(np.abs(((c3 * x_m + c2) * x_m + c1) * x_m + c0).mean(axis=2))


# Along the line: from the vehicle's front on, as far as paint is some px wide.
_FROM_M = 3.0
_TO_M = 23.0
_STEP_M = 0.5
_X_M = np.arange(_FROM_M, _TO_M, _STEP_M)
_POWERS = _X_M ** np.arange(4)[:, None]
# Across: farther than a network errs, nearer than the next line.
_SIDE_M = 0.6
_ACROSS = 21
_MIDDLE = _ACROSS // 2
_SHARE = np.linspace(0.0, 1.0, _ACROSS)
# The second brightest sample: they are 0.06 m apart, and the narrowest line is 0.1 m wide.
_PAINT = _ACROSS - 2
_DARK = 3

# Paint is brighter than the road by this many levels, this part of its brightness, and this many
# times the road's own unevenness.
_LEAST_CONTRAST = 14.0
_LEAST_PART = 0.12
_LEAST_SPREADS = 1.6

# Cells of 2 m count apart. A solid line is seen in 93 % of its cells, a dashed one (3 m of 12 to
# 6 m of 12) in 35 %.
_CELLS = 4
_ODDS_PAINTED = float(np.log(0.93 / 0.35))
_ODDS_BARE = float(np.log((1 - 0.93) / (1 - 0.35)))
_FEWEST_CELLS = 5
# Blue less than luma, by luma, against the road's: 0.15 to 0.37 for yellow, 0 for white.
_YELLOW = 0.09
_YELLOW_STD = 0.035
_COLOUR_TO_M = 16.0
_FEWEST_COLOURED = 3
_MOST_EVIDENCE = 4.0
# Over frames: a marking that changes is another one after some ten frames.
_MOST_TOGETHER = 12.0
_FADING = 0.95

_BGR_TO_LUMA = np.array([0.114, 0.587, 0.299], np.float32)

# Log odds of 20 to 1.
CERTAIN = 3.0


class MarkingEvidence(NamedTuple):
    """Log odds of one frame, within -4 and 4; 0 says nothing. Those of several frames add up.

    Attributes:
        solid: against dashed.
        yellow: against white.
    """

    solid: float
    yellow: float


NO_EVIDENCE = MarkingEvidence(0.0, 0.0)


def accumulated(before: MarkingEvidence, now: MarkingEvidence) -> MarkingEvidence:
    """Return the evidence of a marking's frames so far and the next one; old frames fade."""
    solid, yellow = (
        max(-_MOST_TOGETHER, min(_MOST_TOGETHER, _FADING * old + new))
        for old, new in zip(before, now, strict=True)
    )
    return MarkingEvidence(solid, yellow)


def type_of(solid: float) -> MarkingType:
    """Return the type for those log odds."""
    if abs(solid) < CERTAIN:
        return "unknown"
    return "solid" if solid > 0 else "dashed"


def color_of(yellow: float) -> MarkingColor:
    """Return the colour for those log odds."""
    if abs(yellow) < CERTAIN:
        return "unknown"
    return "yellow" if yellow > 0 else "white"


def with_markings(lanes: Sequence[Lane], image: Image, camera: CameraModel) -> tuple[Lane, ...]:
    """Return the lanes with type and colour, as far as this frame shows them, and its evidence.

    Args:
        lanes: with ground; those without stay as they are.
        image: the frame; a decoder may have made it smaller than the camera model's.
        camera: with the pitch of this frame.
    """
    evidence = marking_evidence(lanes, image, camera)
    return tuple(
        replace(
            lane,
            type=type_of(each.solid),
            color=color_of(each.yellow),
            solid_evidence=each.solid,
            yellow_evidence=each.yellow,
        )
        if lane.ground is not None
        else lane
        for lane, each in zip(lanes, evidence, strict=True)
    )


def marking_evidence(
    lanes: Sequence[Lane], image: Image, camera: CameraModel
) -> list[MarkingEvidence]:
    """Return the evidence for each lane; see `with_markings`."""
    located = [number for number, lane in enumerate(lanes) if lane.ground is not None]
    evidence = [NO_EVIDENCE] * len(lanes)
    if not located:
        return evidence
    places = _places([lanes[number] for number in located], camera, image.width, image.height)
    luma = image.luma()[places.row, places.column]
    painted = _painted(luma, places.seen, _black(image))
    yellow = _yellowness(image, places, luma)
    solid = _solid_odds(painted, places.seen)
    near = painted & (_X_M <= _COLOUR_TO_M)
    for row, number in enumerate(located):
        evidence[number] = MarkingEvidence(
            float(solid[row]),
            0.0 if yellow is None else _yellow_odds(yellow[row][near[row]]),
        )
    return evidence


class _Places(NamedTuple):
    """Where K lines are sampled: N distances, 21 places across each.

    Attributes:
        row, column: (K, N, 21) of the picture.
        seen: (K, N) bool, whether the picture has all of them, and the line is there.
    """

    row: NDArray[np.intp]
    column: NDArray[np.intp]
    seen: NDArray[np.bool_]


def _places(lanes: Sequence[Lane], camera: CameraModel, width: int, height: int) -> _Places:
    polynomials = [lane.ground.polynomial for lane in lanes if lane.ground is not None]
    coefficients = np.stack([each.coefficients for each in polynomials])
    y = coefficients @ _POWERS
    ends = np.empty((2, *y.shape, 2))
    ends[..., 0] = _X_M
    ends[0, ..., 1], ends[1, ..., 1] = y + _SIDE_M, y - _SIDE_M
    pixels = camera.image_of(ends.reshape(-1, 2)).reshape(ends.shape)
    # From the middle of a pixel to its edge and back: the picture may have been made smaller.
    pixels = (pixels + 0.5) * (width / camera.lens.width, height / camera.lens.height) - 0.5
    ranges = np.array([(each.x_min_m, each.x_max_m) for each in polynomials])
    seen = (ranges[:, :1] <= _X_M) & (ranges[:, 1:] >= _X_M)
    # A line that leaves the picture at its side is seen no farther than its middle.
    inside = (pixels >= 0) & (pixels <= (width - 1, height - 1))
    seen &= inside[..., 0].all(axis=0) & inside[..., 1].all(axis=0)
    pixels[:, ~seen] = 0.0
    begin, end = pixels.transpose(0, 3, 1, 2)[..., None]
    column, row = (begin + 0.5 + _SHARE * (end - begin)).astype(np.intp)
    return _Places(row, column, seen)


def _black(image: Image) -> float:
    is_limited = image.pixel_format is not PixelFormat.BGR and (
        image.colour.range is ColourRange.LIMITED
    )
    return 16.0 if is_limited else 0.0


def _painted(luma: NDArray[np.uint8], seen: NDArray[np.bool_], black: float) -> NDArray[np.bool_]:
    """Return whether something narrow and bright is at each place along the lines, (K, N)."""
    ordered = np.sort(luma, axis=2).astype(np.float32)
    paint, road = ordered[..., _PAINT], ordered[..., _MIDDLE]
    uneven = road - ordered[..., _DARK]
    contrast = paint - road
    is_paint: NDArray[np.bool_] = contrast >= np.maximum(
        _LEAST_CONTRAST, _LEAST_PART * (paint - black)
    )
    is_paint &= contrast >= _LEAST_SPREADS * uneven
    is_paint &= seen
    return is_paint


def _solid_odds(painted: NDArray[np.bool_], seen: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the log odds of solid lines against dashed ones, (K,)."""
    cells = seen.shape[1] // _CELLS
    shape = len(seen), cells, _CELLS
    whole = seen[:, : cells * _CELLS].reshape(shape).all(axis=2)
    of_paint = np.count_nonzero(painted[:, : cells * _CELLS].reshape(shape), axis=2)
    is_filled = whole & (of_paint * 2 >= _CELLS)
    # Beyond the last paint the line may have left the places that were looked at.
    whole &= np.maximum.accumulate(is_filled[:, ::-1], axis=1)[:, ::-1]
    number = np.count_nonzero(whole, axis=1)
    filled = np.count_nonzero(is_filled, axis=1)
    odds: NDArray[np.float64] = filled * _ODDS_PAINTED + (number - filled) * _ODDS_BARE
    odds[number < _FEWEST_CELLS] = 0.0
    # The cells of one frame share its light, and the vehicles that hide a part.
    odds /= 1.5
    np.minimum(np.maximum(odds, -_MOST_EVIDENCE, out=odds), _MOST_EVIDENCE, out=odds)
    return odds


def _yellowness(
    image: Image, places: _Places, luma: NDArray[np.uint8]
) -> NDArray[np.float32] | None:
    """Return how much less blue the paint has than the road beside it, by luma, (K, N) float32;
    None where the picture has no colour."""
    if image.pixel_format is PixelFormat.GREY:
        return None
    # The brightest place is paint; of the two ends the one farther from it is road.
    peak = np.argmax(luma, axis=2)
    beside = np.where(peak > _MIDDLE, 0, _ACROSS - 1)
    at = np.arange(len(peak))[:, None], np.arange(peak.shape[1]), np.stack([peak, beside])
    paint, road = _blue_by_luma(image, places.row[at], places.column[at])
    return np.asarray(road - paint)


def _blue_by_luma(
    image: Image, row: NDArray[np.intp], column: NDArray[np.intp]
) -> NDArray[np.float32]:
    """Return U over Y, -0.5 to 0.5 for U and 0 to 1 for Y."""
    first = image.planes[0]
    if image.pixel_format is PixelFormat.BGR:
        pixels = first[row, column].astype(np.float32)
        luma = pixels @ _BGR_TO_LUMA
        return _ratio(np.float32(0.564) * (pixels[..., 0] - luma), luma)
    match image.pixel_format:
        case PixelFormat.YUY2:
            y, u = first[row, column, 0], first[row, column & ~1, 1]
        case PixelFormat.NV12:
            y, u = first[row, column], image.planes[1][row >> 1, column & ~1]
        case _:
            y, u = first[row, column], image.planes[1][row >> 1, column >> 1]
    return _ratio(u.astype(np.float32) - 128.0, y.astype(np.float32) - _black(image))


def _ratio(blue: NDArray[np.float32], luma: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(blue / np.maximum(luma, 16.0), np.float32)


def _yellow_odds(yellowness: NDArray[np.float32]) -> float:
    """Return the log odds of yellow against white, of the places with paint."""
    if len(yellowness) < _FEWEST_COLOURED:
        return 0.0
    # Neighbouring places are one patch of paint; two that are 2 m apart count apart.
    number = min(len(yellowness) / _CELLS + 1.0, 4.0)
    median = float(np.sort(yellowness)[len(yellowness) // 2])
    distance = max(-1.5, min(1.5, (median - _YELLOW) / _YELLOW_STD))
    return max(-_MOST_EVIDENCE, min(_MOST_EVIDENCE, number * distance))


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
