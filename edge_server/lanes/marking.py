"""What is painted along a lane boundary: solid or dashed, white or yellow, from samples of a frame.

The frame stays in the camera's own format: brightness and colour are read at a few thousand places
beside the lines, which takes about 0.3 ms whatever the size of the picture.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edge_server.pixels import ColourRange, PixelFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from edge_server.lanes.camera_model import CameraModel
    from edge_server.lanes.types import Lane, MarkingColor, MarkingType
    from edge_server.pixels import Image

# Along the line: from the vehicle's front on, as far as paint is some px wide.
_NEAREST_M = 3.0
_FARTHEST_M = 23.0
_STEP_M = 0.5
_X_M = np.arange(_NEAREST_M, _FARTHEST_M, _STEP_M)
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
_COLOUR_FARTHEST_M = 16.0
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
    near = painted & (_X_M <= _COLOUR_FARTHEST_M)
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
