"""Lanes on the road: ground points, polynomials with their covariance, and the vehicle among them.

The road is taken to be flat. All angles are in radians, all lengths in metres, axes as in ISO 8855.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edge_server.lanes.paint import image_lines
from edge_server.lanes.types import Ego, GroundLane, Polynomial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from edge_server.lanes.camera_model import CameraModel
    from edge_server.lanes.paint import ImageLines
    from edge_server.lanes.types import Lane

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
    """

    rad: float
    std_rad: float


@dataclass(frozen=True)
class Road:
    """What one frame's lanes say of the road.

    Attributes:
        lanes: in the order of the input, with index and ground where those are known.
        ego: the vehicle in its lane.
        pitch: from the convergence of the ego lane's boundaries; None where it does not show.
    """

    lanes: tuple[Lane, ...]
    ego: Ego
    pitch: PitchMeasurement | None


def road_of(
    lanes: Sequence[Lane],
    model: CameraModel,
    *,
    lines: ImageLines | None = None,
    pitch_std_rad: float | None = None,
) -> Road:
    """Return the lanes on the road, which of them bound the ego lane, and the vehicle between them.

    A lane of fewer than 4 points within range, or 5 m, has no ground.

    Args:
        lanes: with image points, px of frames of the model's size.
        lines: the lanes' points on their paint, see `on_paint`; as the network gives them by
            default.
        pitch_std_rad: of the model's pitch at this moment; that of its mounting by default.
    """
    if not lanes:
        return Road((), Ego(), None)
    mounting = model.mounting
    std_rad = mounting.pitch_std_rad if pitch_std_rad is None else pitch_std_rad
    lines = lines or image_lines(lanes, model)
    fits = _fit(lines, model, std_rad)
    grounds = [_ground_lane(fits, row) for row in range(len(lanes))]
    indices = _indices(grounds)
    located = tuple(
        replace(lane, ground=ground, index=index)
        for lane, ground, index in zip(lanes, grounds, indices, strict=True)
    )
    pitch = None
    if -1 in indices and 1 in indices:
        pitch = _pitch(fits, indices.index(-1), indices.index(1), model)
    return Road(located, ego_of(located), pitch)


class _Fits(NamedTuple):
    """Fits of K lanes with up to P points.

    Attributes:
        points: (K, P, 2) float32, x and y, of which the first `seen` are the lane's, by distance.
        seen: (K,), number of points.
        coefficients: (K, 4), NaN for a lane without ground.
        covariance: (K, 4, 4).
        noise: (K, 4, 4), the part of the covariance that is not common to all lanes.
    """

    points: NDArray[np.float32]
    seen: NDArray[np.intp]
    coefficients: NDArray[np.float64]
    covariance: NDArray[np.float64]
    noise: NDArray[np.float64]
    x_min: NDArray[np.float64]
    x_max: NDArray[np.float64]


