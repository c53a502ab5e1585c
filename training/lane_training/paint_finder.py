"""Where the paint of a line is in a picture: found without labels, apart from what the server does.

A ridge is brighter than the road on both of its sides. From the lower end of a line, where it lies
on its paint, the path of the strongest ridge is followed upwards in a wide window by dynamic
programming over the rows, with one width for the whole line; a curve through the path leaves out
what is no paint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

LANE_M, PAINT_M = 3.6, 0.13
STEP_PX = 0.5
# A stroke, a broad one, and the two of a double line.
WIDTHS_M = (PAINT_M, 1.6 * PAINT_M, 2.6 * PAINT_M)
# The window: this part of the picture's width, or of the lane's width in that row.
WINDOW_WIDTHS, WINDOW_LANES = 0.03, 0.42
LEAST_LEVELS, ENOUGH_LEVELS = 8.0, 30.0
# What a step aside by STEP_PX from row to row costs, in rows of clear paint; and the window's edge.
BEND_COST, EDGE_COST = 0.12, 0.15
MOST_STEPS = 3
FEWEST_ROWS = 12
# Nearer to the horizon, of the lowest row, a slope of the road counts for more than the pitch.
NEAR_HORIZON = 0.025
# So many parts of each line are left out in turn.
PARTS = 8


class Scale(NamedTuple):
    """The size of the road in a picture, from the lower halves of the own lane's lines.

    Attributes:
        horizon_px: the row in which they meet.
        per_row: by how much the lane widens in each row below it, px.
    """

    horizon_px: float
    per_row: float

    def metre_px(self, rows: Floats) -> Floats:
        return np.maximum(rows - self.horizon_px, 1.0) * self.per_row / LANE_M


@dataclass(frozen=True, eq=False)
class Paint:
    """The paint of one line.

    Attributes:
        rows: (N,) rows in which it is seen, downwards.
        x_px: (N,) its middle there.
        looked: number of rows that were looked at.
    """

    rows: Floats
    x_px: Floats
    looked: int

    @property
    def share(self) -> float:
        return len(self.rows) / max(self.looked, 1)


def scale_of(left: Floats, right: Floats) -> Scale | None:
    """Return the scale of a picture with these own lines (N, 2); None where they do not part
    downwards."""
    fits = [np.polyfit(line[:, 1], line[:, 0], 1) for line in map(_lower_half, (left, right))]
    per_row = float(fits[1][0] - fits[0][0])
    if per_row < 0.3:
        return None
    return Scale(float((fits[0][1] - fits[1][1]) / per_row), per_row)


def _lower_half(line: Floats) -> Floats:
    middle = (line[:, 1].max() + line[:, 1].min()) / 2
    lower = line[line[:, 1] >= middle]
    return lower if len(lower) >= 4 else line


def find_paint(luma: NDArray[np.uint8], line: Floats, scale: Scale) -> Paint:
    """Return the paint beside a line.

    Args:
        luma: (H, W).
        line: (N, 2) x and y in px, in any order.
    """
    height, width = luma.shape
    line = line[np.argsort(line[:, 1])].astype(np.float64)
    top = max(line[0, 1], scale.horizon_px + 0.006 * height, 0.0)
    rows = np.arange(np.ceil(top), np.floor(min(line[-1, 1], height - 1)) + 1)
    if len(rows) < FEWEST_ROWS:
        return Paint(np.empty(0), np.empty(0), len(rows))
    base = np.interp(rows, line[:, 1], line[:, 0])
    metre = scale.metre_px(rows)
    window = np.minimum(WINDOW_WIDTHS * width, WINDOW_LANES * LANE_M * metre)
    reach = int(np.ceil(window.max() / STEP_PX))
    offsets = np.arange(-reach, reach + 1) * STEP_PX
    places, off = base[:, None] + offsets, offsets / window[:, None]
    at = rows.astype(np.intp)
    # A line has one width: of a double line now one stroke and now both would be followed.
    found = [_strokes(luma, at, places, off, wide_m * metre) for wide_m in WIDTHS_M]
    _, strength, x = max(found, key=lambda each: each[0])
    seen = strength >= LEAST_LEVELS
    seen &= _on_curve(rows, x, seen, scale, np.maximum(1.5, 0.3 * PAINT_M * metre))
    return Paint(rows[seen], x[seen], len(rows))


def _strokes(
    luma: NDArray[np.uint8], rows: NDArray[np.intp], places: Floats, off: Floats, wide_px: Floats
) -> tuple[float, Floats, Floats]:
    """Return what the best path of strokes `wide_px` (N,) is worth, and in each row the strength
    and the middle of its stroke, (N,).

    Args:
        places: (N, S) x at which a stroke may be.
        off: (N, S) how far from the line that is, of the window.
    """
    ridge = _ridge(luma, rows, places, wide_px)
    ridge[np.abs(off) > 1.0] = 0.0
    reward = np.clip(ridge / ENOUGH_LEVELS, 0.0, 1.0) - EDGE_COST * np.minimum(off**2, 4.0)
    path = _path(reward[::-1])[::-1, None]
    worth = float(np.take_along_axis(reward, path, 1).sum())
    # The ridge's top near the path.
    near = np.clip(path + np.arange(-2, 3), 0, places.shape[1] - 1)
    strength = np.take_along_axis(ridge, near, 1)
    at = np.take_along_axis(near, strength.argmax(1)[:, None], 1)
    x = np.take_along_axis(places, at, 1)[:, 0]
    return worth, strength.max(1), _middle(luma, rows, x, wide_px)


def _ridge(luma: NDArray[np.uint8], rows: NDArray[np.intp], x: Floats, paint_px: Floats) -> Floats:
    """Return how many levels a stroke at (N, S) `x` is brighter than the brighter of its sides."""
    sums = np.zeros((len(rows), luma.shape[1] + 1))
    np.cumsum(luma[rows], axis=1, out=sums[:, 1:])

    def mean(begin: Floats, end: Floats) -> Floats:
        return (_at(sums, end) - _at(sums, begin)) / (end - begin)

    wide = np.maximum(paint_px, 2.0)[:, None]
    centre = mean(x - wide / 2, x + wide / 2)
    left = mean(x - 1.75 * wide, x - 0.75 * wide)
    right = mean(x + 0.75 * wide, x + 1.75 * wide)
    return centre - np.maximum(left, right)


def _middle(luma: NDArray[np.uint8], rows: NDArray[np.intp], x: Floats, paint_px: Floats) -> Floats:
    """Return the middle of the brightness above the road's, near (N,) `x`."""
    reach = np.maximum(1.6 * paint_px, 2.5)[:, None]
    share = np.linspace(-1.0, 1.0, 49)
    for _ in range(2):
        places = np.clip(x[:, None] + reach * share, 0.0, luma.shape[1] - 1.001)
        whole = places.astype(np.intp)
        part = places - whole
        levels = luma[rows[:, None], whole] * (1 - part) + luma[rows[:, None], whole + 1] * part
        road = np.maximum(np.median(levels[:, :12], 1), np.median(levels[:, -12:], 1))[:, None]
        above = np.maximum(levels - road - 0.3 * (levels.max(1)[:, None] - road), 0.0)
        x = x + (above * reach * share).sum(1) / np.maximum(above.sum(1), 1e-6)
    return x


