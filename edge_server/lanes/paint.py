"""The paint of the road: where lines really lie in the picture, of what type and colour they are.

A network's line is near its paint. Along each line the picture is sampled across, at the same
distances for all; a stroke is brighter than the road on both of its sides. The line's correction is
a smooth curve over the distance: by its prior what a network errs, by the paint that is seen more
certain, and by nothing where there is none.
"""

from __future__ import annotations

from dataclasses import replace
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


def _between_knots(x_m: Floats) -> Floats:
    """Return (..., 9) the shares of the knots at distances (...)."""
    place = np.clip(np.log(np.maximum(x_m, 1e-3)), _KNOTS[0], _KNOTS[-1])
    shares: Floats = np.maximum(
        0.0, 1.0 - np.abs(place[..., None] - _KNOTS) / (_KNOTS[1] - _KNOTS[0])
    )
    return shares


_BASIS = _between_knots(DISTANCES_M)
_PRODUCTS = (_BASIS[:, :, None] * _BASIS[:, None, :]).reshape(len(DISTANCES_M), -1)

# What a network errs across an upright line in a picture 1280 px wide: standard deviations at the
# knots, and how alike errors at other distances are (Matern's function of order 3/2).
_ERROR_PX = np.linspace(1.6, 9.0, len(_KNOTS))
_ALIKE = 1.0
_FLATTEST = 8.0
_APART = np.sqrt(3.0) * np.abs(_KNOTS[:, None] - _KNOTS) / _ALIKE
_ERROR = _ERROR_PX[:, None] * _ERROR_PX * (1.0 + _APART) * np.exp(-_APART)
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
_PAINT_STD_PX, _PAINT_STD_M = 0.7, 0.012
_ROWS_ALIKE = 3.0
_FEWEST_ROWS = 4.0

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
    """Return the type for those log odds."""
    if abs(solid) < CERTAIN:
        return "unknown"
    return "solid" if solid > 0 else "dashed"


def color_of(yellow: float) -> MarkingColor:
    """Return the colour for those log odds."""
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
    return lines._replace(error_px=shares @ _ERROR_FACTOR * _units(lanes, camera)[:, None, None])


def _units(lanes: Sequence[Lane], camera: CameraModel) -> Floats:
    """Return the unit of each line's errors along a row, px, (K,): flat lines err more there."""
    ends = np.array([lane.points[[0, -1]] for lane in lanes], np.float64).reshape(-1, 2, 2)
    with np.errstate(invalid="ignore"):
        across, down = np.abs(ends[:, 0] - ends[:, 1]).T
        slant = np.hypot(1.0, across / np.maximum(down, 1.0))
    # A coordinate that is no number is reported with the lane.
    slant = np.where(slant < _FLATTEST, slant, _FLATTEST)
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
    shares[present] = _between_knots(np.nan_to_num(x_m, nan=_FARTHEST_M))
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
    found = _follow(profile, places, _units(lanes, camera), camera.lens.width / 1280)
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
    """Where K lines are sampled: N distances, S places across each.

    Attributes:
        row: (K, N) of the picture.
        column: (K, N, S) of the picture.
        aside: (K, N, C) float32, px of the camera model, from the line to each place of paint.
        metre: (N,) px of the camera model.
        seen: (K, N) bool, whether the line is there, and the picture.
    """

    row: NDArray[np.intp]
    column: NDArray[np.intp]
    aside: NDArray[np.float32]
    metre: Floats
    seen: NDArray[np.bool_]


