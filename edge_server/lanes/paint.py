"""The paint of the road: where lines really lie in the picture, of what type and colour they are.

A network's line is near its paint. Along each line the picture is sampled across, at the same
distances for all; a stroke is brighter than the road on both of its sides. The line's correction is
a smooth curve over the distance: by its prior what a network errs, by the paint that is seen more
certain, and by nothing where there is none.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edge_server.lanes.camera_model import Rays
from edge_server.pixels import ColourRange, PixelFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from edge_server.lanes.camera_model import CameraModel
    from edge_server.lanes.types import Lane, MarkingColor, MarkingType
    from edge_server.pixels import Image

    Floats = NDArray[np.float64]

# Along the line: from the vehicle's front on. In the picture such distances are evenly apart.
_FARTHEST_M = 100.0
DISTANCES_M = np.geomspace(3.0, _FARTHEST_M, 72)
_INVERSE = -1.0 / DISTANCES_M
_LENGTH_M = np.gradient(DISTANCES_M)
# The correction is linear in the logarithm of the distance between so many of these.
_KNOTS = np.linspace(np.log(DISTANCES_M[0]), np.log(DISTANCES_M[-1]), 9)
_PER_KNOT = 1.0 / float(_KNOTS[1] - _KNOTS[0])


def _between_knots(x_m: Floats) -> Floats:
    """Return (..., 9) the shares of the knots at distances (...); NaN is the farthest."""
    place = np.log(np.fmax(np.fmin(x_m, DISTANCES_M[-1]), DISTANCES_M[0]))
    apart = place[..., None] * _PER_KNOT - _KNOTS * _PER_KNOT
    shares: Floats = np.maximum(0.0, 1.0 - np.abs(apart))
    return shares


_BASIS = _between_knots(DISTANCES_M)
_PRODUCTS = (_BASIS[:, :, None] * _BASIS[:, None, :]).reshape(len(DISTANCES_M), -1)

# What a network errs across an upright line in a picture 1280 px wide, standard deviations at the
# knots: where it sees no paint, as with paint the prior counts for nothing. The nearer dashes of a
# line are out of the picture at times: then it errs 4 to 7, and 1 to 2 from 10 m on. And how alike
# errors at other distances are (Matern's function of order 3/2).
_ERROR_PX = np.array([8.0, 8.0, 6.0, 4.0, 3.0, 3.0, 4.0, 5.0, 6.0])
_ALIKE = 1.0
_FLATTEST = 8.0
_APART = np.sqrt(3.0) * np.abs(_KNOTS[:, None] - _KNOTS) / _ALIKE
_ERROR = _ERROR_PX[:, None] * _ERROR_PX * (1.0 + _APART) * np.exp(-_APART)
_ERROR_AT_PX = _BASIS @ _ERROR_PX
_ERROR_INVERSE = np.linalg.inv(_ERROR)
_ERROR_FACTOR = np.linalg.cholesky(_ERROR)

# Across: samples on both sides of the line, of which the middle ones are places of paint.
_ASIDE = 26
# In each row between other pixels, so that many rows place a stroke better than one sample does.
_SAMPLES = np.arange(-_ASIDE, _ASIDE + 1) + (
    np.arange(len(DISTANCES_M))[:, None] * 0.618 % 1.0 - 0.5
)
_SIDE = 4
_PLACES = slice(_SIDE + 1, -_SIDE - 1)
_BOTH_SIDES = np.array([[0], [2 * _SIDE]])
_SAMPLE_M, _SAMPLE_WIDTHS = 0.045, 1.1e-3
# Paint is looked for as far aside as this, or as that part of the picture's width, but never as
# far as the next lane's middle.
_NEAR_M, _NEAR_WIDTHS, _FARTHEST_ASIDE_M = 0.6, 0.027, 1.44
# So wide, px and m, is the search about the line, at first and at last.
_SEARCHES = ((0, 1.0), (2, 0.5))
_STROKE = np.arange(-4, 5)
_STROKE_PLACES = _STROKE.astype(np.float32)
_MISS_COST = 2.0
_CLEAR_LEVELS, _LEAST_LEVELS = 40.0, 7.0
# The middle of the paint in one row; so many neighbouring rows err alike.
_PAINT_STD_PX, _PAINT_STD_M = 0.7, 0.006
_ROWS_ALIKE = 3.0
_FEWEST_ROWS = 4
# More than rows, and inverse distances, of one line differ.
_LINES_APART = 1e5

# Paint is brighter than the road by this many levels, this part of its brightness, and this many
# times the road's own unevenness.
_LEAST_CONTRAST = 14.0
_LEAST_PART = 0.12
_LEAST_SPREADS = 1.6
_BESIDE_M, _BESIDE_PX = 0.15, 2.0

# Cells of 2 m count apart. A solid line is seen in 93 % of its cells, a dashed one (3 m of 12 to
# 6 m of 12) in 35 %.
_CELL_M = 2.0
_CELL = ((DISTANCES_M - DISTANCES_M[0]) / _CELL_M).astype(np.intp)
_CELLS = np.stack([(cell == _CELL) / np.count_nonzero(cell == _CELL) for cell in range(10)], axis=1)
_ODDS_PAINTED = float(np.log(0.93 / 0.35))
_ODDS_BARE = float(np.log((1 - 0.93) / (1 - 0.35)))
_FEWEST_CELLS = 5
# Blue less than luma, by luma, against the road's: 0.15 to 0.37 for yellow, 0 for white.
_YELLOW = 0.09
_YELLOW_STD = 0.035
_COLOURED = int(np.count_nonzero(DISTANCES_M <= 16.0))  # places near enough to show a colour
_LEAST_COLOURED_M = 1.5
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
    if abs(solid) < CERTAIN:
        return "unknown"
    return "solid" if solid > 0 else "dashed"


def color_of(yellow: float) -> MarkingColor:
    if abs(yellow) < CERTAIN:
        return "unknown"
    return "yellow" if yellow > 0 else "white"


class ImageLines(NamedTuple):
    """K lines in a picture, as they go onto the road.

    Attributes:
        points: (N, 2) px, those of all lines, one line after another.
        rays: of the points.
        present: (K, P) bool, which places of a table of K lines the points fill, row by row.
        error_px: (K, P, 9), what the points err sideways, in common and apart: the product with
            its transpose is their covariance, px squared.
        painted: (K, D) bool, whether there is paint at each of `DISTANCES_M`.
    """

    points: NDArray[np.float64]
    rays: Rays
    present: NDArray[np.bool_]
    error_px: NDArray[np.float64]
    painted: NDArray[np.bool_]


def image_lines(lanes: Sequence[Lane], camera: CameraModel) -> ImageLines:
    """Return the lines as the network gives them, with what it errs.

    Args:
        lanes: with image points, px of frames of the camera model's size.
    """
    lines, _, shares = _network_lines(lanes, camera)
    return lines._replace(error_px=shares @ _ERROR_FACTOR * _units(lines, camera)[:, None, None])


def _units(lines: ImageLines, camera: CameraModel) -> Floats:
    """Return the unit of each line's errors along a row, px, (K,): flat lines err more there."""
    count = lines.present.sum(axis=1)
    last = count.cumsum() - 1
    with np.errstate(invalid="ignore"):
        across, down = np.abs(lines.points[last] - lines.points[last + 1 - count]).T
        slant = np.hypot(1.0, across / np.maximum(down, 1.0))
    # A coordinate that is no number is reported with the lane.
    slant[~(slant < _FLATTEST)] = _FLATTEST
    units: Floats = slant * (camera.lens.width / 1280)
    return units


