"""LaneVideo: a video of what is published of one camera, its lanes drawn into its frames."""

from __future__ import annotations

import errno
import math
import os
from collections import deque
from contextlib import suppress
from queue import Empty, Full, Queue
from types import MappingProxyType
from typing import TYPE_CHECKING

import cv2
import numpy as np

from edge_server.cameras.colour import bgr_of, resized
from edge_server.cameras.opencv_settings import settle_opencv
from edge_server.errors import SourceError
from edge_server.process.threads import Worker

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.lanes.types import Ego, Lane, LaneFrame, MarkingColor, PictureMark

    BgrImage = NDArray[np.uint8]
    Colour = tuple[int, int, int]
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from edge_server.cameras.frame import Frame

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
_STRAIGHT_M = 2000.0


def draw_lanes(image: BgrImage, lanes: Sequence[Lane], ego: Ego | None = None) -> BgrImage:
    """Return a copy of `image`, (H, W, 3) uint8 BGR, with each finite lane and its name; the own
    lane is filled where it has both bounds."""
    picture: BgrImage = image.copy()
    finite = [lane for lane in lanes if np.isfinite(lane.points).all()]
    _fill_own_lane(picture, finite, ego)
    for lane in finite:
        _draw_lane(picture, lane)
    for lane in finite:
        _label(picture, lane)
    return picture


def draw_lane_frame(
    image: BgrImage, frame: LaneFrame, marks: Sequence[PictureMark] = ()
) -> BgrImage:
    """Return a copy of `image` with all that `frame` says of the road, and the marks of other
    networks.

    The lines in the picture are where the model sees them in this very frame, with what tracking
    knows of each; the view from above has the tracked lines, in metres. Lines have the colour of
    their paint, blue where it is not known. Dashed paint is drawn in dashes, a line that is
    continued from earlier frames in dots. The own lane is filled: red while a departure is warned
    of, amber while the warning is withheld.

    `image` is (H, W, 3) uint8 BGR, of the frame's size.
    """
    picture = draw_lanes(image, frame.lanes, frame.ego)
    _draw_marks(picture, marks)
    _write_texts(picture, frame)
    if any(lane.ground is not None for lane in frame.lanes):
        _draw_from_above(picture, frame.lanes)
    return picture


def _fill_own_lane(picture: BgrImage, lanes: list[Lane], ego: Ego | None) -> None:
    bounds = {lane.index: lane.points for lane in lanes if lane.index in (-1, 1)}
    if len(bounds) < 2:
        return
    outline = np.rint(np.concatenate([bounds[-1], bounds[1][::-1]])).astype(np.int32)
    rows = np.clip(outline[:, 1], 0, len(picture) - 1)
    part = picture[int(np.min(rows)) : int(np.max(rows)) + 1]
    filled = part.copy()
    cv2.fillPoly(filled, [outline - (0, int(np.min(rows)))], _colour_of_lane(ego))
    part[:] = cv2.addWeighted(filled, _FILL, part, 1 - _FILL, 0.0)


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
    thickness = max(2, round(4 * scale))
    for colour, width in ((_BLACK, thickness + 2), (_PAINT[lane.color], thickness)):
        draw_lines(picture, pieces, colour, width)


def draw_lines(
    picture: BgrImage, lines: Sequence[NDArray[np.float64]], colour: Colour, thickness: int
) -> None:
    """Draw lines, each (N, 2) px, into `picture`."""
    fixed = [np.rint(line * (1 << _SUBPIXEL_BITS)).astype(np.int32) for line in lines]
    cv2.polylines(picture, fixed, False, colour, thickness, cv2.LINE_AA, _SUBPIXEL_BITS)


def _draw_marks(picture: BgrImage, marks: Sequence[PictureMark]) -> None:
    scale = picture.shape[1] / 1280
    tinted = picture.copy() if any(mark.filled for mark in marks) else picture
    for mark in marks:
        if mark.filled:
            cv2.fillPoly(tinted, [np.rint(mark.points).astype(np.int32)], mark.rgb[::-1])
    if tinted is not picture:
        picture[:] = cv2.addWeighted(tinted, _FILL, picture, 1 - _FILL, 0.0)
    for points, text, rgb, _ in marks:
        draw_lines(picture, [points.astype(np.float64)], rgb[::-1], max(2, round(2 * scale)))
        if text:
            x, y = points[0].tolist()
            write(picture, text, (int(x), int(y - 6 * scale)), 0.5 * scale, rgb[::-1])