def _places(lines: ImageLines, x_m: Floats, image: Image, camera: CameraModel) -> _Places:
    lens, present = camera.lens, lines.present
    scale = np.array((image.width / lens.width, image.height / lens.height))
    points = (lines.points + 0.5) * scale - 0.5
    at = np.zeros((2, len(present), len(DISTANCES_M)))
    ends_m = np.full((2, len(present), 1), np.nan)
    ends = np.cumsum(np.count_nonzero(present, axis=1)).tolist()
    for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        there = x_m[begin:end] > 0.0
        away_m = x_m[begin:end][there]
        if len(away_m) < _FEWEST_ROWS:
            continue
        x, y = points[begin:end][there].T
        # Between two points of a line its row goes with the inverse of the distance.
        at[0, number] = rows = np.rint(np.interp(_INVERSE, -1.0 / away_m, y))
        at[1, number] = np.interp(-rows, -y, x)
        ends_m[:, number, 0] = away_m[0], away_m[-1]
    seen = (ends_m[0] <= DISTANCES_M) & (ends_m[1] >= DISTANCES_M)
    metre = lens.fx / np.maximum(DISTANCES_M - camera.mounting.x_m, 1.0)
    step = np.maximum(_SAMPLE_WIDTHS * image.width, _SAMPLE_M * metre * scale[0])
    apart = np.rint(step[:, None] * _SAMPLES).astype(np.intp)
    middle = np.rint(at[1])
    aside = apart[:, _PLACES].astype(np.float32) + (middle - at[1]).astype(np.float32)[..., None]
    aside /= np.float32(scale[0])
    column = middle.astype(np.intp)[..., None] + apart
    row = at[0].astype(np.intp)
    seen &= (row >= 0) & (row < image.height)
    # A line that leaves the picture at its side is seen no farther than its middle.
    seen &= (at[1] >= 0.0) & (at[1] <= image.width - 1)
    np.clip(row, 0, image.height - 1, out=row)
    np.minimum(np.maximum(column, 0, out=column), image.width - 1, out=column)
    return _Places(row, column, aside, metre, seen)


class _Profile(NamedTuple):
    """What the picture shows at the places of paint, (K, N, C) float32 levels.

    Attributes:
        ridge: how much brighter than the brighter side; below 0 where it is darker.
        stroke: the brightness.
        uneven: (K, N, C) by how much the sides differ.
    """

    ridge: NDArray[np.float32]
    stroke: NDArray[np.float32]
    uneven: NDArray[np.float32]


def _profile(image: Image, places: _Places) -> _Profile:
    luma = image.luma()[places.row[..., None], places.column].astype(np.float32)
    three = (luma[..., :-2] + luma[..., 1:-1] + luma[..., 2:]) * np.float32(1 / 3)
    stroke, left, right = (
        three[..., _SIDE:-_SIDE],
        three[..., : -2 * _SIDE],
        three[..., 2 * _SIDE :],
    )
    return _Profile(stroke - np.maximum(left, right), stroke, np.abs(left - right))


class _Found(NamedTuple):
    """The corrections of K lines.

    Attributes:
        knots: (K, 9) px sideways.
        factor: (K, 9, 9), the product with its transpose is the covariance of the knots.
        place: (K, N), number of the strongest stroke's near the corrected line.
        apart: (K, N) px, from the corrected line to that stroke's middle.
    """

    knots: Floats
    factor: Floats
    place: NDArray[np.intp]
    apart: Floats


def _follow(profile: _Profile, places: _Places, units: Floats, unit_px: float) -> _Found:
    """Fit each line's correction to the strokes near it, nearer with each turn.

    Args:
        units: of the lines' errors.
        unit_px: of the paint's; a picture 1280 px wide has 1.
    """
    aside = places.aside
    farthest = np.minimum(
        _FARTHEST_ASIDE_M * places.metre,
        np.maximum(_NEAR_M * places.metre, _NEAR_WIDTHS * 1280 * unit_px),
    ).astype(np.float32)
    clear = np.minimum(profile.ridge, _CLEAR_LEVELS)
    clear[(np.abs(aside) > farthest[:, None]) | ~places.seen[..., None]] = -_CLEAR_LEVELS
    error_px = _BASIS @ _ERROR_PX * units[:, None]
    noise_px = np.hypot(_PAINT_STD_PX * unit_px, _PAINT_STD_M * places.metre)
    inverse = _ERROR_INVERSE / units[:, None, None] ** 2
    knots = np.zeros((len(aside), len(_KNOTS)))
    for turns, share in _SEARCHES:
        line = (knots @ _BASIS.T).astype(np.float32)
        wide = (share * error_px + noise_px).astype(np.float32)
        gap = aside - line[..., None]
        gap *= np.float32(_MISS_COST**0.5) / wide[..., None]
        gap *= gap
        place = np.argmax(np.subtract(clear, gap, out=gap), axis=2)
        middle, level = _middle(profile.ridge, aside, place, turns)
        miss = (middle - line) / (3.0 * wide)
        weight = np.clip(
            (np.minimum(level, _CLEAR_LEVELS) - _LEAST_LEVELS) / (_CLEAR_LEVELS - _LEAST_LEVELS),
            0.0,
            1.0,
        )
        weight *= np.maximum(0.0, 1.0 - miss * miss) ** 2
        weight /= _ROWS_ALIKE
        precise = weight / noise_px**2
        normal = (precise @ _PRODUCTS).reshape(-1, len(_KNOTS), len(_KNOTS)) + inverse
        covariance = np.linalg.inv(normal)
        knots = (covariance @ ((precise * middle) @ _BASIS)[..., None])[..., 0]
    factor = np.linalg.cholesky(covariance)
    # On hardly any paint nothing is known.
    is_bare = weight.sum(axis=1) * _ROWS_ALIKE < _FEWEST_ROWS
    knots[is_bare] = 0.0
    factor[is_bare] = _ERROR_FACTOR * units[is_bare, None, None]
    return _Found(knots, factor, place, middle - knots @ _BASIS.T)


