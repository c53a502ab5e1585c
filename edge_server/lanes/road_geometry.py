"""Lanes on the road: ground points, polynomials with their covariance, and the vehicle among them.

The road is taken to be flat. All angles are in radians, all lengths in metres, axes as in ISO 8855.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edge_server.lanes.paint import image_lines
from edge_server.lanes.types import Ego, GroundLane, Polynomial, ranked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from edge_server.lanes.camera_model import CameraModel
    from edge_server.lanes.paint import ImageLines
    from edge_server.lanes.types import Lane

# No road is a plane. Twice this is a crest or a sag of 10 km radius, about the least that standards
# allow on motorways (RAA, class EKA 1A: crests of 13 km, sags of 8.8 km).
_CREST_STD_PM = 1 / 20_000
# Paint and road are never better known than this.
_FLOOR_STD_M = 0.02
_FEWEST_POINTS = 4
_SHORTEST_M = 5.0
# A shorter line does not show how its curvature changes.
_SHORTEST_CUBIC_M = 15.0
# Roads, ramps included: curvature to 1/30 m, its change to 3e-4 per m2.
_CURVATURE_STD = 1 / 30
_CURVATURE_CHANGE_STD = 3e-4
# Conditions the normal equations; no unit of any result.
_UNIT_M = 30.0
_SCALE = _UNIT_M ** -np.arange(4.0)
_SLOPE = np.arange(1.0, 4.0) / _UNIT_M

# The ego lane's boundaries are nearer than this: the lane has 4.5 m at most.
_FARTHEST_EGO_M = 4.2
_PLAUSIBLE_WIDTH_M = (2.0, 6.0)
# Of what all lines have in common.
_CREST = 2
# What is less certain than this is not measured.
# A lane that begins far ahead still has its place, to half a lane.
_LARGEST_OFFSET_STD_M = 0.9
_LARGEST_HEADING_STD_RAD = math.radians(2.0)
_LARGEST_CURVATURE_STD = 1 / 200
# Bends of this radius are told from straight roads, or the bend is larger than its deviation.
_STRAIGHT_STD = 1 / 350
# The pitch shows where both boundaries are seen for so long, up to that distance.
_SHORTEST_SHARED_M = 8.0
_FARTHEST_SHARED_M = 35.0
_LARGEST_PITCH_STD_RAD = math.radians(1.0)


class PitchMeasurement(NamedTuple):
    """By how much more than the camera model says the camera looks down.

    Attributes:
        rad: positive nose down.
        std_rad: of noise in the image points.
        by_crest_m: its derivative by the road's vertical curvature, rad m.
    """

    rad: float
    std_rad: float
    by_crest_m: float = 0.0


@dataclass(frozen=True)
class Road:
    """What one frame's lanes say of the road.

    Attributes:
        lanes: in the order of the input, with index and ground where those are known.
        pitch: from the convergence of the ego lane's boundaries; None where it does not show.
    """

    lanes: tuple[Lane, ...]
    pitch: PitchMeasurement | None

    @property
    def ego(self) -> Ego:
        return ego_of(self.lanes)


def road_of(
    lanes: Sequence[Lane],
    model: CameraModel,
    *,
    lines: ImageLines | None = None,
    pitch: PitchFilter | None = None,
) -> Road:
    """Return the lanes on the road, which of them bound the ego lane, and the vehicle between them.

    A lane of fewer than 4 points within range, or 5 m, has no ground.

    Args:
        lanes: with image points, px of frames of the model's size.
        lines: the lanes' points on their paint, see `on_paint`; as the network gives them by
            default.
        pitch: of the vehicle, which `model` has; the frame corrects it, and the lanes are placed
            with that. Without it the pitch is the mounting's, as well as that is known.
    """
    if not lanes:
        return Road((), None)
    mounting = model.mounting
    errors = np.diag((mounting.pitch_std_rad, mounting.yaw_std_rad, _CREST_STD_PM))
    if pitch is not None:
        errors[0] = pitch.errors
    fits = _fit(lines or image_lines(lanes, model), model, errors)
    indices = _indices(fits, errors)
    measured, turned_rad = None, 0.0
    if -1 in indices and 1 in indices:
        measured = _pitch(fits, indices.index(-1), indices.index(1), model)
        if measured is not None and pitch is not None:
            turned_rad, errors[0] = pitch.correct(measured), pitch.errors
    places = zip(lanes, _grounds(fits, turned_rad, errors), indices, strict=True)
    located = [replace(lane, ground=ground, index=index) for lane, ground, index in places]
    return Road(tuple(located), measured)


class _Fits(NamedTuple):
    """Fits of K lanes with up to P points.

    Attributes:
        points: (K, P, 2), x and y, of the lane where `is_there`.
        by_pitch: (K, P, 2), their derivatives by the pitch, m/rad.
        coefficients: (K, 4), NaN for a lane without ground.
        noise: (K, 4, 4), what is not common to all lanes of their covariance.
        by_angles: (K, 4, 3), their derivatives by pitch, yaw and vertical curvature.
    """

    points: NDArray[np.float64]
    by_pitch: NDArray[np.float64]
    is_there: NDArray[np.bool_]
    coefficients: NDArray[np.float64]
    noise: NDArray[np.float64]
    by_angles: NDArray[np.float64]
    x_min: NDArray[np.float64]
    x_max: NDArray[np.float64]


def _fit(lines: ImageLines, model: CameraModel, errors: NDArray[np.float64]) -> _Fits:
    """Fit all lanes at once: weighted least squares with a wide prior of the curvature.

    The errors of pixels count for each point; those of pitch, yaw and vertical curvature are common
    to all points of a frame, and go into the covariance as such.

    Args:
        errors: (3, 3), the product with its transpose is the covariance of these three.
    """
    ground = model.ground_of_rays(lines.rays)
    mounting = model.mounting
    across = ground.points - mounting.position[:2]
    # Where the road has risen by a part of the camera's height, a point seems farther by that part.
    by_crest = across * (across[:, :1] ** 2 / (2 * mounting.height_m))
    table = np.zeros((9, *lines.present.shape))
    # Along a row of the picture: which row a point has is known.
    table[:, lines.present] = np.stack(
        [
            *ground.points.T,
            ground.by_pixel[:, 1, 0],
            *ground.by_pitch.T,
            *ground.by_yaw.T,
            *by_crest.T,
        ]
    )
    is_there = lines.present & ~np.isnan(table[0])
    table[:, ~is_there] = 0.0
    x, y, sideways = table[:3]
    by_x, by_y = np.moveaxis(table[3:].reshape(3, 2, *x.shape), 0, -1)
    error = lines.error_px * sideways[..., None]
    variance = (error * error).sum(axis=2) + _FLOOR_STD_M**2
    common = ((by_y @ errors) ** 2).sum(axis=2)
    weight = is_there / (variance + common)

    powers = np.ones((*x.shape, 4))
    powers[..., 1] = x / _UNIT_M
    for power in (2, 3):
        np.multiply(powers[..., power - 1], powers[..., 1], out=powers[..., power])
    weighted = powers * weight[..., None]
    x_min = np.where(is_there, x, np.inf).min(axis=1, initial=np.inf)
    x_max = x.max(axis=1, initial=-np.inf, where=is_there)
    count = is_there.sum(axis=1)
    known = (count >= _FEWEST_POINTS) & (x_max - x_min >= _SHORTEST_M)
    prior = np.zeros((len(x), 4))
    prior[:, 2] = (2.0 / _CURVATURE_STD / _UNIT_M**2) ** 2
    prior[:, 3] = (6.0 / _CURVATURE_CHANGE_STD / _UNIT_M**3) ** 2
    prior[x_max - x_min < _SHORTEST_CUBIC_M, 3] = 1e12
    normal = weighted.transpose(0, 2, 1) @ powers + prior[:, :, None] * np.eye(4)
    normal[~known] = np.eye(4)
    inverse = np.linalg.inv(normal)
    gain = inverse @ weighted.transpose(0, 2, 1)  # (K, 4, P): from y to the coefficients
    coefficients = (gain @ y[..., None])[..., 0]

    residual = y - (powers @ coefficients[..., None])[..., 0]
    slope = (powers[..., :3] @ (coefficients[:, 1:] * _SLOPE)[..., None])[..., 0]
    # A line that does not have the form of a road is less certain than its points.
    misfit = np.maximum(1.0, (is_there * residual**2 / variance).sum(axis=1) / np.maximum(count, 1))
    of_points = gain @ error * np.sqrt(misfit)[:, None, None]
    noise = of_points @ of_points.transpose(0, 2, 1)
    noise += inverse @ (prior[:, :, None] * inverse)
    # Places without a point have no gain.
    by_angles = gain @ (by_y - slope[..., None] * by_x)
    return _Fits(
        np.stack([x, y], axis=2),
        np.stack([by_x[..., 0], by_y[..., 0]], axis=2),
        is_there,
        np.where(known[:, None], coefficients * _SCALE, np.nan),
        noise * (_SCALE[:, None] * _SCALE),
        by_angles * _SCALE[:, None],
        x_min,
        x_max,
    )


def _grounds(
    fits: _Fits, turned_rad: float, errors: NDArray[np.float64]
) -> list[GroundLane | None]:
    """Return the lanes as of a camera that looks down by `turned_rad` more, None without ground.

    Args:
        errors: see `_fit`.
    """
    points = (fits.points + turned_rad * fits.by_pitch).astype(np.float32)
    order = np.argsort(np.where(fits.is_there, points[..., 0], np.inf), axis=1)
    points = points[np.arange(len(points))[:, None], order]
    coefficients = fits.coefficients + turned_rad * fits.by_angles[:, :, 0]
    by_angles = fits.by_angles @ errors
    covariance = fits.noise + by_angles @ by_angles.transpose(0, 2, 1)
    seen = fits.is_there.sum(axis=1).tolist()
    known = (~np.isnan(coefficients[:, 0])).tolist()
    grounds: list[GroundLane | None] = []
    for row, count in enumerate(seen):
        if not known[row]:
            grounds.append(None)
            continue
        ends = float(points[row, 0, 0]), float(points[row, count - 1, 0])
        polynomial = Polynomial(coefficients[row], covariance[row], *ends, by_angles[row])
        grounds.append(GroundLane(points[row, :count], polynomial))
    return grounds


def _indices(fits: _Fits, errors: NDArray[np.float64]) -> list[int]:
    """Return the index of each lane, see `Lane.index`, by its place beside the front axle."""
    variance = fits.noise[:, 0, 0] + ((fits.by_angles[:, 0] @ errors) ** 2).sum(axis=1)
    places = fits.coefficients[:, 0]
    known = ~np.isnan(places) & (variance <= _LARGEST_OFFSET_STD_M**2)
    pairs = zip(places.tolist(), known.tolist(), strict=True)
    lefts = [left if is_known else None for left, is_known in pairs]
    return ranked(lefts, _FARTHEST_EGO_M)


def ego_of(lanes: Sequence[Lane]) -> Ego:
    """Return the vehicle in its lane, from the lanes with index -1 and 1 and their ground.

    Heading and curvature come from both boundaries, weighted by their certainty, or from the one
    that is seen; offset and width need both.
    """
    boundaries = {lane.index: lane.ground.polynomial for lane in lanes if lane.ground is not None}
    left, right = boundaries.get(-1), boundaries.get(1)
    seen = [polynomial for polynomial in (left, right) if polynomial is not None]
    slope, slope_std = _mean(seen, 1)
    heading = heading_std = None
    if slope_std <= _LARGEST_HEADING_STD_RAD:
        heading, heading_std = -math.atan(slope), slope_std / (1.0 + slope * slope)
    bend, bend_std = _mean(seen, 2)
    curvature = curvature_std = None
    if 2.0 * bend_std <= min(_LARGEST_CURVATURE_STD, max(_STRAIGHT_STD, 2.0 * abs(bend))):
        shortened = (1.0 + slope * slope) ** 1.5
        curvature, curvature_std = 2.0 * bend / shortened, 2.0 * bend_std / shortened
    offset = offset_std = width = width_std = None
    if left is not None and right is not None:
        c0_left, c0_right = float(left.coefficients[0]), float(right.coefficients[0])
        cosine = math.cos(math.atan(slope))
        across = (c0_left - c0_right) * cosine
        if _PLAUSIBLE_WIDTH_M[0] <= across <= _PLAUSIBLE_WIDTH_M[1]:
            width = across
            offset = -0.5 * (c0_left + c0_right) * cosine
            offset_std = _std((left, right), (0.5, 0.5), 0) * cosine
            width_std = _std((left, right), (1.0, -1.0), 0) * cosine
    return Ego(
        offset,
        offset_std,
        heading,
        curvature,
        width,
        heading_error_std_rad=heading_std,
        curvature_std_1pm=curvature_std,
        lane_width_std_m=width_std,
    )


def _mean(polynomials: Sequence[Polynomial], power: int) -> tuple[float, float]:
    """Return the mean of one coefficient, weighted by its certainty, and its standard deviation."""
    if not polynomials:
        return 0.0, math.inf
    weights = [1.0 / float(each.covariance[power, power]) for each in polynomials]
    total = sum(weights)
    shares = [weight / total for weight in weights]
    pairs = zip(polynomials, shares, strict=True)
    mean = sum(float(each.coefficients[power]) * share for each, share in pairs)
    return mean, _std(polynomials, shares, power)


def _std(polynomials: Sequence[Polynomial], shares: Sequence[float], power: int) -> float:
    """Return the standard deviation of a sum of one coefficient of lines of one frame.

    Angles of the camera move all lines: an error of the yaw does not change the lane's width.
    """
    variance, together = 0.0, np.zeros(polynomials[0].by_angles.shape[1])
    for each, share in zip(polynomials, shares, strict=True):
        of_angles = each.by_angles[power]
        together = together + share * of_angles
        variance += share**2 * float(each.covariance[power, power] - of_angles @ of_angles)
    return math.sqrt(max(0.0, variance) + float(together @ together))


def _pitch(fits: _Fits, left: int, right: int, model: CameraModel) -> PitchMeasurement | None:
    """Return how much further down the camera looks, from how the ego lane widens with distance.

    On a flat road the boundaries are parallel. A camera that looks down by d more than the model
    says sees the distance between them grow by width * d / height per metre.
    """
    mounting = model.mounting
    begin = float(max(fits.x_min[left], fits.x_min[right]))
    end = float(min(fits.x_max[left], fits.x_max[right], _FARTHEST_SHARED_M))
    if end - begin < _SHORTEST_SHARED_M:
        return None
    at = np.array([[1.0, x, x * x, x * x * x] for x in (begin, end)])
    apart = fits.coefficients[left] - fits.coefficients[right]
    # Across the road, where it turns away from the vehicle's direction.
    middle = 0.5 * (fits.coefficients[left] + fits.coefficients[right])
    slopes = at[:, :3] @ (middle[1:] * (1.0, 2.0, 3.0))
    near, far = (at @ apart / np.hypot(1.0, slopes)).tolist()
    # Extrapolated to the camera, where the pitch has no effect.
    growth = (far - near) / (end - begin)
    width = near - growth * (begin - mounting.x_m)
    if not _PLAUSIBLE_WIDTH_M[0] <= width <= _PLAUSIBLE_WIDTH_M[1]:
        return None
    per_m = (at[1] - at[0]) / (end - begin)
    variance = per_m @ (fits.noise[left] + fits.noise[right]) @ per_m
    factor = mounting.height_m / width
    std_rad = factor * math.sqrt(variance)
    if std_rad > _LARGEST_PITCH_STD_RAD:
        return None
    by_crest = per_m @ (fits.by_angles[left, :, _CREST] - fits.by_angles[right, :, _CREST])
    return PitchMeasurement(factor * growth, std_rad, factor * float(by_crest))


# A vehicle leans by this much on its springs and over the road's waves, and swings back so fast.
# Braking is 1 to 2 degrees.
_SPRINGS_STD_RAD = math.radians(0.7)
_SPRINGS_S = 1.5
# What is left over on a straight and flat road beside the noise of the points: 0.02 degrees of the
# drawn roads of benchmarks/paint.py.
_ROAD_STD_RAD = math.radians(0.02)
# A measurement that is farther off is of lines that part, no pitch.
_LARGEST_GAP_STD = 4.0
_LONGEST_STEP_S = 1.0

# Drift is the median of a minute's samples on straight road: braking, crests and slip roads are
# shorter than half of it.
DRIFT_RAD = math.radians(0.5)
_DRIFT_OVER_RAD = math.radians(0.4)
_STRAIGHT_CURVATURE = 1 / 1000
_SAMPLE_PERIOD_S = 0.5
_SAMPLES = 120
# Samples of straight road between bends count together.
_OLDEST_SAMPLE_S = 300.0


class PitchFilter:
    """Estimates by how much the camera looks down further than calibrated, frame by frame.

    A Kalman filter of one state that returns to zero where nothing is measured; crests and sags,
    which outlast it, go into its error as such. Not thread-safe.

    Attributes:
        rad: positive nose down.
        by_crest_m: the derivative of `rad` by the road's vertical curvature, rad m.

    Args:
        calibrated_std_rad: of the calibration's own pitch.
    """

    def __init__(self, calibrated_std_rad: float) -> None:
        self._resting = _SPRINGS_STD_RAD**2 + calibrated_std_rad**2
        self._variance = self._resting
        self._at_ns: int | None = None
        self._of_points = 0.0
        self.rad = self.by_crest_m = 0.0

    @property
    def std_rad(self) -> float:
        """Of its error but for that of crests and sags."""
        return math.sqrt(self._variance)

    @property
    def errors(self) -> tuple[float, float, float]:
        """What one standard deviation of the pitch's own error, of the yaw and of the road's
        vertical curvature make of the error of the pitch, rad. The noise of the frame's points is
        in that of its lanes already."""
        own_rad = math.sqrt(max(0.0, self._variance - self._of_points))
        return own_rad, 0.0, self.by_crest_m * _CREST_STD_PM

    def predict(self, mono_ns: int) -> None:
        """Go on to the capture of the next frame, CLOCK_MONOTONIC, before it is located."""
        step_s = _LONGEST_STEP_S if self._at_ns is None else (mono_ns - self._at_ns) / 1e9
        self._at_ns = mono_ns
        keep = math.exp(-min(max(step_s, 0.0), _LONGEST_STEP_S) / _SPRINGS_S)
        self.rad *= keep
        self.by_crest_m *= keep
        self._of_points = 0.0
        self._variance = keep**2 * self._variance + (1.0 - keep**2) * self._resting

    def correct(self, measured: PitchMeasurement) -> float:
        """Take in what the frame shows, which was located with `rad`: the difference to it. Return
        the change of `rad`."""
        noise = measured.std_rad**2 + _ROAD_STD_RAD**2
        total = self._variance + noise
        of_crest = measured.by_crest_m - self.by_crest_m
        if measured.rad**2 > _LARGEST_GAP_STD**2 * (total + (of_crest * _CREST_STD_PM) ** 2):
            return 0.0
        gain = self._variance / total
        self.rad += gain * measured.rad
        self.by_crest_m += gain * of_crest
        self._variance *= 1.0 - gain
        self._of_points = (gain * measured.std_rad) ** 2
        return gain * measured.rad


# Frames of one block err alike: a bend, a slope, a place in the lane.
_BLOCKS = 10
# Errors of 50 rendered drives of a minute, and of 20 short ones, are as large as this makes them.
_IN_COMMON = 0.25
_EIGHT_OF_TEN_STDS = 2.56


@dataclass(frozen=True)
class Spread:
    """The median of many measurements.

    Attributes:
        low, high: between which eight of ten lie.
        std: standard deviation of the median: from how it differs between ten parts of the drive,
            and a part of that of single frames, which slopes and bends have in common.
    """

    median: float
    low: float
    high: float
    std: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        low, median, high = (float(each) for each in np.percentile(values, (10, 50, 90)))
        medians = [float(np.median(part)) for part in np.array_split(values, _BLOCKS)]
        of_parts = float(np.std(medians, ddof=1)) / math.sqrt(_BLOCKS)
        of_frames = (high - low) / _EIGHT_OF_TEN_STDS
        return Spread(median, low, high, math.hypot(of_parts, _IN_COMMON * of_frames))


class PitchDrift:
    """Notices that the calibrated pitch has not been right for a minute of straight road.

    Not thread-safe.

    Attributes:
        pitch: of the last minute where its median is a drift, rad, positive nose down; else None.
    """

    def __init__(self) -> None:
        self.pitch: Spread | None = None
        self._samples: deque[tuple[int, float]] = deque(maxlen=_SAMPLES)

    def is_due(self, mono_ns: int) -> bool:
        """Return whether a sample counts that was captured then."""
        samples = self._samples
        return not samples or mono_ns - samples[-1][0] >= _SAMPLE_PERIOD_S * 1e9

    def add(self, pitch_rad: float, curvature_1pm: float | None, mono_ns: int) -> None:
        """Take in one frame's pitch against the calibration; frames in bends are left out.

        Args:
            pitch_rad: positive nose down.
            curvature_1pm: of the road; None where it is not known.
            mono_ns: CLOCK_MONOTONIC of the capture.
        """
        if curvature_1pm is None or abs(curvature_1pm) > _STRAIGHT_CURVATURE:
            return
        if not self.is_due(mono_ns):
            return
        samples = self._samples
        samples.append((mono_ns, pitch_rad))
        while mono_ns - samples[0][0] > _OLDEST_SAMPLE_S * 1e9:
            samples.popleft()
        if len(samples) < _SAMPLES:
            return
        pitch = Spread.of([pitch for _, pitch in samples])
        threshold = DRIFT_RAD if self.pitch is None else _DRIFT_OVER_RAD
        self.pitch = pitch if abs(pitch.median) > threshold else None