def _pieces(points: NDArray[np.float64], length_px: float) -> list[NDArray[np.float64]]:
    """Return every second piece of a line, each `length_px` long."""
    steps = np.hypot(*np.diff(points, axis=0).T)
    along = np.concatenate([[0.0], np.cumsum(steps)])
    cuts = np.arange(0.0, along[-1], length_px / 4)
    dense = np.stack([np.interp(cuts, along, column) for column in points.T], axis=1)
    # Five points of a quarter each are a piece; the next piece is left out.
    return [dense[at : at + 5] for at in range(0, len(dense) - 1, 8)]


def _draw_from_above(picture: BgrImage, lanes: Sequence[Lane]) -> None:
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
        write(view, f"{ahead_m:g} m", (2, row - 2), 0.35 * scale)
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
    write(picture, " ".join(filter(None, words)), (int(x + 8 * scale), int(y)), 0.5 * scale)


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
    lines += [(str(reason), _AMBER) for reason in frame.degraded]
    for row, (text, colour) in enumerate(lines):
        place = int(16 * scale), int((32 + 30 * row) * scale)
        write(picture, text[:110], place, 0.75 * scale, colour)


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
    curvature_1pm, within_1pm = ego.curvature_1pm, 2 * (ego.curvature_std_1pm or 0.0)
    if curvature_1pm is not None:
        side = "left" if curvature_1pm > 0 else "right"
        # What its deviation does not tell from a straight road has no radius.
        if abs(curvature_1pm) + within_1pm < 1 / _STRAIGHT_M:
            words.append("straight")
        elif abs(curvature_1pm) > within_1pm:
            words.append(f"bend {side} {1 / abs(curvature_1pm):.0f} m")
    return "   ".join(words)


def write(
    picture: BgrImage, text: str, place: tuple[int, int], scale: float, colour: Colour = _WHITE
) -> None:
    """Write `text` on a darker box, its lower left corner at `place` or as near as it is whole."""
    # The font has ASCII alone.
    text = text.encode("ascii", "replace").decode()
    thickness = max(1, round(1.5 * scale))
    (width, height), below = cv2.getTextSize(text, _FONT, scale, thickness)
    x = max(0, min(place[0], picture.shape[1] - width))
    y = max(height + below, min(place[1], len(picture) - below))
    box = picture[y - height - below : y + below, x : x + width]
    np.multiply(box, 0.4, out=box, casting="unsafe")
    cv2.putText(picture, text, (x, y), _FONT, scale, colour, thickness, cv2.LINE_AA)


VIDEO_FPS = 30
# Each may hold a buffer of its camera's driver, and so does the one that stands.
_MOST_WAITING = 4
# What networks have found in a frame is drawn into those of the next half second; the results of so
# many frames are kept until their pictures are drawn.
_MARKS_NS = 500_000_000
_KEPT_MARKS = 8
_LOOK_S = 0.2
# A camera that was away: 150 pictures of 8K.
_LONGEST_TICK_S = 60.0
# A camera that is away for longer stands still for so many pictures.
_LONGEST_STAND = 5 * VIDEO_FPS
# Those that every OpenCV with FFmpeg can write.
_CODECS: Mapping[str, str] = MappingProxyType({".mp4": "mp4v", ".avi": "MJPG"})


