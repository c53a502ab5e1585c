"""The lens of a calibration: measured from pictures of a board, or roughly by its field of view."""

from __future__ import annotations

import math
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np

from edge_server.cameras.boards import (
    BoardView,
    CalibrationBoard,
    calibrate_lens,
    find_board,
    residual_picture,
)
from edge_server.cameras.calibration import CalibrationTables, LensTable, read_tables, text_of
from edge_server.cameras.colour import bgr_of
from edge_server.cameras.frame import Pace, Recording
from edge_server.cameras.recordings import write_picture
from edge_server.cameras.source import open_source
from edge_server.errors import EdgeServerError, SettingsError, SourceError
from edge_server.process.disk import atomic_write

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from edge_server.cameras.frame import Frame

_FEW_VIEWS = 10
_LITTLE_COVERED = 0.6
_LARGE_ERROR_PX = 1.0
# Of --camera: a view counts where the board has moved by this part of the picture's width.
_MOVED = 0.06
_MOST_FRAMES_WITHOUT_BOARD = 3000
_ROUGH = "for a first look: distances are as wrong as the field of view is, and more in the corners"


def intrinsics(arguments: argparse.Namespace) -> Iterator[str]:
    """Find the board in pictures, calibrate the lens, write the file and the residuals' picture.

    Raises:
        SettingsError: the pictures do not make a calibration.
        SourceError: a picture cannot be read, or the camera gives nothing.
    """
    board = CalibrationBoard.of(arguments.board)
    if bool(arguments.pictures) == bool(arguments.camera):
        raise SettingsError("give pictures of the board, or --camera URI")
    views: list[BoardView] = []
    size: tuple[int, int] | None = None
    names = []
    pictures = (
        _board_pictures(arguments.pictures)
        if arguments.pictures
        else _moved_boards(arguments.camera, board, arguments.views)
    )
    for name, image in pictures:
        this = (image.shape[1], image.shape[0])
        size = size or this
        if this != size:
            yield f"{name}: left out: {this[0]} x {this[1]} px, the first has {size[0]} x {size[1]}"
            continue
        view = find_board(name, image, board)
        if view is None:
            yield f"{name}: left out: the board is not seen{whole(board)}"
            continue
        views.append(view)
        names.append(name)
    if size is None:
        raise SourceError("no picture was read")
    result = calibrate_lens(views, *size, arguments.lens)
    for name, error_px in zip(names, result.errors_px, strict=True):
        yield f"{name}: {error_px:.3f} px"
    lens = result.lens
    table = LensTable(
        lens.kind,
        lens.width,
        lens.height,
        lens.fx,
        lens.fy,
        lens.cx,
        lens.cy,
        lens.distortion,
        result.error_px,
    )
    mounting = read_tables(arguments.output).mounting if arguments.output.exists() else None
    yield f"reprojection error {result.error_px:.3f} px, of {len(views)} views"
    std = "" if result.focal_std_px is None else f" +- {result.focal_std_px:.1f}"
    yield f"focal length {lens.fx:.1f}{std} px; corners in {result.covered:.0%} of the picture"
    if len(views) < _FEW_VIEWS:
        yield f"warning: {len(views)} views are few; 15 to 20 make a lens that can be relied upon"
    if result.covered < _LITTLE_COVERED:
        yield "warning: the corners leave much of the picture out, where the distortion is a guess"
    if result.error_px > _LARGE_ERROR_PX:
        yield "warning: the error is large; is the board flat, and the picture sharp?"
    residuals = arguments.residuals or arguments.output.with_suffix(".residuals.png")
    write_picture(residuals, residual_picture(views, result))
    yield f"residuals are drawn in {residuals}"
    yield from write(arguments.output, CalibrationTables(table, mounting))
    if mounting is None:
        yield f"next: edge-server calibrate mounting {arguments.output} --height METRES"


def lens(arguments: argparse.Namespace) -> Iterator[str]:
    """Write a lens of a known field of view, without distortion.

    Raises:
        EdgeServerError: the file cannot be written.
    """
    width, height = arguments.size
    focal_px = width / 2 / math.tan(math.radians(arguments.fov) / 2)
    table = LensTable(
        "pinhole", width, height, focal_px, focal_px, (width - 1) / 2, (height - 1) / 2, (0.0,) * 5
    )
    mounting = read_tables(arguments.file).mounting if arguments.file.exists() else None
    yield f"focal length {focal_px:.1f} px, without distortion; {_ROUGH}"
    yield from write(arguments.file, CalibrationTables(table, mounting))


def _board_pictures(paths: Sequence[Path]) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    for path in paths:
        yield path.name, picture_of(path)


def _moved_boards(
    uri: str, board: CalibrationBoard, count: int
) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """Yield pictures in which the board is in another place than in those before.

    Raises:
        SourceError: the camera fails, or the board is not seen for long.
    """
    taken: list[NDArray[np.float32]] = []
    unseen = 0
    for image in frames_of(uri):
        view = find_board("", image, board)
        if view is None:
            unseen += 1
            if unseen > _MOST_FRAMES_WITHOUT_BOARD:
                raise SourceError(f"the board was not seen in {unseen} frames{whole(board)}")
            continue
        unseen = 0
        outline = np.concatenate([view.corners.min(axis=0), view.corners.max(axis=0)])
        gaps = [float(np.abs(outline - other).max()) for other in taken]
        if gaps and min(gaps) < _MOVED * image.shape[1]:
            continue
        taken.append(outline)
        yield f"view {len(taken)}", image
        if len(taken) == count:
            return


def whole(board: CalibrationBoard) -> str:
    return ", whole" if board.kind == "chessboard" else ""


def picture_of(path: Path) -> NDArray[np.uint8]:
    with closing(open_source(str(path))) as source:
        frame = source.read()
    if frame is None:
        raise SourceError(f"{path}: no picture")
    return bgr_of(frame.image)


def frames_of(uri: str) -> Iterator[NDArray[np.uint8]]:
    """Yield each image of `uri`, (H, W, 3) uint8 BGR, a recording as fast as it can be read.

    Raises:
        SourceError: it gives no images.
    """
    for frame in frames_of_source(uri):
        yield bgr_of(frame.image)


def frames_of_source(uri: str) -> Iterator[Frame]:
    source = open_source(uri)
    if isinstance(source, Recording):
        source.pace = Pace(0.0)
    try:
        while (frame := source.read()) is not None:
            yield frame
    finally:
        source.close()


def write(path: Path, tables: CalibrationTables) -> Iterator[str]:
    try:
        atomic_write(path, text_of(tables).encode())
    except OSError as error:
        raise EdgeServerError(f"{path}: cannot be written: {error.strerror}") from error
    yield f"written to {path}"
