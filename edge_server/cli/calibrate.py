"""`edge-server calibrate …`: the arguments of each verb, whose code is imported when it runs."""

from __future__ import annotations

import argparse
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.board.installation import remedy
from edge_server.cli.verbs import OK, Verbs, number, positive, whole_number
from edge_server.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.cli.verbs import N

_ABOUT = """\
Makes the file that puts a camera's lanes on the road: first its lens (intrinsics, or roughly:
lens), then where the camera sits in the vehicle (mounting, or estimate while driving), then a look
at the result (show). cameras.NAME.calibration in the settings names the file.
"""
_CODES = """\
exit codes: 0 done, 2 usage, 69 a camera or a picture gives nothing, or a file cannot be written,
78 the pictures, numbers or the file do not make a calibration; the text says why, 130 interrupted
"""
_INTERRUPTED = "\nedge-server: interrupted; no file was changed"


def add_calibrate_verbs(parser: argparse.ArgumentParser) -> None:
    """Add the verbs below `calibrate`."""
    verbs = Verbs(parser, about=_ABOUT, codes=_CODES, interrupted=_INTERRUPTED)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return verbs.add(name, text, partial(_run, name))

    rough = add("lens", "the lens, roughly, from its field of view")
    _takes_file(rough, "the calibration to write")
    rough.add_argument(
        "--fov", type=_angle, required=True, metavar="DEG", help="from the left edge to the right"
    )
    rough.add_argument(
        "--size", type=_size, default=(1280, 720), metavar="WxH", help="in px; default: 1280x720"
    )

    lens = add("intrinsics", "the lens, from pictures of a board")
    lens.add_argument(
        "pictures", nargs="*", type=Path, metavar="PICTURE", help="images of the board"
    )
    lens.add_argument(
        "--camera", metavar="URI", help="take the pictures now: hold the board in view"
    )
    lens.add_argument(
        "--views", type=positive, default=20, metavar="N", help="of --camera; default: 20"
    )
    lens.add_argument(
        "--board",
        required=True,
        metavar="KIND",
        help="chessboard:9x6:0.025 (inner corners, metres) or charuco:11x8:0.03:0.022:DICT_5X5_100 "
        "(squares, square and marker in metres; :legacy for boards of before OpenCV 4.6)",
    )
    lens.add_argument(
        "--lens", choices=("pinhole", "fisheye"), default="pinhole", help="default: pinhole"
    )
    lens.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="the calibration to write"
    )
    lens.add_argument(
        "--residuals", type=Path, metavar="PNG", help="picture of the errors; default: beside FILE"
    )

    mounting = add("mounting", "where the camera sits: given, or from marks")
    _takes_file(mounting, "the calibration, with its lens")
    _takes_mounting(mounting, angles=True)
    mounting.add_argument("--picture", type=Path, metavar="PICTURE", help="of marks on the ground")
    mounting.add_argument(
        "--mark",
        action="append",
        type=_mark,
        metavar="U,V=X,Y",
        help="a mark on the ground: its pixel, and metres forward and left of the front axle's "
        "middle; 4 or more, not in one line",
    )
    mounting.add_argument(
        "--board",
        metavar="chessboard:9x6:0.1",
        help="a chessboard that lies flat in --picture, its columns across the road",
    )
    mounting.add_argument(
        "--at",
        type=_place,
        metavar="X,Y",
        help="of the board's nearest inner corner on the left, metres, as for --mark",
    )

    estimate = add("estimate", "where the camera looks, from a straight drive")
    _takes_file(estimate, "the calibration, with its lens")
    estimate.add_argument(
        "source", metavar="URI", help="a clip of the drive, or the camera on the vehicle"
    )
    estimate.add_argument(
        "--frames", type=positive, default=1500, metavar="N", help="end after N; default: 1500"
    )
    estimate.add_argument(
        "--lane-width",
        type=_metres,
        default=3.6,
        metavar="METRES",
        help="of the lanes driven on, from which the height follows where --height is not given; "
        "default: 3.6",
    )
    _takes_mounting(estimate, angles=False)
    _takes_model(estimate)
    estimate.add_argument("--write", action="store_true", help="put the mounting into the file")

    show = add("show", "a grid on the road and a bird's-eye view, to check by eye")
    _takes_file(show, "the calibration")
    show.add_argument("source", metavar="URI", help="a picture, a clip or a camera")
    show.add_argument(
        "--output", type=Path, required=True, metavar="PNG", help="the picture to write"
    )
    show.add_argument(
        "--frame", type=whole_number, default=0, metavar="N", help="of a clip; default: 0"
    )
    show.add_argument(
        "--lanes", action="store_true", help="detect lanes, draw them, print their numbers"
    )
    _takes_model(show)


def _takes_file(verb: argparse.ArgumentParser, text: str) -> None:
    verb.add_argument("file", type=Path, metavar="FILE", help=text)


def _takes_mounting(verb: argparse.ArgumentParser, *, angles: bool) -> None:
    verb.add_argument("--height", type=float, metavar="METRES", help="of the lens above the road")
    if angles:
        verb.add_argument(
            "--pitch", type=float, metavar="DEG", help="positive looks down; default: 0"
        )
        verb.add_argument(
            "--yaw", type=float, metavar="DEG", help="positive looks left; default: 0"
        )
    verb.add_argument(
        "--roll", type=float, metavar="DEG", help="positive: right side lower; default: 0"
    )
    verb.add_argument(
        "--x", type=float, metavar="METRES", help="lens forward of the front axle; default: 0"
    )
    verb.add_argument(
        "--y", type=float, metavar="METRES", help="lens left of the middle; default: 0"
    )


def _takes_model(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--model-repository",
        action="append",
        metavar="DIR",
        help="where the lane model is; default: the shipped models",
    )
    verb.add_argument("--model", default="lane_detection", help="default: lane_detection")


def _in_range(kind: type[N], low: float, what: str) -> Callable[[str], N]:
    return number(kind, lambda value: low <= value < 1e6, what)


_metres = _in_range(float, 0.1, "metres")


def _angle(text: str) -> float:
    value = _in_range(float, 10, "an angle")(text)
    if value > 120:
        raise argparse.ArgumentTypeError(f"{text}: a wider lens needs calibrate intrinsics")
    return value


def _size(text: str) -> tuple[int, int]:
    width, times, height = text.partition("x")
    if not times:
        raise argparse.ArgumentTypeError(f"{text}: write it as 1280x720")
    return _in_range(int, 16, "a width")(width), _in_range(int, 16, "a height")(height)


def _pair(text: str, form: str) -> tuple[float, float]:
    parts = text.split(",")
    try:
        first, second = map(float, parts)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: write it as {form}") from None
    return first, second


def _place(text: str) -> tuple[float, float]:
    return _pair(text, "X,Y in metres, like 6.0,0.9")


def _mark(text: str) -> tuple[float, float, float, float]:
    pixel, equals, place = text.partition("=")
    form = "U,V=X,Y, like 512,630=6.0,1.5"
    if not equals:
        raise argparse.ArgumentTypeError(f"{text}: write it as {form}")
    return (*_pair(pixel, form), *_pair(place, form))


def _run(name: str, arguments: argparse.Namespace) -> int:
    # --help imports no OpenCV.
    try:
        code = import_module("edge_server.tools.calibrate")
    except ModuleNotFoundError as error:
        if error.name != "cv2":
            raise
        text = f"OpenCV for Python (cv2) is missing; {remedy('cv2')}"
        raise SourceError(text) from error
    for line in getattr(code, name)(arguments):
        print(line, flush=True)
    return OK