class LaneVideo:
    """Writes each frame that it is called with; the call returns at once.

    A picture stands from its capture to the next one's, in steps of 1/30 s: a frame that the
    pipeline dropped shows as a picture that stands longer. Frames for which the encoder has no time
    are left out and counted. A recording in lock-step has every frame in its video, at the
    recording's own rate, and waits for the encoder. A picture is drawn when the next one comes,
    with the marks of other networks that are known by then.

    Until `close` the video has the suffix .part before its own: what ends in the middle is no
    video, and a file of the name stays until there is another.

    Args:
        path: .mp4 or .avi; a file of that name is replaced.

    Attributes:
        frames: number of frames in the video; those that stood for no picture are not.
        missed: number of frames for which there was no time.

    Raises:
        SourceError: the file cannot be written, or its suffix is another.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix not in _CODECS:
            raise SourceError(f"{path}: videos are written as {' or '.join(_CODECS)}; rename it")
        # Absolute: FFmpeg takes what is before a colon for a protocol.
        self._part = path.absolute().with_suffix(f".part{path.suffix}")
        try:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            self._part.write_bytes(b"")
        except OSError as error:
            raise SourceError(f"{path}: cannot be written: {error.strerror}") from error
        self.frames = 0
        self.missed = 0
        self._path = path
        self._waiting: Queue[tuple[LaneFrame, Frame]] = Queue(_MOST_WAITING)
        self._worker = Worker("video", self._tick, deadline_s=_LONGEST_TICK_S, on_end=self._end)
        # The following are the worker's alone.
        self._writer: cv2.VideoWriter | None = None
        self._size = (0, 0)
        # Is written once it has stood its time.
        self._standing: tuple[LaneFrame, Frame] | None = None
        self._fps = float(VIDEO_FPS)
        self._began_ns = 0
        self._written = 0
        self._fault: SourceError | None = None
        self._marks: dict[str, deque[tuple[int, Sequence[PictureMark]]]] = {}
        self._worker.start()

    def __call__(self, lane_frame: LaneFrame, frame: Frame | None) -> None:
        if frame is None:
            return
        waits = frame.clock == "recording"
        while self._worker.alive:
            with suppress(Full):
                self._waiting.put((lane_frame, frame), waits, _LOOK_S)
                return
            if not waits:
                break
        self.missed += 1

    def mark(self, network: str, capture_mono_ns: int, marks: Sequence[PictureMark]) -> None:
        """Draw what a network has found in the frame of that capture."""
        of_network = self._marks.setdefault(network, deque(maxlen=_KEPT_MARKS))
        of_network.append((capture_mono_ns, marks))

    def close(self) -> None:
        """Write what waits, and complete the file; raise SourceError where it is no whole video."""
        self._worker.stop(_LONGEST_TICK_S)
        try:
            self._complete()
        except SourceError:
            self._part.unlink(missing_ok=True)
            raise

    def _complete(self) -> None:
        if self._fault is not None:
            raise self._fault
        why = self._worker.failure or ("" if self.frames else "there was no frame")
        if self._worker.alive:
            why = "the encoder does not end"
        if why:
            raise SourceError(f"{self._path}: not written: {why}")
        # OpenCV ignores what the disk does not take.
        found = cv2.VideoCapture(str(self._part))
        count = round(found.get(cv2.CAP_PROP_FRAME_COUNT)) if found.isOpened() else 0
        found.release()
        # From GStreamer, the number is a duration that is rounded.
        if count < max(1, self._written - 1):
            raise SourceError(
                f"{self._path}: not written: its folder took {max(0, count)} of {self._written} "
                "pictures; free space there, or choose another"
            )
        try:
            self._part.replace(self._path)
        except OSError as error:
            raise SourceError(f"{self._path}: cannot be written: {error.strerror}") from error

    # On the worker.

    def _tick(self, now: float) -> bool:
        del now
        try:
            self._put(*self._waiting.get(timeout=_LOOK_S))
        except Empty:
            return True
        except SourceError as error:
            self._fault = error
        return self._fault is None

    def _put(self, lane_frame: LaneFrame, frame: Frame) -> None:
        """Take a frame, and write the one before it."""
        if self._standing is None:
            self._began_ns, self._size = frame.capture_mono_ns, frame.size
        else:
            passed_ns = frame.capture_mono_ns - self._began_ns
            lockstep = frame.clock == "recording"
            if self._writer is None and lockstep and passed_ns > 0:
                self._fps = 1e9 / passed_ns
            due = round(passed_ns * self._fps / 1e9)
            if (beyond := due - self._written - _LONGEST_STAND) > 0:
                self._began_ns += round(beyond * 1e9 / self._fps)
                due -= beyond
            self._write_until(max(due, self._written + 1) if lockstep else due)
        self._standing = lane_frame, frame

    def _drawn(self, lane_frame: LaneFrame, frame: Frame) -> NDArray[np.uint8]:
        marks: list[PictureMark] = []
        for results in tuple(self._marks.values()):
            ages = [(lane_frame.capture_mono_ns - at_ns, found) for at_ns, found in tuple(results)]
            known = [each for each in ages if 0 <= each[0] < _MARKS_NS]
            marks += min(known, key=lambda each: each[0], default=(0, ()))[1]
        whole = resized(bgr_of(frame.image), *frame.size)
        return resized(draw_lane_frame(whole, lane_frame, marks), *self._size)

    def _begin(self) -> cv2.VideoWriter:
        settle_opencv()
        codec = cv2.VideoWriter.fourcc(*_CODECS[self._path.suffix])
        writer = cv2.VideoWriter(str(self._part), codec, self._fps, self._size)
        if not writer.isOpened():
            raise SourceError(
                f"{self._path}: this OpenCV cannot write it; choose .avi, which needs no FFmpeg"
            )
        return writer

    def _write_until(self, due: int) -> None:
        """Write the picture that stands until place `due`."""
        if self._standing is None or self._written >= due:
            return
        writer = self._writer = self._writer or self._begin()
        picture = self._drawn(*self._standing)
        self.frames += 1
        while self._written < due:
            writer.write(picture)
            self._written += 1

    def _end(self) -> None:
        try:
            with suppress(Empty):
                while self._fault is None:
                    self._put(*self._waiting.get_nowait())
            self._write_until(self._written + 1)
        except SourceError as error:
            self._fault = error
        if self._writer is not None:
            self._writer.release()
