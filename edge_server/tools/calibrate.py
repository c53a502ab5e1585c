"""A calibration: the lens, measured from pictures of a board or roughly by its field of view; the
mounting, given, measured by marks or estimated on a drive; and a look at both."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from edge_server.board.installation import shipped_models
from edge_server.cameras.calibration import (
    CalibrationTables,
    LensTable,
    MountingTable,
    calibration_id,
    read_tables,
    text_of,
)
from edge_server.cameras.camera import Camera
from edge_server.cameras.colour import bgr_of
from edge_server.cameras.frame import Pace, Recording
from edge_server.cameras.recordings import read_picture, write_picture
from edge_server.cameras.source import open_source
from edge_server.cameras.source_uri import parse_source_uri
from edge_server.daemon.parts import models_aside
from edge_server.errors import EdgeServerError, SettingsError, SourceError, Unavailable
from edge_server.lanes.camera_model import CameraModel, Mounting
from edge_server.lanes.road_geometry import road_of
from edge_server.pipeline.lane_pipeline import LanePipeline
from edge_server.pixels import Image
from edge_server.process.disk import atomic_write
from edge_server.settings import Repository
from edge_server.tools.boards import (
    BoardView,
    CalibrationBoard,
    beside,
    birds_eye_picture,
    board_on_ground,
    calibrate_lens,
    find_board,
    grid_picture,
    measure_mounting,
    residual_picture,
)
from edge_server.tools.mounting_estimate import FEWEST_FRAMES, MountingEstimator, mounting_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Generator, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from edge_server.cameras.frame import Frame
    from edge_server.lanes.road_geometry import Spread
    from edge_server.lanes.types import Lane
    from edge_server.tools.mounting_estimate import MountingEstimate

_FEW_VIEWS = 10
_LITTLE_COVERED = 0.6
_LARGE_ERROR_PX = 1.0
# Of --camera: a view counts where the board has moved by this part of the picture's width.
_MOVED = 0.06
_MOST_FRAMES_WITHOUT_BOARD = 3000
_ROUGH = "for a first look: distances are as wrong as the field of view is, and more in the corners"


def intrinsics(arguments: argparse.Namespace) -> Iterator[str]:
    """Find the board in pictures, calibrate the lens, write the file and the residuals' picture."""
    board = CalibrationBoard.of(arguments.board)
    if bool(arguments.pictures) == bool(arguments.camera):
        raise SettingsError("give pictures of the board, or --camera URI")
    views: list[BoardView] = []
    size: tuple[int, int] | None = None
    names = []
    pictures = (
        ((path.name, read_picture(str(path))) for path in arguments.pictures)
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
    table = LensTable(**asdict(lens), reprojection_error_px=result.error_px)
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
    """Write a lens of a known field of view, without distortion."""
    width, height = arguments.size
    focal_px = width / 2 / math.tan(math.radians(arguments.fov) / 2)
    table = LensTable(
        "pinhole", width, height, focal_px, focal_px, (width - 1) / 2, (height - 1) / 2, (0.0,) * 5
    )
    mounting = read_tables(arguments.file).mounting if arguments.file.exists() else None
    yield f"focal length {focal_px:.1f} px, without distortion; {_ROUGH}"
    yield from write(arguments.file, CalibrationTables(table, mounting))


def _moved_boards(
    uri: str, board: CalibrationBoard, count: int
) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """Yield pictures in which the board is in another place than in those before."""
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


def frames_of(uri: str) -> Iterator[NDArray[np.uint8]]:
    """Yield each image of `uri`, (H, W, 3) uint8 BGR, a recording as fast as it can be read."""
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


# Nothing is known more precisely of a camera that drives.
_LEAST_STD_RAD = math.radians(0.02)
# Dashes of one line that differ by more, near and far, or lanes than what is said of them.
_DOUBTFUL, _CONTRADICTION = 0.04, 0.12
_SURE_STDS = 2.0
_LANES_M = (2.4, 4.6)
# Where the lens alone matters.
_LEVEL = Mounting(1.0)


def mounting(arguments: argparse.Namespace) -> Iterator[str]:
    """Write a mounting that is given, or that follows from marks on the ground."""
    tables = read_tables(arguments.file)
    if arguments.mark or arguments.board:
        given = ("height", "pitch", "roll", "yaw", "x", "y")
        if doubled := [name for name in given if getattr(arguments, name) is not None]:
            raise SettingsError(f"--{doubled[0]}: follows from the marks; give one of both")
        lens = tables.lens.lens()
        pixels, ground = _marks(arguments)
        if arguments.picture is not None:
            lens = _scaled(CameraModel(lens, _LEVEL), read_picture(str(arguments.picture))).lens
        measured, error_px = measure_mounting(lens, pixels, ground)
        yield f"{len(pixels)} marks, reprojection error {error_px:.2f} px"
        table = _table_of(measured)
    elif arguments.height is not None:
        table = _given(tables.mounting, arguments)
    else:
        raise SettingsError("give --height, or marks on the ground: --mark, or --board with --at")
    yield from _in_words(table)
    yield from write(arguments.file, CalibrationTables(tables.lens, table))


def estimate(arguments: argparse.Namespace) -> Iterator[str]:
    """Estimate pitch and yaw, and height or lane width, from the paint of a straight drive."""
    tables = read_tables(arguments.file)
    roll = arguments.roll
    if roll is None:
        roll = tables.mounting.roll_deg if tables.mounting is not None else 0.0
    estimator: MountingEstimator | None = None
    calibrated = tables.lens.lens()
    yield f"looking for paint in up to {arguments.frames} frames"
    source = lanes_in(arguments.uri, arguments.model_repository, arguments.model)
    with closing(source):
        for image, lanes in source:
            if estimator is None:
                lens = _scaled(CameraModel(calibrated, _LEVEL), image).lens
                estimator = MountingEstimator(lens, math.radians(roll))
            estimator.add(lanes, Image.of_bgr(image))
            if estimator.seen >= arguments.frames:
                break
    found = None if estimator is None else estimator.estimate()
    seen, straight = (0, 0) if estimator is None else (estimator.seen, estimator.straight)
    if found is None:
        raise SettingsError(
            f"{straight} of {seen} frames show the paint of both lines of a straight lane, "
            f"{FEWEST_FRAMES} are the least; drive longer, straight, on a marked road"
        )
    yield f"{straight} of {seen} frames show the paint of both lines of a straight lane"
    yield _spread("pitch", found.pitch_rad)
    yield _spread("yaw", found.yaw_rad)
    if arguments.height is None:
        height_m = found.height_m(arguments.lane_width)
        widths = found.width_heights
        low, high = (arguments.lane_width / width for width in (widths.high, widths.low))
        yield (
            f"height {height_m:.2f} m for lanes of {arguments.lane_width:g} m (8 of 10 frames: "
            f"{low:.2f} to {high:.2f}); it is as wrong as that width is"
        )
    else:
        height_m, widths = arguments.height, found.width_heights
        yield (
            f"lanes of {height_m * widths.median:.2f} m for a height of {height_m:g} m (8 of 10 "
            f"frames: {height_m * widths.low:.2f} to {height_m * widths.high:.2f})"
        )
    yield from judged(found, height_m, arguments.lane_width)
    given = _given(tables.mounting, arguments, height_m=height_m, roll_deg=roll).mounting()
    table = _table_of(mounting_of(found, height_m, given, least_std_rad=_LEAST_STD_RAD))
    yield from _in_words(table)
    if arguments.write:
        yield from write(arguments.file, CalibrationTables(tables.lens, table))
    else:
        yield "not written; --write puts it into the file"


def judged(found: MountingEstimate, height_m: float, lane_width_m: float) -> Iterator[str]:
    """Yield the spacing of dashes, and what is doubtful.

    Raises:
        SettingsError: two of the numbers contradict each other.
    """
    near, far, apart = found.near_dashes, found.far_dashes, found.dashes_apart
    if near is None:
        yield "dashes: too few are seen to check the pitch by"
    elif far is None or apart is None:
        near_m = height_m * near.median
        yield f"dashes: every {near_m:.1f} m near, too few far away to check the pitch by"
    else:
        off, std = apart
        yield (
            f"dashes: every {height_m * near.median:.1f} m near, {height_m * far.median:.1f} m far "
            f"({off:+.0%} +- {std:.0%})"
        )
        fault = (
            f"dashes of one line are {abs(off):.0%} {'farther' if off > 0 else 'nearer'} to "
            "each other far away than near: the road is not flat, or the lens is not this one"
        )
        if abs(off) > _CONTRADICTION and abs(off) - _SURE_STDS * std > _DOUBTFUL:
            raise SettingsError(
                f"{fault}; take a minute of level, straight road without bridges; where its "
                "dashes differ, too, calibrate the lens with `calibrate intrinsics`"
            )
        if abs(off) > max(_DOUBTFUL, _SURE_STDS * std):
            yield f"doubtful: {fault}"
        elif _SURE_STDS * std > _CONTRADICTION:
            yield "doubtful: dashes are too few, or too unlike, to check the pitch by; drive longer"
    width_m = height_m * found.width_heights.median
    off = width_m / lane_width_m - 1.0
    if not _LANES_M[0] <= width_m <= _LANES_M[1]:
        raise SettingsError(
            f"no lane is {width_m:.2f} m wide: measure the camera's height again, and check the "
            "focal length"
        )
    if abs(off) > _DOUBTFUL:
        yield (
            f"doubtful: {width_m:.2f} m is {'wide' if off > 0 else 'narrow'} for lanes of "
            f"{lane_width_m:g} m (--lane-width): the height or the focal length is {abs(off):.0%} "
            "off, or the lanes are others"
        )


def show(arguments: argparse.Namespace) -> Iterator[str]:
    """Write a picture with a grid on the road, and the road from above beside it."""
    tables = read_tables(arguments.file)
    if tables.mounting is None:
        raise SettingsError(f"{arguments.file}: has no [mounting]; edge-server calibrate mounting")
    calibrated = CameraModel(tables.lens.lens(), tables.mounting.mounting())
    image, lanes = _frame_with_lanes(arguments)
    camera = _scaled(calibrated, image)
    road = road_of(lanes, camera)
    picture = beside(
        grid_picture(image, camera, road.lanes), birds_eye_picture(image, camera, road.lanes)
    )
    write_picture(arguments.output, picture)
    yield f"calibration {calibration_id(calibrated)}"
    if arguments.lanes:
        ego = road.ego
        for lane in road.lanes:
            if lane.ground is not None:
                polynomial = lane.ground.polynomial
                yield (
                    f"lane {lane.index:+d}: y = {polynomial.coefficients[0]:+.2f} m beside the "
                    f"axle, seen from {polynomial.x_min_m:.0f} to {polynomial.x_max_m:.0f} m"
                )
        yield f"lane width {_metres(ego.lane_width_m)}, offset {_metres(ego.lateral_offset_m)}"
    yield f"picture in {arguments.output}"


def lanes_in(
    uri: str, repositories: Sequence[Path], model: str
) -> Generator[tuple[NDArray[np.uint8], Sequence[Lane]], None, None]:
    """Yield each image of `uri` with its lanes, px.

    Args:
        repositories: paths of the models; without any, the shipped ones.

    Raises:
        SourceError: the source gives no images.
        SettingsError, ModelConfigError, Unavailable: there is no such lane model.
    """
    paths = tuple(map(str, repositories or (shipped_models(),)))
    with models_aside(Repository(paths=paths)) as (control, data_plane):
        if failed := control.load_first():
            raise Unavailable("\n".join(entry.reason for entry in failed))
        pipeline = LanePipeline(Camera("calibrate", uri), data_plane, model, ())
        pipeline.validate()
        for frame in frames_of_source(uri):
            yield bgr_of(frame.image), pipeline.lane_model.detect(frame).lanes


def _frame_with_lanes(arguments: argparse.Namespace) -> tuple[NDArray[np.uint8], Sequence[Lane]]:
    frames: Iterator[tuple[NDArray[np.uint8], Sequence[Lane]]]
    if arguments.lanes:
        frames = lanes_in(arguments.uri, arguments.model_repository, arguments.model)
    else:
        frames = ((image, ()) for image in frames_of(arguments.uri))
    for number, (image, lanes) in enumerate(frames):
        if number == arguments.frame:
            return image, lanes
    label = parse_source_uri(arguments.uri).label
    raise SourceError(f"{label}: has no frame {arguments.frame}")


def _metres(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f} m"


def _marks(arguments: argparse.Namespace) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return pixels (N, 2) and ground points (N, 2) of all marks."""
    marks = np.array(arguments.mark or [], np.float64).reshape(-1, 4)
    pixels, ground = marks[:, :2], marks[:, 2:]
    if arguments.board is None:
        return pixels, ground
    if arguments.picture is None or arguments.at is None:
        raise SettingsError("--board needs --picture, and --at X,Y of its nearest left corner")
    board = CalibrationBoard.of(arguments.board)
    view = find_board(arguments.picture.name, read_picture(str(arguments.picture)), board)
    if view is None:
        raise SettingsError(f"{arguments.picture}: the board is not seen{whole(board)}")
    places = board_on_ground(view, board, *arguments.at)
    return np.concatenate([pixels, view.corners]), np.concatenate([ground, places])


def _scaled(camera: CameraModel, image: NDArray[np.uint8]) -> CameraModel:
    try:
        return camera.scaled_to(image.shape[1], image.shape[0])
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _given(
    before: MountingTable | None, arguments: argparse.Namespace, **more: float
) -> MountingTable:
    """Return the mounting of the flags, over the one before."""
    flags = {
        "height_m": "height",
        "pitch_deg": "pitch",
        "roll_deg": "roll",
        "yaw_deg": "yaw",
        "x_m": "x",
        "y_m": "y",
    }
    values: dict[str, Any] = {} if before is None else msgspec.structs.asdict(before)
    chosen = {key: getattr(arguments, flag, None) for key, flag in flags.items()}
    values |= {key: value for key, value in chosen.items() if value is not None} | more
    try:
        return msgspec.convert(values, MountingTable, strict=True)
    except msgspec.ValidationError as error:
        raise SettingsError(f"mounting: {error}") from error


def _table_of(mounting: Mounting) -> MountingTable:
    return MountingTable(
        mounting.height_m,
        math.degrees(mounting.pitch_rad),
        math.degrees(mounting.roll_rad),
        math.degrees(mounting.yaw_rad),
        mounting.x_m,
        mounting.y_m,
        math.degrees(mounting.pitch_std_rad),
        math.degrees(mounting.yaw_std_rad),
    )


def _in_words(table: MountingTable) -> Iterator[str]:
    yield (
        f"height {table.height_m:.3f} m, pitch {table.pitch_deg:+.2f} +- {table.pitch_std_deg:.2f} "
        f"deg, roll {table.roll_deg:+.2f} deg, yaw {table.yaw_deg:+.2f} +- {table.yaw_std_deg:.2f} "
        f"deg, x {table.x_m:+.2f} m, y {table.y_m:+.2f} m"
    )


def _spread(name: str, spread: Spread) -> str:
    median, low, high, std = (
        math.degrees(each) for each in (spread.median, spread.low, spread.high, spread.std)
    )
    return f"{name} {median:+.2f} deg +- {std:.2f} (8 of 10 frames: {low:+.2f} to {high:+.2f})"
