"""Where a camera looks, from the paint of a straight drive: pitch, yaw, and height.

Parallel lines meet in the picture where the vehicle drives to, on the mean of a drive. How far they
part below that point is the lane's width in heights of the camera. The dashes of one line are
equally far apart, near and far, unless the lines do not meet at the horizon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edge_server.lanes.camera_model import CameraModel, Mounting
from edge_server.lanes.paint import DISTANCES_M, on_paint
from edge_server.lanes.road_geometry import Spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from edge_server.lanes.camera_model import Lens
    from edge_server.lanes.types import Lane
    from edge_server.pixels import Image

# Curvature times half of the camera's height: 1/700 m from a car.
_LARGEST_BEND = 1e-3
# Root mean square, of the focal length: 4 px of 1000.
_LARGEST_MISFIT = 0.004
# So far below the vanishing point the road is 25 heights of the camera away; lines on their paint
# are relied upon to 50.
_NEAR_HORIZON, _PAINTED_NEAR_HORIZON = 0.04, 0.02
# A frame counts where both lines have paint at this number of distances, and of those from 15 m on.
_FEWEST_PAINTED, _FEWEST_FAR, _FAR_M = 8, 4, 15.0
_LANE_M = 3.6
# Shorter paint is a reflector, longer a solid line.
_DASH_M = (1.5, 5.5)
_FEWEST_DASHES = 20
_NEAR_HEIGHTS, _FAR_HEIGHTS = 9.0, 12.0
_SPACING_ALIKE = 0.35
_BELOW = 0.2
_STEPS = 12
# Lines move onto the paint that a camera sees, which follows from the lines.
_TURNS = 2
_LARGEST_STEP = 0.05
_FEWEST_POINTS = 8
# The lines' slopes differ by less where they are one lane's boundaries seen from a car or a lorry.
_PLAUSIBLE_WIDTH_HEIGHTS = (0.8, 4.0)
# A vanishing point farther off is of lines that are no lane.
_LARGEST_ANGLE_RAD = math.radians(20.0)
FEWEST_FRAMES = 20


@dataclass(frozen=True)
class MountingEstimate:
    """What a drive shows of a mounting; angles in radians, axes as in `Mounting`.

    Attributes:
        pitch_rad, yaw_rad: where straight lanes meet.
        width_heights: the ego lane's width over the height of the camera.
        near_dashes, far_dashes: from a dash's middle to the next one's, over that height; None
            where too few are seen.
    """

    pitch_rad: Spread
    yaw_rad: Spread
    width_heights: Spread
    frames: int
    near_dashes: Spread | None
    far_dashes: Spread | None

    @property
    def dashes_apart(self) -> tuple[float, float] | None:
        """How much farther apart dashes are far away than near, as a part, and its standard
        deviation; None where too few are seen."""
        near, far = self.near_dashes, self.far_dashes
        if near is None or far is None:
            return None
        ratio = far.median / near.median
        return ratio - 1.0, ratio * math.hypot(near.std / near.median, far.std / far.median)

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
        self._dashes: list[tuple[float, float, int]] = []

    @property
    def straight(self) -> int:
        return len(self._found)

    def add(self, lanes: Sequence[Lane], image: Image | None = None) -> None:
        """Take in the lanes of the next frame, px.

        Args:
            image: the frame, in which the lines are moved onto their paint; one without it does not
                count. Without an image the lines are taken as they are.
        """
        self.seen += 1
        middle = self._lens.width / 2
        # Where each line comes to the bottom of the picture, or points to.
        feet = [(_foot_px(lane, self._lens.height), lane) for lane in lanes]
        left = max(((x, lane) for x, lane in feet if x <= middle), key=_first, default=None)
        right = min(((x, lane) for x, lane in feet if x > middle), key=_first, default=None)
        if left is None or right is None:
            return
        pair = left[1], right[1]
        lines = [_Line.of(self._lens.rays_of(lane.points).xy, self._roll_rad) for lane in pair]
        found = _meet(lines, _NEAR_HORIZON)
        for _ in range(_TURNS if image is not None else 0):
            if image is not None and found is not None:
                found = self._on_paint(pair, image, found)
        if found is not None:
            self._found.append(found)

    def _on_paint(
        self, pair: tuple[Lane, Lane], image: Image, found: tuple[float, float, float]
    ) -> tuple[float, float, float] | None:
        """Return what `_meet` says of the paint, seen by the camera that `found` makes."""
        pitch, yaw, width = found
        mounting = Mounting(_LANE_M / width, pitch, self._roll_rad, yaw)
        lines, _ = on_paint(pair, image, CameraModel(self._lens, mounting))
        far = lines.painted[:, DISTANCES_M > _FAR_M]
        painted = [int(np.count_nonzero(each, axis=1).min()) for each in (lines.painted, far)]
        if painted[0] < _FEWEST_PAINTED or painted[1] < _FEWEST_FAR:
            return None
        for of_line in lines.painted:
            # Of an upright camera: rows below the horizon go with the inverse of the distance.
            at = [mounting.height_m / x_m - math.tan(pitch) for x_m in _dashes_m(of_line)]
            for number, y in enumerate(at):
                self._dashes += [(y, other, step) for step, other in enumerate(at[number + 1 :])]
        first = int(np.count_nonzero(lines.present[0]))
        std = np.sqrt((lines.error_px**2).sum(axis=2))[lines.present]
        parts = slice(first), slice(first, None)
        return _meet(
            [_Line.of(lines.rays.xy[part], self._roll_rad, std[part]) for part in parts],
            _PAINTED_NEAR_HORIZON,
        )

    def estimate(self) -> MountingEstimate | None:
        """Return what the frames show; None where fewer than 20 are of straight road."""
        if self.straight < FEWEST_FRAMES:
            return None
        pitch, yaw, width = (Spread.of(column) for column in zip(*self._found, strict=True))
        dashes = np.array(self._dashes).reshape(-1, 3)
        begin, end = 1.0 / (dashes[:, :2].T + math.tan(pitch.median))
        apart = end - begin
        near = _spread(apart[(begin < _NEAR_HEIGHTS) & (dashes[:, 2] == 0)])
        far = None
        if near is not None:
            # Far away a reflector between two dashes looks like one.
            is_alike = np.abs(apart / near.median - 1.0) < _SPACING_ALIKE
            far = _spread(apart[(begin > _FAR_HEIGHTS) & is_alike])
        return MountingEstimate(pitch, yaw, width, self.straight, near, far)


def _spread(values: NDArray[np.float64]) -> Spread | None:
    return Spread.of(values.tolist()) if len(values) >= _FEWEST_DASHES else None


def _dashes_m(painted: NDArray[np.bool_]) -> list[float]:
    """Return the middles of the dashes that are seen whole, the nearest first, m."""
    changes = np.flatnonzero(np.diff(painted))
    begins, ends = (changes[painted[changes + 1] == begins] for begins in (True, False))
    ends = ends[ends > begins[0]] if len(begins) else ends
    middles = []
    for begin, end in zip(begins, ends, strict=False):
        # Between two of the distances.
        first_m, last_m = ((DISTANCES_M[at] + DISTANCES_M[at + 1]) / 2 for at in (begin, end))
        if _DASH_M[0] <= last_m - first_m <= _DASH_M[1]:
            middles.append(float(first_m + last_m) / 2)
    return middles


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


class _Line(NamedTuple):
    """The rays (N, 2) of a line as of an upright camera, and their weight, (N,)."""

    rays: NDArray[np.float64]
    weight: NDArray[np.float64]

    @staticmethod
    def of(
        rays: NDArray[np.float64], roll_rad: float, std: NDArray[np.float64] | None = None
    ) -> _Line:
        # A camera whose right side is lower sees the road turned to the left: turn it back.
        cos, sin = math.cos(roll_rad), math.sin(roll_rad)
        weight = np.ones(len(rays)) if std is None else 1.0 / std
        there = ~np.isnan(rays[:, 0])
        return _Line(rays[there] @ np.array([[cos, sin], [-sin, cos]]), weight[there])


def _meet(lines: Sequence[_Line], near_horizon: float) -> tuple[float, float, float] | None:
    """Return pitch, yaw and the width in heights of two lines; None where they are no lane's.

    On a flat road, u below the vanishing point (x, y), a line at the offset m heights is seen at
    x + m u + c / u, where c is the road's curvature times half of the height. All five numbers
    follow from both lines at once.
    """
    if min(len(line.rays) for line in lines) < _FEWEST_POINTS:
        return None
    points = np.concatenate([line.rays for line in lines])
    weights = np.concatenate([line.weight for line in lines])
    is_left = np.repeat([1.0, 0.0], [len(line.rays) for line in lines])
    near = [line.rays[: max(_FEWEST_POINTS, len(line.rays) * 2 // 3)] for line in lines]
    (b_left, a_left), (b_right, a_right) = (np.polyfit(line[:, 1], line[:, 0], 1) for line in near)
    if abs(b_right - b_left) < 1e-6:
        return None
    y = float((a_left - a_right) / (b_right - b_left))
    values = np.zeros(4)
    for _ in range(_STEPS):
        u = points[:, 1] - y
        used = u > near_horizon
        if np.count_nonzero(used) < 2 * _FEWEST_POINTS:
            return None
        of_left, u, weight = is_left[used], u[used], weights[used]
        design = np.stack([np.ones(len(u)), of_left * u, (1 - of_left) * u, 1 / u], axis=1)
        of_x = weight * points[used, 0]
        values = np.linalg.lstsq(design * weight[:, None], of_x, rcond=None)[0]
        slope = of_left * values[1] + (1 - of_left) * values[2] - values[3] / u**2
        more = np.column_stack([design, -slope]) * weight[:, None]
        residual = points[used, 0] - design @ values
        step = float(np.linalg.lstsq(more, weight * residual, rcond=None)[0][4])
        y += max(-_LARGEST_STEP, min(_LARGEST_STEP, step))
    x, bend = float(values[0]), float(values[3])
    if (
        math.sqrt(float(np.average(residual**2, weights=weight**2))) > _LARGEST_MISFIT
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