def _fit(lines: ImageLines, model: CameraModel, pitch_std_rad: float) -> _Fits:
    """Fit all lanes at once: weighted least squares with a wide prior of the curvature.

    The errors of pixels count for each point; those of pitch and yaw are common to all points of a
    frame, and go into the covariance as such.
    """
    ground = model.ground_of_rays(lines.rays)
    yaw_std_rad = model.mounting.yaw_std_rad
    table = np.zeros((7, *lines.present.shape))
    # Along a row of the picture: which row a point has is known.
    table[:, lines.present] = np.stack(
        [*ground.points.T, ground.by_pixel[:, 1, 0], *ground.by_pitch.T, *ground.by_yaw.T]
    )
    is_there = lines.present & ~np.isnan(table[0])
    table[:, ~is_there] = 0.0
    x, y, sideways, pitch_x, pitch_y, yaw_x, yaw_y = table
    error = lines.error_px * sideways[..., None]
    variance = (error * error).sum(axis=2) + _FLOOR_STD_M**2
    common = (pitch_y * pitch_std_rad) ** 2 + (yaw_y * yaw_std_rad) ** 2
    weight = is_there / (variance + common)

    powers = np.ones((*x.shape, 4))
    powers[..., 1] = x / _UNIT_M
    for power in (2, 3):
        np.multiply(powers[..., power - 1], powers[..., 1], out=powers[..., power])
    weighted = powers * weight[..., None]
    x_min = np.min(np.where(is_there, x, np.inf), axis=1, initial=np.inf)
    x_max = np.max(np.where(is_there, x, -np.inf), axis=1, initial=-np.inf)
    count = np.count_nonzero(is_there, axis=1)
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
    # Places without a point have no gain.
    by_pitch, by_yaw = pitch_y - slope * pitch_x, yaw_y - slope * yaw_x
    # A line that does not have the form of a road is less certain than its points.
    misfit = np.maximum(1.0, (is_there * residual**2 / variance).sum(axis=1) / np.maximum(count, 1))
    of_points = gain @ error * np.sqrt(misfit)[:, None, None]
    noise = of_points @ of_points.transpose(0, 2, 1)
    noise += inverse @ (prior[:, :, None] * inverse)
    of_angles = gain @ np.stack([pitch_std_rad * by_pitch, yaw_std_rad * by_yaw], axis=2)
    covariance = noise + of_angles @ of_angles.transpose(0, 2, 1)
    unit = _SCALE[:, None] * _SCALE
    coefficients = np.where(known[:, None], coefficients * _SCALE, np.nan)
    order = np.argsort(np.where(is_there, x, np.inf), axis=1)
    points = np.stack([x, y], axis=2).astype(np.float32)
    points = points[np.arange(len(points))[:, None], order]
    return _Fits(points, count, coefficients, covariance * unit, noise * unit, x_min, x_max)


def _ground_lane(fits: _Fits, row: int) -> GroundLane | None:
    coefficients = fits.coefficients[row]
    if np.isnan(coefficients[0]):
        return None
    covariance = fits.covariance[row]
    ends = float(fits.x_min[row]), float(fits.x_max[row])
    polynomial = Polynomial(coefficients, covariance, *ends, covariance - fits.noise[row])
    return GroundLane(fits.points[row, : fits.seen[row]], polynomial)


def _indices(grounds: Sequence[GroundLane | None]) -> list[int]:
    """Return the index of each lane, see `Lane.index`, by its place beside the front axle."""
    indices = [0] * len(grounds)
    sides: dict[int, list[tuple[float, int]]] = {-1: [], 1: []}
    for place, ground in enumerate(grounds):
        if ground is None or ground.polynomial.covariance[0, 0] > _LARGEST_OFFSET_STD_M**2:
            continue
        y_m = float(ground.polynomial.coefficients[0])
        sides[-1 if y_m > 0 else 1].append((abs(y_m), place))
    for side, lanes in sides.items():
        lanes.sort()
        # The ego lane's boundary is not seen where the nearest one is a lane away.
        first = 1 if lanes and lanes[0][0] <= _FARTHEST_EGO_M else 2
        for rank, (_, place) in enumerate(lanes):
            indices[place] = side * (first + rank)
    return indices


def ego_of(lanes: Sequence[Lane]) -> Ego:
    """Return the vehicle in its lane, from the lanes with index -1 and 1 and their ground.

    Heading and curvature come from both boundaries, weighted by their certainty, or from the one
    that is seen; offset and width need both.
    """
    boundaries = {lane.index: lane.ground.polynomial for lane in lanes if lane.ground is not None}
    left, right = boundaries.get(-1), boundaries.get(1)
    seen = [polynomial for polynomial in (left, right) if polynomial is not None]
    slope, slope_std = _mean(seen, 1)
    heading = -math.atan(slope) if slope_std <= _LARGEST_HEADING_STD_RAD else None
    bend, bend_std = _mean(seen, 2)
    curvature = None
    if 2.0 * bend_std <= min(_LARGEST_CURVATURE_STD, max(_STRAIGHT_STD, 2.0 * abs(bend))):
        curvature = 2.0 * bend / (1.0 + slope * slope) ** 1.5
    offset = std = width = None
    if left is not None and right is not None:
        c0_left, c0_right = float(left.coefficients[0]), float(right.coefficients[0])
        cosine = math.cos(math.atan(slope))
        across = (c0_left - c0_right) * cosine
        if _PLAUSIBLE_WIDTH_M[0] <= across <= _PLAUSIBLE_WIDTH_M[1]:
            width = across
            offset = -0.5 * (c0_left + c0_right) * cosine
            # Their errors may be common: no better than their mean.
            std = 0.5 * sum(math.sqrt(each.covariance[0, 0]) for each in (left, right))
    return Ego(offset, std, heading, curvature, width)