def _network_lines(lanes: Sequence[Lane], camera: CameraModel) -> tuple[ImageLines, Floats, Floats]:
    """Return the lines, with no error; their distances (N,) m, NaN where unknown; and the shares of
    the knots at their points, (K, P, 9)."""
    counts = np.array([len(lane.points) for lane in lanes])
    present = np.arange(counts.max(initial=0)) < counts[:, None]
    points = np.concatenate([lane.points for lane in lanes]) if lanes else np.empty((0, 2))
    points = points.astype(np.float64)
    rays = camera.lens.rays_of(points)
    x_m = camera.distances_of_rays(rays, _FARTHEST_M)
    shares = np.zeros((*present.shape, len(_KNOTS)))
    shares[present] = _between_knots(x_m)
    bare = np.zeros((len(present), len(DISTANCES_M)), bool)
    return ImageLines(points, rays, present, shares, bare), x_m, shares


def on_paint(
    lanes: Sequence[Lane], image: Image, camera: CameraModel
) -> tuple[ImageLines, tuple[Lane, ...]]:
    """Return the lines moved onto their paint, and the lanes with what this frame shows of it.

    A line moves sideways, by as much as paint shows that is brighter than the road on both sides,
    and not at all where there is too little of it. Its points are then as certain as the paint
    near them makes them.

    Args:
        lanes: with image points, px of frames of the camera model's size; they keep them.
        image: the frame; a decoder may have made it smaller than the camera model's.
        camera: with the pitch of this frame.
    """
    lines, x_m, shares = _network_lines(lanes, camera)
    if not lanes:
        return lines, ()
    places = _places(lines, x_m, image, camera)
    profile = _profile(image, places)
    found = _follow(profile, places, _units(lines, camera))
    painted = _painted(found, profile, places, _black(image))
    solid = _solid_odds(painted, places.seen).tolist()
    yellow = _yellow_odds(image, places, found, painted)
    marked = tuple(
        replace(
            lane,
            type=type_of(of_type),
            color=color_of(of_color),
            solid_evidence=of_type,
            yellow_evidence=of_color,
        )
        for lane, of_type, of_color in zip(lanes, solid, yellow, strict=True)
    )
    moved = (shares @ found.knots[..., None])[..., 0][lines.present]
    points = lines.points.copy()
    points[:, 0] += moved
    xy = lines.rays.xy + lines.rays.jacobian[:, :, 0] * moved[:, None]
    rays = Rays(xy, lines.rays.jacobian)
    return ImageLines(points, rays, lines.present, shares @ found.factor, painted), marked


