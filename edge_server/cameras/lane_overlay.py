"""A frame's published lanes drawn into its picture, as a person wants to see them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import cv2
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.lanes.types import Ego, Lane, LaneFrame, MarkingColor

    BgrImage = NDArray[np.uint8]
    Colour = tuple[int, int, int]

_FONT = cv2.FONT_HERSHEY_SIMPLEX
_BLACK, _WHITE, _RED, _AMBER = (0, 0, 0), (255, 255, 255), (90, 90, 255), (0, 190, 255)
_OWN_LANE = (80, 200, 60)
_PAINT: dict[MarkingColor, Colour] = {
    "white": _WHITE,
    "yellow": (0, 210, 255),
    "unknown": (235, 190, 60),
}
_FILL = 0.3
_SUBPIXEL_BITS = 4
# Of pictures 1280 px wide.
_DASH_PX, _DOT_PX = 26.0, 8.0
# The view from above, in the upper right corner: so far ahead, and to each side.
_AHEAD_M, _ASIDE_M = 50.0, 9.0
_ABOVE_PX = (190, 300)
_VEHICLE_M = (4.5, 0.95)
# Of a bend that is worth a word.
_STRAIGHT_M = 3000.0


def draw_lane_frame(image: BgrImage, frame: LaneFrame) -> BgrImage:
    """Return a copy of `image` with all that `frame` says of the road.

    The lines in the picture are where the model sees them in this very frame, with what tracking
    knows of each; the view from above has the tracked lines, in metres. Lines have the colour of
    their paint, blue where it is not known. Dashed paint is drawn in dashes, a line that is
    continued from earlier frames in dots. The own lane is filled: red while a departure is warned
    of, amber while the warning is withheld.

    Args:
        image: (H, W, 3) uint8 BGR, of the frame's size.
        frame: as the listeners of a pipeline get it.
    """
    picture: BgrImage = image.copy()
    lanes = [lane for lane in frame.lanes if np.isfinite(lane.points).all()]
    _fill_own_lane(picture, lanes, frame.ego)
    for lane in lanes:
        _draw_lane(picture, lane)
    for lane in lanes:
        _label(picture, lane)
    _write_texts(picture, frame)
    if any(lane.ground is not None for lane in lanes):
        _draw_from_above(picture, lanes)
    return picture


def _fill_own_lane(picture: BgrImage, lanes: list[Lane], ego: Ego | None) -> None:
    bounds = {lane.index: lane.points for lane in lanes if lane.index in (-1, 1)}
    if len(bounds) < 2:
        return
    outline = np.rint(np.concatenate([bounds[-1], bounds[1][::-1]])).astype(np.int32)
    rows = np.clip(outline[:, 1], 0, len(picture) - 1)
    top, bottom = int(np.min(rows)), int(np.max(rows)) + 1
    part = picture[top:bottom]
    filled = part.copy()
    cv2.fillPoly(filled, [outline - (0, top)], _colour_of_lane(ego))
    picture[top:bottom] = cv2.addWeighted(filled, _FILL, part, 1 - _FILL, 0.0)


def _colour_of_lane(ego: Ego | None) -> Colour:
    state = "none" if ego is None or ego.departure is None else ego.departure.state
    return {"none": _OWN_LANE, "warning": _RED, "withheld": _AMBER}[state]


def _draw_lane(picture: BgrImage, lane: Lane) -> None:
    scale = picture.shape[1] / 1280
    points = lane.points.astype(np.float64)
    pieces = [points]
    if lane.predicted:
        pieces = _pieces(points, _DOT_PX * scale)
    elif lane.type == "dashed":
        pieces = _pieces(points, _DASH_PX * scale)
    fixed = [np.rint(piece * (1 << _SUBPIXEL_BITS)).astype(np.int32) for piece in pieces]
    thickness = max(2, round(4 * scale))
    for colour, width in ((_BLACK, thickness + 2), (_PAINT[lane.color], thickness)):
        cv2.polylines(picture, fixed, False, colour, width, cv2.LINE_AA, _SUBPIXEL_BITS)


def _pieces(points: NDArray[np.float64], length_px: float) -> list[NDArray[np.float64]]:
    """Return every second piece of a line, each `length_px` long."""
    steps = np.hypot(*np.diff(points, axis=0).T)
    along = np.concatenate([[0.0], np.cumsum(steps)])
    cuts = np.arange(0.0, along[-1], length_px / 4)
    dense = np.stack([np.interp(cuts, along, column) for column in points.T], axis=1)
    # Five points of a quarter each are a piece; the next piece is left out.
    return [dense[at : at + 5] for at in range(0, len(dense) - 1, 8)]


def _draw_from_above(picture: BgrImage, lanes: list[Lane]) -> None:
    scale = picture.shape[1] / 1280
    width, height = (round(side * scale) for side in _ABOVE_PX)
    view = picture[:height, -width:]
    np.multiply(view, 0.3, out=view, casting="unsafe")
    per_m = np.array([height / (_AHEAD_M + _VEHICLE_M[0]), width / (2 * _ASIDE_M)])

    def place(ground: NDArray[np.float64]) -> NDArray[np.int32]:
        ahead, aside = (ground * per_m).T
        down = _AHEAD_M * per_m[0] - ahead
        return np.rint(np.stack([width / 2 - aside, down], axis=1)).astype(np.int32)

    for ahead_m in np.arange(10.0, _AHEAD_M, 10.0):
        row = int(place(np.array([[ahead_m, 0.0]]))[0, 1])
        cv2.line(view, (0, row), (width, row), (110, 110, 110), 1)
        _write(view, f"{ahead_m:g} m", (2, row - 2), 0.35 * scale)
    for lane in lanes:
        if lane.ground is not None:
            polynomial = lane.ground.polynomial
            x = np.arange(polynomial.x_min_m, min(polynomial.x_max_m, _AHEAD_M), 0.5)
            y = np.polynomial.polynomial.polyval(x, polynomial.coefficients)
            course = place(np.stack([x, y], axis=1))
            pieces = [course]
            if lane.type == "dashed" or lane.predicted:
                pieces = [course[at : at + 7] for at in range(0, len(course), 12)]
            cv2.polylines(view, pieces, False, _PAINT[lane.color], 1, cv2.LINE_AA)
    back, half = _VEHICLE_M
    corners = place(np.array([[0.0, half], [-back, -half]]))
    cv2.rectangle(view, corners[0].tolist(), corners[1].tolist(), _OWN_LANE, -1)


def _label(picture: BgrImage, lane: Lane) -> None:
    paint = " ".join(word for word in (lane.type, lane.color) if word != "unknown")
    words = [
        f"#{lane.id}" if lane.id else "",
        _place_of(lane.index),
        paint,
        "predicted" if lane.predicted else "",
        f"{lane.score:.2f}",
    ]
    scale = picture.shape[1] / 1280
    x, y = lane.points[len(lane.points) // 3]
    _write(picture, " ".join(filter(None, words)), (int(x + 8 * scale), int(y)), 0.5 * scale)


def _place_of(index: int) -> str:
    if not index:
        return ""
    side = "left" if index < 0 else "right"
    return side if abs(index) == 1 else f"{side} {abs(index)}"


def _write_texts(picture: BgrImage, frame: LaneFrame) -> None:
    scale = picture.shape[1] / 1280
    lines = [(f"{frame.camera} {frame.frame_id}", _WHITE)]
    ego = frame.ego
    if frame.failure:
        lines.append((f"no lanes: {frame.failure}", _RED))
    elif ego is None:
        lines.append(("no calibration: lanes in pixels alone", _WHITE))
    else:
        lines.append((_measured(ego), _WHITE))
        if ego.lane_change != "none":
            lines.append((f"lane change to the {ego.lane_change}", _AMBER))
        departure = ego.departure
        if departure is not None and departure.state == "warning":
            lines.append((f"LANE DEPARTURE: {departure.side.upper()}", _RED))
        elif departure is not None and departure.state == "withheld":
            text = f"departure to the {departure.side}, no warning: {departure.withheld_by}"
            lines.append((text, _AMBER))
    lines += [(reason, _AMBER) for reason in frame.degraded]
    for row, (text, colour) in enumerate(lines):
        place = int(16 * scale), int((32 + 30 * row) * scale)
        _write(picture, text[:110], place, 0.75 * scale, colour)


def _measured(ego: Ego) -> str:
    values = [
        ("offset", ego.lateral_offset_m, 1.0, "+.2f", "m"),
        ("heading", ego.heading_error_rad, math.degrees(1), "+.1f", "deg"),
        ("width", ego.lane_width_m, 1.0, ".2f", "m"),
    ]
    words = [
        f"{name} {'-' if value is None else format(value * unit, form)} {name_of_unit}"
        for name, value, unit, form, name_of_unit in values
    ]
    curvature_1pm = ego.curvature_1pm
    if curvature_1pm is not None:
        radius_m = 1 / max(abs(curvature_1pm), 1e-9)
        side = "left" if curvature_1pm > 0 else "right"
        words.append("straight" if radius_m > _STRAIGHT_M else f"bend {side} {radius_m:.0f} m")
    return "   ".join(words)


def _write(
    picture: BgrImage, text: str, place: tuple[int, int], scale: float, colour: Colour = _WHITE
) -> None:
    # The font has ASCII alone.
    text = text.encode("ascii", "replace").decode()
    thickness = max(1, round(1.5 * scale))
    (width, height), below = cv2.getTextSize(text, _FONT, scale, thickness)
    x = max(0, min(place[0], picture.shape[1] - width))
    y = max(height + below, min(place[1], len(picture) - below))
    box = picture[y - height - below : y + below, x : x + width]
    np.multiply(box, 0.4, out=box, casting="unsafe")
    cv2.putText(picture, text, (x, y), _FONT, scale, colour, thickness, cv2.LINE_AA)