def _mean(polynomials: Sequence[Polynomial], power: int) -> tuple[float, float]:
    """Return the weighted mean of one coefficient and its standard deviation, as if all erred
    alike."""
    if not polynomials:
        return 0.0, math.inf
    values = [float(each.coefficients[power]) for each in polynomials]
    stds = [math.sqrt(each.covariance[power, power]) for each in polynomials]
    weights = [std**-2 for std in stds]
    total = sum(weights)
    pairs = zip(values, weights, strict=True)
    mean = sum(value * weight for value, weight in pairs) / total
    return mean, sum(std * weight for std, weight in zip(stds, weights, strict=True)) / total


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
    return PitchMeasurement(factor * growth, std_rad)


# A vehicle leans by this much on its springs and over the road's waves, and swings back so fast.
# Braking is 1 to 2 degrees.
_SPRINGS_STD_RAD = math.radians(0.7)
_SPRINGS_S = 1.5
# What is left over on a straight, even road, beside the noise of the points.
_ROAD_STD_RAD = math.radians(0.1)
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

    A Kalman filter of one state that returns to zero where nothing is measured. Not thread-safe.

    Attributes:
        rad: positive nose down.

    Args:
        calibrated_std_rad: of the calibration's own pitch.
    """

    def __init__(self, calibrated_std_rad: float) -> None:
        self._resting = _SPRINGS_STD_RAD**2 + calibrated_std_rad**2
        self._variance = self._resting
        self._at_ns: int | None = None
        self.rad = 0.0

    @property
    def std_rad(self) -> float:
        return math.sqrt(self._variance)

    def predict(self, mono_ns: int) -> None:
        """Go on to the capture of the next frame, CLOCK_MONOTONIC, before it is located."""
        step_s = _LONGEST_STEP_S if self._at_ns is None else (mono_ns - self._at_ns) / 1e9
        self._at_ns = mono_ns
        keep = math.exp(-min(max(step_s, 0.0), _LONGEST_STEP_S) / _SPRINGS_S)
        self.rad *= keep
        self._variance = keep**2 * self._variance + (1.0 - keep**2) * self._resting

    def correct(self, measured: PitchMeasurement) -> None:
        """Take in what the frame shows, which was located with `rad`: the difference to it."""
        noise = measured.std_rad**2 + _ROAD_STD_RAD**2
        total = self._variance + noise
        if measured.rad**2 > _LARGEST_GAP_STD**2 * total:
            return
        gain = self._variance / total
        self.rad += gain * measured.rad
        self._variance *= 1.0 - gain


class PitchDrift:
    """Notices that the calibrated pitch has not been right for a minute of straight road.

    Not thread-safe.

    Attributes:
        rad: the median of the last minute where that is a drift, positive nose down; else None.
    """

    def __init__(self) -> None:
        self.rad: float | None = None
        self._samples: deque[tuple[int, float]] = deque(maxlen=_SAMPLES)

    def add(self, pitch_rad: float, curvature_1pm: float | None, mono_ns: int) -> None:
        """Take in one frame's pitch against the calibration; frames in bends are left out.

        Args:
            pitch_rad: positive nose down.
            curvature_1pm: of the road; None where it is not known.
            mono_ns: CLOCK_MONOTONIC of the capture.
        """
        if curvature_1pm is None or abs(curvature_1pm) > _STRAIGHT_CURVATURE:
            return
        samples = self._samples
        if samples and mono_ns - samples[-1][0] < _SAMPLE_PERIOD_S * 1e9:
            return
        samples.append((mono_ns, pitch_rad))
        while mono_ns - samples[0][0] > _OLDEST_SAMPLE_S * 1e9:
            samples.popleft()
        if len(samples) < _SAMPLES:
            return
        median = statistics.median(pitch for _, pitch in samples)
        threshold = DRIFT_RAD if self.rad is None else _DRIFT_OVER_RAD
        self.rad = median if abs(median) > threshold else None