def _middle(
    ridge: NDArray[np.float32],
    aside: NDArray[np.float32],
    place: NDArray[np.intp],
    turns: int,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the middle of the stroke about each place, px (K, N), and the levels there.

    Args:
        turns: each leads from the edge of a broad stroke nearer to its middle; 0 for the place.
    """
    places = ridge.shape[2]
    first = np.arange(place.size).reshape(place.shape) * places
    ridge, aside = ridge.ravel(), aside.ravel()
    level, middle = ridge[first + place], aside[first + place]
    for _ in range(turns):
        place = np.minimum(np.maximum(place, 4), places - 5)
        above = np.maximum(ridge[(first + place)[..., None] + _STROKE] - 0.5 * level[..., None], 0)
        moved = above @ _STROKE_PLACES / (above.sum(axis=2) + np.float32(1e-6))
        middle = aside[first + place]
        middle += moved * (aside[first + place + 1] - middle)
        place = place + np.rint(moved).astype(np.intp)
    return middle, level


def _black(image: Image) -> float:
    is_limited = image.pixel_format is not PixelFormat.BGR and (
        image.colour.range is ColourRange.LIMITED
    )
    return 16.0 if is_limited else 0.0


def _painted(found: _Found, profile: _Profile, places: _Places, black: float) -> NDArray[np.bool_]:
    """Return whether there is paint on the line at each distance, (K, N)."""
    at = np.arange(found.place.size).reshape(found.place.shape) * profile.ridge.shape[2]
    contrast, stroke, uneven = (each.ravel()[at + found.place] for each in profile)
    is_paint: NDArray[np.bool_] = contrast >= np.maximum(
        _LEAST_CONTRAST, _LEAST_PART * (stroke - black)
    )
    is_paint &= contrast >= _LEAST_SPREADS * uneven
    is_paint &= np.abs(found.apart) <= np.maximum(_BESIDE_PX, _BESIDE_M * places.metre)
    is_paint &= places.seen
    return is_paint


def _solid_odds(painted: NDArray[np.bool_], seen: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the log odds of solid lines against dashed ones, (K,)."""
    whole = seen @ _CELLS > 0.999
    is_filled = whole & (painted @ _CELLS >= 0.5)
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


def _yellow_odds(
    image: Image, places: _Places, found: _Found, painted: NDArray[np.bool_]
) -> list[float]:
    """Return the log odds of yellow lines against white ones: by how much less blue the paint near
    the vehicle has than the road beside it, by luma."""
    if image.pixel_format is PixelFormat.GREY:
        return [0.0] * len(painted)
    near = painted[:, :_COLOURED]
    length_m = near @ _LENGTH_M[:_COLOURED]
    # Of the two ends the one farther from the paint is road.
    peak = found.place[:, :_COLOURED] + _PLACES.start
    beside = np.where(peak > _ASIDE, _ASIDE - 16, _ASIDE + 16)
    at = np.arange(len(peak))[:, None], np.arange(_COLOURED), np.stack([peak, beside])
    paint, road = _blue_by_luma(image, places.row[:, :_COLOURED], places.column[at])
    # The median of what is painted, the rest behind it.
    ordered = np.sort(np.where(near, road - paint, np.inf), axis=1)
    number = np.maximum(np.count_nonzero(near, axis=1), 1)
    middle = np.stack([(number - 1) // 2, number // 2], axis=1)
    yellowness = np.take_along_axis(ordered, middle, axis=1).mean(axis=1)
    distance = np.clip((yellowness - _YELLOW) / _YELLOW_STD, -1.5, 1.5)
    # Neighbouring places are one patch of paint; two that are 2 m apart count apart.
    odds = np.minimum(length_m / _CELL_M + 1.0, 4.0) * distance
    odds = np.where(length_m < _LEAST_COLOURED_M, 0.0, odds)
    found_odds: list[float] = np.clip(odds, -_MOST_EVIDENCE, _MOST_EVIDENCE).tolist()
    return found_odds


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