class _Places(NamedTuple):
    """Where K lines are sampled: S places across each, in the M rows that show one of them.

    Attributes:
        seen: (K, N) bool, at which of `DISTANCES_M` the line is there, and the picture. The rows
            are these, one line after another.
        lane: (M,) number of the line.
        step: (M,) number of the distance.
        row: (M,) of the picture.
        column: (M, S) of the picture.
        aside: (M, C) float32, px of the camera model, from the line to each place of paint.
        across: at each distance.
    """

    seen: NDArray[np.bool_]
    lane: NDArray[np.intp]
    step: NDArray[np.intp]
    row: NDArray[np.intp]
    column: NDArray[np.intp]
    aside: NDArray[np.float32]
    across: _Across


class _Across(NamedTuple):
    """How a line is sampled across at each of `DISTANCES_M`, which no frame changes.

    Attributes:
        metre: (N,) px of the camera model.
        offsets: (N, S) columns of the picture.
        aside: (N, C) float32, those of places of paint, px of the camera model.
        too_far: (N, C) bool, where paint is not looked for.
        noise_px: (N,) standard deviation of the middle of the paint.
    """

    metre: Floats
    offsets: NDArray[np.intp]
    aside: NDArray[np.float32]
    too_far: NDArray[np.bool_]
    noise_px: Floats


