"""Where a camera looks, from the lanes of a straight drive: pitch, yaw, and height.

Parallel lines meet in the picture where the vehicle drives to, on the mean of a drive. How far they
part below that point is the lane's width in heights of the camera.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from edge_server.lanes.camera_model import Mounting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from edge_server.lanes.camera_model import Lens
    from edge_server.lanes.types import Lane

# Curvature times half of the camera's height: 1/700 m from a car.
_LARGEST_BEND = 1e-3
# Root mean square, of the focal length: 4 px of 1000.
_LARGEST_MISFIT = 0.004
# So far below the vanishing point the road is 25 heights of the camera away.
_NEAR_HORIZON = 0.04
_BELOW = 0.2
_STEPS = 12
_LARGEST_STEP = 0.05
_FEWEST_POINTS = 8
# The lines' slopes differ by less where they are one lane's boundaries seen from a car or a lorry.
_PLAUSIBLE_WIDTH_HEIGHTS = (0.8, 4.0)
# A vanishing point farther off is of lines that are no lane.
_LARGEST_ANGLE_RAD = math.radians(20.0)
FEWEST_FRAMES = 20
# Frames of one block err alike: a bend, a slope, a place in the lane.
_BLOCKS = 10


@dataclass(frozen=True)
class Spread:
    """The median of many measurements.

    Attributes:
        low, high: between which eight of ten lie.
        std: standard deviation of the median, from how it differs between ten parts of the drive.
    """

    median: float
    low: float
    high: float
    std: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        low, median, high = (float(each) for each in np.percentile(values, (10, 50, 90)))
        medians = [float(np.median(part)) for part in np.array_split(values, _BLOCKS)]
        return Spread(median, low, high, float(np.std(medians, ddof=1)) / math.sqrt(_BLOCKS))


@dataclass(frozen=True)
class MountingEstimate:
    """What a drive shows of a mounting; angles in radians, axes as in `Mounting`.

    Attributes:
        pitch_rad, yaw_rad: where straight lanes meet.
        width_heights: the ego lane's width over the height of the camera.
    """

    pitch_rad: Spread
    yaw_rad: Spread
    width_heights: Spread
    frames: int

    def height_m(self, lane_width_m: float) -> float:
        """Return the height of a camera above lanes of that width."""
        return lane_width_m / self.width_heights.median


class MountingEstimator:
    """Collects the frames of a drive in their order.

    Args:
        roll_rad: of the camera, which straight lanes do not show.

    Attributes:
        straight: number of those that show the ego lane's boundaries, and no bend.
    """

    def __init__(self, lens: Lens, roll_rad: float = 0.0) -> None:
        self.seen = 0
        self._lens = lens
        self._roll_rad = roll_rad
        self._found: list[tuple[float, float, float]] = []

    @property
    def straight(self) -> int:
        return len(self._found)

    def add(self, lanes: Sequence[Lane]) -> None:
        """Take in the lanes of the next frame, px."""
        self.seen += 1
        middle = self._lens.width / 2
        # Where each line comes to the bottom of the picture, or points to.
        feet = [(_foot_px(lane, self._lens.height), lane) for lane in lanes]
        left = max(((x, lane) for x, lane in feet if x <= middle), key=_first, default=None)
        right = min(((x, lane) for x, lane in feet if x > middle), key=_first, default=None)
        if left is None or right is None:
            return
        lines = [_rays(self._lens, lane, self._roll_rad) for _, lane in (left, right)]
        if lines[0] is None or lines[1] is None:
            return
        found = _meet(lines[0], lines[1])
        if found is not None:
            self._found.append(found)

    def estimate(self) -> MountingEstimate | None:
        """Return what the frames show; None where fewer than 20 are of straight road."""
        if self.straight < FEWEST_FRAMES:
            return None
        pitch, yaw, width = (Spread.of(column) for column in zip(*self._found, strict=True))
        return MountingEstimate(pitch, yaw, width, self.straight)


def mounting_of(
    estimate: MountingEstimate, height_m: float, given: Mounting, *, least_std_rad: float
) -> Mounting:
    """Return `given` with the estimated angles and that height."""
    return replace(
        given,
        height_m=height_m,
        pitch_rad=estimate.pitch_rad.median,
        yaw_rad=estimate.yaw_rad.median,
        pitch_std_rad=max(estimate.pitch_rad.std, least_std_rad),
        yaw_std_rad=max(estimate.yaw_rad.std, least_std_rad),
    )


def _first(pair: tuple[float, Lane]) -> float:
    return pair[0]


def _foot_px(lane: Lane, height_px: int) -> float:
    """Return x where the lane's lower half leads to the bottom of the picture."""
    lower = lane.points[: max(2, len(lane.points) // 2)].astype(np.float64)
    slope = (lower[-1, 0] - lower[0, 0]) / min(lower[-1, 1] - lower[0, 1], -1e-6)
    return float(lower[0, 0] + slope * (height_px - lower[0, 1]))


def _rays(lens: Lens, lane: Lane, roll_rad: float) -> NDArray[np.float64] | None:
    """Return the rays (N, 2) of a lane as of an upright camera; None where they are too few."""
    rays = lens.rays_of(lane.points).xy
    rays = rays[~np.isnan(rays[:, 0])]
    if len(rays) < _FEWEST_POINTS:
        return None
    # A camera whose right side is lower sees the road turned to the left: turn it back.
    cos, sin = math.cos(roll_rad), math.sin(roll_rad)
    return np.asarray(rays @ np.array([[cos, sin], [-sin, cos]]))


def _meet(
    left: NDArray[np.float64], right: NDArray[np.float64]
) -> tuple[float, float, float] | None:
    """Return pitch, yaw and the width in heights of two lines; None where they are no lane's.

    On a flat road, u below the vanishing point (x, y), a line at the offset m heights is seen at
    x + m u + c / u, where c is the road's curvature times half of the height. All five numbers
    follow from both lines at once.
    """
    points = np.concatenate([left, right])
    is_left = np.repeat([1.0, 0.0], [len(left), len(right)])
    near = [line[: max(_FEWEST_POINTS, len(line) * 2 // 3)] for line in (left, right)]
    (b_left, a_left), (b_right, a_right) = (np.polyfit(line[:, 1], line[:, 0], 1) for line in near)
    if abs(b_right - b_left) < 1e-6:
        return None
    y = float((a_left - a_right) / (b_right - b_left))
    values = np.zeros(4)
    for _ in range(_STEPS):
        u = points[:, 1] - y
        used = u > _NEAR_HORIZON
        if np.count_nonzero(used) < 2 * _FEWEST_POINTS:
            return None
        of_left, u = is_left[used], u[used]
        design = np.stack([np.ones(len(u)), of_left * u, (1 - of_left) * u, 1 / u], axis=1)
        values = np.linalg.lstsq(design, points[used, 0], rcond=None)[0]
        slope = of_left * values[1] + (1 - of_left) * values[2] - values[3] / u**2
        more = np.column_stack([design, -slope])
        residual = points[used, 0] - design @ values
        step = float(np.linalg.lstsq(more, residual, rcond=None)[0][4])
        y += max(-_LARGEST_STEP, min(_LARGEST_STEP, step))
    x, bend = float(values[0]), float(values[3])
    if (
        math.sqrt(float(np.mean(residual**2))) > _LARGEST_MISFIT
        or abs(bend) > _LARGEST_BEND
        or math.hypot(x, y) > math.tan(_LARGEST_ANGLE_RAD)
    ):
        return None
    yaw = math.atan(x)
    pitch = math.atan(-y * math.cos(yaw))
    # One place of each line suffices: on the road they are parallel.
    turn = Mounting(1.0, pitch, 0.0, yaw).rotation
    places = [turn @ (1.0, -(x + m * _BELOW), -(y + _BELOW)) for m in values[1:3]]
    across = [float(place[1] / -place[2]) for place in places]
    low, high = _PLAUSIBLE_WIDTH_HEIGHTS
    width = across[0] - across[1]
    return (pitch, yaw, width) if low < width < high else None