def _at(sums: Floats, edge: Floats) -> Floats:
    """Return the sums of a row up to an edge between pixels' middles."""
    place = np.clip(edge + 0.5, 0.0, sums.shape[1] - 1.001)
    whole = place.astype(np.intp)
    row = np.arange(len(sums))[:, None]
    part = place - whole
    result: Floats = sums[row, whole] * (1 - part) + sums[row, whole + 1] * part
    return result


def _path(reward: Floats) -> NDArray[np.intp]:
    """Return the place in each row, from the first on, whose sum of rewards is the largest."""
    places = reward.shape[1]
    total = reward[0].copy()
    came = np.zeros(reward.shape, np.int8)
    steps = np.arange(-MOST_STEPS, MOST_STEPS + 1)
    padded = np.full(places + 2 * MOST_STEPS, -np.inf)
    for number in range(1, len(reward)):
        padded[MOST_STEPS:-MOST_STEPS] = total
        options = np.stack(
            [padded[MOST_STEPS + s : MOST_STEPS + s + places] - BEND_COST * s * s for s in steps]
        )
        best = options.argmax(axis=0)
        came[number] = steps[best]
        total = options[best, np.arange(places)] + reward[number]
    path = np.empty(len(reward), np.intp)
    path[-1] = int(total.argmax())
    for number in range(len(reward) - 1, 0, -1):
        path[number - 1] = path[number] + came[number, path[number]]
    return path