@lru_cache(16)
def _across(fx: float, camera_width: int, camera_x_m: float, width: int) -> _Across:
    """Return it for a camera model of that width, and a picture of `width`."""
    scale, unit_px = width / camera_width, camera_width / 1280
    metre = fx / np.maximum(DISTANCES_M - camera_x_m, 1.0)
    step = np.maximum(_SAMPLE_WIDTHS * width, _SAMPLE_M * metre * scale)
    offsets = np.rint(step[:, None] * _SAMPLES).astype(np.intp)
    aside = (offsets[:, _PLACES] / scale).astype(np.float32)
    farthest = np.minimum(
        _FARTHEST_ASIDE_M * metre, np.maximum(_NEAR_M * metre, _NEAR_WIDTHS * camera_width)
    )
    noise_px = np.hypot(_PAINT_STD_PX * unit_px, _PAINT_STD_M * metre)
    return _Across(metre, offsets, aside, np.abs(aside) > farthest[:, None], noise_px)


def _places(lines: ImageLines, x_m: Floats, image: Image, camera: CameraModel) -> _Places:
    lens = camera.lens
    scale = np.array((image.width / lens.width, image.height / lens.height))
    at, seen = _rows_and_columns(lines, x_m, scale)
    seen &= (at[0] >= 0.0) & (at[0] <= image.height - 1)
    # A line that leaves the picture at its side is seen no farther than its middle.
    seen &= (at[1] >= 0.0) & (at[1] <= image.width - 1)
    lane, step = np.nonzero(seen)
    across = _across(lens.fx, lens.width, camera.mounting.x_m, image.width)
    row, x = at[:, seen]
    middle = np.rint(x)
    aside = across.aside[step]
    aside += ((middle - x) / scale[0]).astype(np.float32)[:, None]
    column = across.offsets[step]
    column += middle.astype(np.intp)[:, None]
    np.minimum(np.maximum(column, 0, out=column), image.width - 1, out=column)
    return _Places(seen, lane, step, row.astype(np.intp), column, aside, across)


def _rows_and_columns(
    lines: ImageLines, x_m: Floats, scale: Floats
) -> tuple[Floats, NDArray[np.bool_]]:
    """Return rows and columns of a picture of that scale, (2, K, N), at which K lines are at each
    of `DISTANCES_M`; and where that is, (K, N)."""
    number = np.arange(len(lines.present))[:, None]
    lane = np.nonzero(lines.present)[0]
    there = x_m > 0.0
    count = np.bincount(lane[there], minlength=len(number))
    count[count < _FEWEST_ROWS] = 0
    there &= count[lane] > 0
    if not there.any():
        return np.zeros((2, *lines.painted.shape)), np.zeros(lines.painted.shape, bool)
    away_m, lane = x_m[there], lane[there]
    x, y = ((lines.points[there] + 0.5) * scale - 0.5).T
    # All lines at once: one behind another. Between two points of a line its row goes with the
    # inverse of the distance.
    behind, at = lane * _LINES_APART, number * _LINES_APART
    rows = np.rint(np.interp(at + _INVERSE, behind - 1.0 / np.maximum(away_m, 0.1), y))
    columns = np.interp(at - rows, behind - y, x)
    last = count.cumsum() - 1
    first = last + 1 - count
    seen = away_m[first % len(away_m), None] <= DISTANCES_M
    seen &= (away_m[last, None] >= DISTANCES_M) & (count[:, None] > 0)
    return np.stack([rows, columns]), seen


class _Profile(NamedTuple):
    """What the picture shows across the lines, (M, ...) float32 levels.

    Attributes:
        ridge: (M, C) at each place of paint, how much brighter than the brighter side it is; below
            0 where it is darker.
        levels: (M, C + 8) the brightness, with the sides; a place of paint is 4 columns on.
    """

    ridge: NDArray[np.float32]
    levels: NDArray[np.float32]


def _profile(image: Image, places: _Places) -> _Profile:
    luma = image.luma()[places.row[:, None], places.column].astype(np.float32)
    levels = luma[:, :-2] + luma[:, 1:-1]
    levels += luma[:, 2:]
    levels *= np.float32(1 / 3)
    sides = np.maximum(levels[:, : -2 * _SIDE], levels[:, 2 * _SIDE :])
    return _Profile(levels[:, _SIDE:-_SIDE] - sides, levels)


class _Found(NamedTuple):
    """The corrections of K lines.

    Attributes:
        knots: (K, 9) px sideways.
        factor: (K, 9, 9), the product with its transpose is the covariance of the knots.
        place: (M,), number of the strongest stroke's near the corrected line.
        apart: (M,) px, from the corrected line to that stroke's middle.
        is_even: (M,) bool, whether the road is alike on its sides.
    """

    knots: Floats
    factor: Floats
    place: NDArray[np.intp]
    apart: Floats
    is_even: NDArray[np.bool_]


def _follow(profile: _Profile, places: _Places, units: Floats) -> _Found:
    """Fit each line's correction to the strokes near it, nearer with each turn.

    Args:
        units: of the lines' errors.
    """
    aside, seen = places.aside, places.seen
    clear = np.minimum(profile.ridge, _CLEAR_LEVELS)
    np.copyto(clear, -_CLEAR_LEVELS, where=places.across.too_far[places.step])
    error_px = _ERROR_AT_PX[places.step] * units[places.lane]
    noise_px = places.across.noise_px[places.step]
    inverse = _ERROR_INVERSE / units[:, None, None] ** 2
    rows = np.arange(len(aside))
    knots = np.zeros((len(seen), len(_KNOTS)))
    precise, pulled = np.zeros((2, *seen.shape))
    for turns, share in _SEARCHES:
        line = (knots @ _BASIS.T)[seen].astype(np.float32)
        wide = (share * error_px + noise_px).astype(np.float32)
        gap = aside - line[:, None]
        gap *= (np.float32(_MISS_COST**0.5) / wide)[:, None]
        gap *= gap
        place = np.argmax(np.subtract(clear, gap, out=gap), axis=1)
        middle, level = _middle(profile.ridge, aside, place, turns)
        miss = (middle - line) / (3.0 * wide)
        weight = np.minimum(level, _CLEAR_LEVELS)
        weight -= _LEAST_LEVELS
        weight *= 1.0 / (_CLEAR_LEVELS - _LEAST_LEVELS)
        np.maximum(weight, 0.0, out=weight)
        weight *= np.maximum(0.0, 1.0 - miss * miss) ** 2
        left, right = profile.levels[rows, place + _BOTH_SIDES]
        is_even = profile.ridge[rows, place] >= _LEAST_SPREADS * np.abs(left - right)
        weight *= is_even
        weight /= _ROWS_ALIKE
        precise[seen] = weight / noise_px**2
        pulled[seen] = precise[seen] * middle
        normal = (precise @ _PRODUCTS).reshape(-1, len(_KNOTS), len(_KNOTS)) + inverse
        covariance = np.linalg.inv(normal)
        knots = (covariance @ (pulled @ _BASIS)[..., None])[..., 0]
    factor = np.linalg.cholesky(covariance)
    # On hardly any paint nothing is known.
    is_bare = np.bincount(places.lane, weight, len(seen)) * _ROWS_ALIKE < _FEWEST_ROWS
    knots[is_bare] = 0.0
    factor[is_bare] = _ERROR_FACTOR * units[is_bare, None, None]
    return _Found(knots, factor, place, middle - (knots @ _BASIS.T)[seen], is_even)