def _on_curve(
    rows: Floats, x: Floats, seen: NDArray[np.bool_], scale: Scale, near_px: Floats
) -> NDArray[np.bool_]:
    """Return which rows lie on the smooth curve of most of those that are seen."""
    if seen.sum() < FEWEST_ROWS:
        return np.zeros(len(rows), bool)
    u = np.maximum(rows - scale.horizon_px, 1.0)
    far = 0.02 * rows[-1]
    design = np.stack([np.ones(len(u)), u / u[-1], far / (u + far), (far / (u + far)) ** 2], axis=1)
    weight = seen.astype(np.float64)
    miss = np.zeros(len(rows))
    for wide in (8.0, 5.0, 3.0, 2.0, 1.5, 1.5):
        root = np.sqrt(weight)[:, None]
        fit = np.linalg.lstsq(design * root, x * root[:, 0], rcond=None)[0]
        miss = np.abs(x - design @ fit)
        weight = seen * np.clip(1 - (miss / (wide * near_px)) ** 2, 0, 1) ** 2
        if weight.sum() < FEWEST_ROWS / 2:
            return np.zeros(len(rows), bool)
    return miss <= near_px


class Meeting(NamedTuple):
    """Where the two lines of a lane meet, and how they get there.

    On a flat road a line is x + m u + c / u, u below `row_px`, with x and c common to both.

    Attributes:
        x_px: x of both lines in that row, apart from the bend.
        slopes: m of each line.
        bend: c.
    """

    row_px: float
    x_px: float
    slopes: tuple[float, float]
    bend: float

    def line(self, slope: float, rows: Floats) -> Floats:
        """Return x on `rows` below the meeting of a line of this road."""
        u = np.maximum(rows - self.row_px, 1.0)
        return np.asarray(self.x_px + slope * u + self.bend / u)


def meeting(lines: Sequence[tuple[Floats, Floats]], about_px: float) -> Meeting:
    """Return where two lines of a lane meet, each rows and x."""
    rows = np.concatenate([line[0] for line in lines])
    x = np.concatenate([line[1] for line in lines])
    which = np.repeat([0, 1], [len(line[0]) for line in lines])
    # Each line counts the same, whatever its number of rows.
    share = np.where(which == 0, 1 / max(len(lines[0][0]), 1), 1 / max(len(lines[1][0]), 1))

    def fitted(row: float) -> tuple[float, Floats]:
        u = rows - row
        used = u > NEAR_HORIZON * rows.max()
        u, y, of, weight = u[used], x[used], which[used], share[used].copy()
        design = np.stack([np.ones(len(u)), (of == 0) * u, (of == 1) * u, 30.0 / u], axis=1)
        for _ in range(4):
            root = np.sqrt(weight)[:, None]
            fit = np.linalg.lstsq(design * root, y * root[:, 0], rcond=None)[0]
            miss = np.abs(y - design @ fit)
            weight = share[used] / np.maximum(1.0, miss / 1.5)
        cost = (share[used] * np.minimum(miss, 1.5 + np.sqrt(miss))).sum() / share[used].sum()
        return float(cost), fit

    for reach, step in ((40.0, 4.0), (4.0, 0.5), (0.5, 0.1)):
        options = np.arange(about_px - reach, about_px + reach + 1e-6, step)
        about_px = float(options[np.argmin([fitted(float(row))[0] for row in options])])
    x_px, left, right, bend = fitted(about_px)[1].tolist()
    return Meeting(about_px, x_px, (left, right), 30.0 * bend)


def row_std_px(lines: Sequence[tuple[Floats, Floats]], found: Meeting) -> float:
    """Return the standard deviation of the row in which two lines meet, each rows and x.

    It is the jackknife's, of parts of the lines: large where they are short, few strokes are seen,
    or a part has another form than the rest. Infinite where too few rows are used.
    """
    designs, misses, parts = [], [], []
    for number, (rows, x) in enumerate(lines):
        used = rows - found.row_px > NEAR_HORIZON * rows.max()
        if np.count_nonzero(used) < FEWEST_ROWS:
            return float("inf")
        u, slope = (rows - found.row_px)[used], found.slopes[number]
        miss = x[used] - found.line(slope, rows[used])
        by_slope = np.zeros((2, len(u)))
        by_slope[number] = u / u.max()
        by_row = found.bend / u**2 - slope
        root = np.sqrt(1 / (len(u) * np.maximum(1.0, np.abs(miss) / 1.5)))
        columns = [np.ones(len(u)), *by_slope, 30.0 / u, by_row]
        designs.append(np.stack(columns, axis=1) * root[:, None])
        misses.append(miss * root)
        parts.append(number * PARTS + np.arange(len(u)) * PARTS // len(u))
    design, missed, part = (np.concatenate(each) for each in (designs, misses, parts))
    rows_px = [
        np.linalg.lstsq(design[part != left_out], missed[part != left_out], rcond=None)[0][4]
        for left_out in range(len(lines) * PARTS)
    ]
    return float(np.std(rows_px) * (len(rows_px) - 1) ** 0.5)