def _middle(
    ridge: NDArray[np.float32],
    aside: NDArray[np.float32],
    place: NDArray[np.intp],
    turns: int,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the middle of the stroke about each place, px (M,), and the levels there.

    Args:
        turns: each leads from the edge of a broad stroke nearer to its middle; 0 for the place.
    """
    places = ridge.shape[1]
    first = np.arange(len(place)) * places
    ridge, aside = ridge.ravel(), aside.ravel()
    level, middle = ridge[first + place], aside[first + place]
    for _ in range(turns):
        place = np.minimum(np.maximum(place, 4), places - 5)
        at = first + place
        above = np.maximum(ridge[at[:, None] + _STROKE] - 0.5 * level[:, None], 0)
        moved = above @ _STROKE_PLACES / (above.sum(axis=1) + np.float32(1e-6))
        middle = aside[at]
        middle += moved * (aside[at + 1] - middle)
        place = place + np.rint(moved).astype(np.intp)
    return middle, level


def _black(image: Image) -> float:
    is_limited = image.pixel_format is not PixelFormat.BGR and (
        image.colour.range is ColourRange.LIMITED
    )
    return 16.0 if is_limited else 0.0


def _painted(found: _Found, profile: _Profile, places: _Places, black: float) -> NDArray[np.bool_]:
    """Return whether there is paint on the line at each distance, (K, N)."""
    at = np.arange(len(found.place)), found.place
    stroke = profile.levels[:, _SIDE:][at]
    is_paint = profile.ridge[at] >= np.maximum(_LEAST_CONTRAST, _LEAST_PART * (stroke - black))
    is_paint &= found.is_even
    beside_px = np.maximum(_BESIDE_PX, _BESIDE_M * places.across.metre)
    is_paint &= np.abs(found.apart) <= beside_px[places.step]
    painted = np.zeros(places.seen.shape, bool)
    painted[places.seen] = is_paint
    return painted


def _solid_odds(painted: NDArray[np.bool_], seen: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the log odds of solid lines against dashed ones, (K,)."""
    whole = seen @ _CELLS > 0.999
    is_filled = whole & (painted @ _CELLS >= 0.5)
    # Beyond the last paint the line may have left the places that were looked at.
    whole &= np.maximum.accumulate(is_filled[:, ::-1], axis=1)[:, ::-1]
    number, filled = whole.sum(axis=1), is_filled.sum(axis=1)
    odds: NDArray[np.float64] = filled * _ODDS_PAINTED + (number - filled) * _ODDS_BARE
    odds[number < _FEWEST_CELLS] = 0.0
    # The cells of one frame share its light, and the vehicles that hide a part.
    odds /= 1.5
    np.minimum(np.maximum(odds, -_MOST_EVIDENCE, out=odds), _MOST_EVIDENCE, out=odds)
    return odds


def _yellow_odds(
    image: Image, places: _Places, found: _Found, painted: NDArray[np.bool_]
) -> list[float]:
    """Return the log odds of yellow lines against white ones: by how much less blue the paint near
    the vehicle has than the road beside it, by luma."""
    if image.pixel_format is PixelFormat.GREY:
        return [0.0] * len(painted)
    near = painted[:, :_COLOURED]
    length_m = near @ _LENGTH_M[:_COLOURED]
    at = np.flatnonzero(painted[places.seen] & (places.step < _COLOURED))
    # Of the two ends the one farther from the paint is road.
    peak = found.place[at] + _PLACES.start
    beside = np.where(peak > _ASIDE, _ASIDE - 16, _ASIDE + 16)
    columns = places.column[at, np.stack([peak, beside])]
    paint, road = _blue_by_luma(image, places.row[at], columns)
    # The median of what is painted, the rest behind it.
    ordered = np.full(near.shape, np.inf)
    ordered[near] = road - paint
    ordered.sort(axis=1)
    number = np.maximum(near.sum(axis=1), 1)
    lane = np.arange(len(near))
    yellowness = 0.5 * (ordered[lane, (number - 1) // 2] + ordered[lane, number // 2])
    distance = np.minimum(np.maximum((yellowness - _YELLOW) / _YELLOW_STD, -1.5), 1.5)
    # Neighbouring places are one patch of paint; two that are 2 m apart count apart.
    odds = np.minimum(length_m / _CELL_M + 1.0, 4.0) * distance
    odds = np.where(length_m < _LEAST_COLOURED_M, 0.0, odds)
    limited: list[float] = np.minimum(np.maximum(odds, -_MOST_EVIDENCE), _MOST_EVIDENCE).tolist()
    return limited


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
