"""Calibration boards: their corners in pictures, and the lens and the mounting that follow.

The procedure is that of OpenCV's `samples/cpp/calibration.cpp`: corners to a fraction of a pixel,
then the least squares of all reprojections.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import cv2
import numpy as np

from edge_server.cameras.lane_video import draw_lines, write
from edge_server.errors import SettingsError
from edge_server.lanes.camera_model import CameraModel, Lens, LensKind, Mounting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from edge_server.lanes.types import Lane

    BgrImage = NDArray[np.uint8]

_FORM = (
    "write chessboard:COLUMNSxROWS:SQUARE_M of inner corners, like chessboard:9x6:0.025, or "
    "charuco:COLUMNSxROWS:SQUARE_M:MARKER_M[:DICTIONARY[:legacy]] of squares, like "
    "charuco:11x8:0.03:0.022:DICT_5X5_100"
)
_DICTIONARY = "DICT_5X5_100"
_SIZE = r"(\d{1,3})x(\d{1,3}):(\d*\.?\d+)"
_CHESSBOARD = re.compile(f"chessboard:{_SIZE}")
_CHARUCO = re.compile(rf"charuco:{_SIZE}:(\d*\.?\d+)(?::(DICT_\w+))?(:legacy)?")
# Some builds of OpenCV come without it.
_ARUCO: Any = getattr(cv2, "aruco", None)
FEWEST_VIEWS = 4
_FEWEST_CORNERS = 8
_SUBPIXEL = (cv2.TERM_CRITERIA_EPS + cv2.TERM_CRITERIA_MAX_ITER, 30, 0.001)
_FEWEST_MARKS = 4
_LEAST_STD_RAD = np.radians(0.02)


@dataclass(frozen=True)
class CalibrationBoard:
    """A printed board.

    Attributes:
        kind: chessboards have to be seen whole; ChArUco boards also in part.
        columns, rows: inner corners of a chessboard, squares of a ChArUco board.
        square_m, marker_m: sides of a square, and of a marker of a ChArUco board.
        legacy: an even number of rows as boards had before OpenCV 4.6.
    """

    kind: Literal["chessboard", "charuco"]
    columns: int
    rows: int
    square_m: float
    marker_m: float = 0.0
    dictionary: str = _DICTIONARY
    legacy: bool = False

    @staticmethod
    def of(text: str) -> CalibrationBoard:
        """Return the board that `text` describes; raise SettingsError where it describes none."""
        if (found := _CHESSBOARD.fullmatch(text)) is not None:
            board = CalibrationBoard("chessboard", int(found[1]), int(found[2]), float(found[3]))
        elif (found := _CHARUCO.fullmatch(text)) is not None:
            square_m, marker_m = float(found[3]), float(found[4])
            dictionary, legacy = found[5] or _DICTIONARY, found[6] is not None
            board = CalibrationBoard(
                "charuco", int(found[1]), int(found[2]), square_m, marker_m, dictionary, legacy
            )
        else:
            raise SettingsError(f"board {text!r}: {_FORM}")
        if not (min(board.columns, board.rows) >= 3 and board.marker_m < board.square_m < 10.0):
            raise SettingsError(f"board {text!r}: no board has such a size; {_FORM}")
        if board.kind == "charuco" and not hasattr(_ARUCO, "CharucoDetector"):
            raise SettingsError(
                f"board {text!r}: this OpenCV, {cv2.__version__}, finds no ChArUco boards, 4.7 and "
                "newer do; take a chessboard, or calibrate on another machine"
            )
        if board.kind == "charuco" and not hasattr(_ARUCO, board.dictionary):
            raise SettingsError(f"board {text!r}: OpenCV has no dictionary {board.dictionary}")
        return board


@dataclass(frozen=True, eq=False)
class BoardView:
    """The corners of a board in one picture.

    Attributes:
        corners: (N, 2) float32, px.
        places: (N, 3) float32, on the board, m.
    """

    name: str
    corners: NDArray[np.float32]
    places: NDArray[np.float32]


def find_board(name: str, image: NDArray[np.uint8], board: CalibrationBoard) -> BoardView | None:
    """Return the corners of `board` in `image`, (H, W, 3) uint8 BGR; None where it is not seen."""
    grey = cv2.cvtColor(image, cv2.COLOR_BGR2GRAY)
    if board.kind == "charuco":
        return _find_charuco(name, grey, board)
    size = (board.columns, board.rows)
    flags = cv2.CALIB_CB_ADAPTIVE_THRESH | cv2.CALIB_CB_NORMALIZE_IMAGE
    found, corners = cv2.findChessboardCorners(grey, size, None, flags)
    if not found:
        return None
    # The window must not reach the next corner.
    grid = corners.reshape(board.rows, board.columns, 2)
    nearest = min(float(np.linalg.norm(np.diff(grid, axis=axis), axis=2).min()) for axis in (0, 1))
    half = int(np.clip(nearest / 3, 2, 11))
    corners = cv2.cornerSubPix(grey, corners, (half, half), (-1, -1), _SUBPIXEL)
    places = np.zeros((board.rows * board.columns, 3), np.float32)
    places[:, :2] = np.mgrid[: board.columns, : board.rows].T.reshape(-1, 2) * board.square_m
    return BoardView(name, corners.reshape(-1, 2), places)


def _find_charuco(name: str, grey: NDArray[np.uint8], board: CalibrationBoard) -> BoardView | None:
    dictionary = _ARUCO.getPredefinedDictionary(getattr(_ARUCO, board.dictionary))
    size = (board.columns, board.rows)
    pattern = _ARUCO.CharucoBoard(size, board.square_m, board.marker_m, dictionary)
    pattern.setLegacyPattern(board.legacy)
    corners, ids, _, _ = _ARUCO.CharucoDetector(pattern).detectBoard(grey)
    if ids is None or len(ids) < _FEWEST_CORNERS:
        return None
    places, seen = pattern.matchImagePoints(corners, ids)
    return BoardView(
        name, seen.reshape(-1, 2).astype(np.float32), places.reshape(-1, 3).astype(np.float32)
    )


@dataclass(frozen=True, eq=False)
class LensCalibration:
    """A lens, and how well it explains the pictures.

    Attributes:
        error_px: root mean square of all reprojections.
        errors_px: the same of each view.
        residuals: for each view (N, 2) float64, seen minus reprojected, px.
        focal_std_px: standard deviation of fx; None where OpenCV states none.
        covered: part of the picture's 6 x 4 fields that have corners.
    """

    lens: Lens
    error_px: float
    errors_px: tuple[float, ...]
    residuals: tuple[NDArray[np.float64], ...]
    focal_std_px: float | None
    covered: float


def calibrate_lens(
    views: Sequence[BoardView], width: int, height: int, kind: LensKind = "pinhole"
) -> LensCalibration:
    """Return the lens that explains `views` of pictures of that size in px best.

    Raises:
        SettingsError: there are too few views, or they do not determine the lens.
    """
    if len(views) < FEWEST_VIEWS:
        raise SettingsError(
            f"the board was found in {len(views)} pictures, {FEWEST_VIEWS} are the least and 15 "
            "are good: near and far, in the middle and the corners, tilted in each direction"
        )
    size, focal_std = (width, height), None
    try:
        if kind == "fisheye":
            places = [view.places.reshape(1, -1, 3).astype(np.float64) for view in views]
            corners = [view.corners.reshape(1, -1, 2).astype(np.float64) for view in views]
            # OpenCV 5 has the flags in another place.
            flags: Any = cv2.fisheye if hasattr(cv2.fisheye, "CALIB_FIX_SKEW") else cv2
            _, matrix, distortion, turns, shifts = cv2.fisheye.calibrate(
                places,
                corners,
                size,
                np.zeros((3, 3)),
                np.zeros((4, 1)),
                flags=flags.CALIB_RECOMPUTE_EXTRINSIC | flags.CALIB_FIX_SKEW,
            )
        else:
            _, matrix, distortion, turns, shifts, stds, _, _ = cv2.calibrateCameraExtended(
                [view.places for view in views],
                [view.corners.reshape(-1, 1, 2) for view in views],
                size,
                None,
                None,
            )
            focal_std = float(stds[0, 0])
    except cv2.error as error:
        raise SettingsError(
            f"the pictures do not determine a {kind} lens: {error.err}; take more of them, tilted "
            "in each direction, or leave out those where the corners are wrong"
        ) from error
    residuals = []
    module: Any = cv2.fisheye if kind == "fisheye" else cv2
    for view, turn, shift in zip(views, turns, shifts, strict=True):
        points = view.places.reshape(-1, 1, 3).astype(np.float64)
        seen = module.projectPoints(
            points, turn.reshape(3, 1), shift.reshape(3, 1), matrix, distortion
        )[0]
        residuals.append(view.corners - seen.reshape(-1, 2))
    squares = [np.sum(each**2, axis=1) for each in residuals]
    lens = Lens(
        kind,
        width,
        height,
        float(matrix[0, 0]),
        float(matrix[1, 1]),
        float(matrix[0, 2]),
        float(matrix[1, 2]),
        tuple(float(value) for value in distortion.ravel()),
    )
    return LensCalibration(
        lens,
        float(np.sqrt(np.concatenate(squares).mean())),
        tuple(float(np.sqrt(each.mean())) for each in squares),
        tuple(residuals),
        focal_std,
        _covered(views, width, height),
    )


def _covered(views: Sequence[BoardView], width: int, height: int) -> float:
    corners = np.concatenate([view.corners for view in views])
    fields = np.floor(corners / (width, height) * (6, 4)).astype(int)
    fields = fields[((fields >= 0) & (fields < (6, 4))).all(axis=1)]
    return len({tuple(field) for field in fields.tolist()}) / 24


def board_on_ground(
    view: BoardView, board: CalibrationBoard, x_m: float, y_m: float
) -> NDArray[np.float64]:
    """Return the ground points (N, 2), m, of a chessboard's corners that lies across the road.

    Args:
        view: the board, lying flat with its columns across the road.
        board: a chessboard.
        x_m, y_m: of its nearest corner on the left.

    Raises:
        SettingsError: it is no chessboard, or lies along the road.
    """
    if board.kind != "chessboard":
        raise SettingsError("a board on the ground has to be a chessboard")
    corners = view.corners.reshape(board.rows, board.columns, 2)
    along_row = corners[:, -1] - corners[:, 0]
    if np.mean(np.abs(along_row[:, 0])) < np.mean(np.abs(along_row[:, 1])):
        raise SettingsError(
            f"{view.name}: the board lies along the road; lay its {board.columns} corners across"
        )
    ahead = np.arange(board.rows, dtype=np.float64)
    right = np.arange(board.columns, dtype=np.float64)
    if corners[0, :, 1].mean() < corners[-1, :, 1].mean():  # the first row is the farthest
        ahead = ahead[::-1]
    if along_row[:, 0].mean() < 0:
        right = right[::-1]
    x = x_m + board.square_m * np.repeat(ahead, board.columns)
    y = y_m - board.square_m * np.tile(right, board.rows)
    return np.stack([x, y], axis=1)


def measure_mounting(
    lens: Lens, pixels: NDArray[np.float64], ground: NDArray[np.float64]
) -> tuple[Mounting, float]:
    """Return the mounting that shows ground points (N, 2), m, at pixels (N, 2), and the root mean
    square of their reprojections, px.

    Raises:
        SettingsError: there are too few marks, or no mounting explains them.
    """
    if len(pixels) < _FEWEST_MARKS:
        raise SettingsError(f"{len(pixels)} marks on the ground; give {_FEWEST_MARKS} at least")
    rays = lens.rays_of(pixels).xy
    if np.isnan(rays).any():
        raise SettingsError("a mark is where the lens shows nothing; check its pixel")
    places = np.c_[ground, np.zeros(len(ground))]
    try:
        found, turn, shift = cv2.solvePnP(
            places[:, None], rays[:, None], np.eye(3), None, flags=cv2.SOLVEPNP_ITERATIVE
        )
    except cv2.error as error:
        raise SettingsError(f"the marks lie in one line, or too near: {error.err}") from error
    rotation = cv2.Rodrigues(turn)[0]
    position = -(rotation.T @ shift).ravel()
    if not (found and np.isfinite(position).all() and position[2] > 0.1):
        raise SettingsError("no mounting shows the marks at these pixels; check the numbers")
    # Rows: the picture's axes in the vehicle's; R_cv = P Rᵀ, so R = (Pᵀ R_cv)ᵀ.
    forward, right, down = rotation[2], rotation[0], rotation[1]
    body = np.stack([forward, -right, -down], axis=1)
    pitch = float(np.arcsin(np.clip(-body[2, 0], -1.0, 1.0)))
    yaw = float(np.arctan2(body[1, 0], body[0, 0]))
    roll = float(np.arctan2(body[2, 1], body[2, 2]))
    x_m, y_m, height_m = (float(value) for value in position)
    mounting = Mounting(height_m, pitch, roll, yaw, x_m, y_m)
    seen = cv2.projectPoints(places, turn, shift, np.eye(3), None)[0].reshape(-1, 2)
    residual = lens.pixels_of(seen) - pixels
    error_px = float(np.sqrt(np.mean(np.sum(residual**2, axis=1))))
    # A click is good to a pixel.
    pitch_std, yaw_std = _angle_stds(lens, mounting, ground, max(1.0, error_px))
    return replace(mounting, pitch_std_rad=pitch_std, yaw_std_rad=yaw_std), error_px


def _angle_stds(
    lens: Lens, mounting: Mounting, ground: NDArray[np.float64], std_px: float
) -> tuple[float, float]:
    """Return the standard deviations of pitch and yaw, from the projection's derivatives."""
    step = 1e-5
    columns = []
    for name in ("pitch_rad", "yaw_rad", "height_m", "roll_rad", "x_m", "y_m"):
        value = getattr(mounting, name)
        ends = [
            CameraModel(lens, replace(mounting, **{name: end})).image_of(ground).ravel()
            for end in (value + step, value - step)
        ]
        columns.append((ends[0] - ends[1]) / (2 * step))
    jacobian = np.stack(columns, axis=1)
    variances = np.diag(np.linalg.pinv(jacobian.T @ jacobian)) * std_px**2
    pitch, yaw = np.sqrt(np.maximum(variances[:2], _LEAST_STD_RAD**2))
    return float(pitch), float(yaw)


# Residuals are drawn this much longer than they are.
_MAGNIFIED = 50.0
_GRID_BGR = (0, 220, 255)
_LANE_BGR = {-1: (80, 220, 60), 1: (60, 160, 255)}
_OTHER_LANE_BGR = (220, 80, 220)

# The bird's-eye view: so far to each side and ahead.
BIRDS_EYE_SIDE_M = 9.0
BIRDS_EYE_AHEAD_M = 50.0
_PX_PER_M = 20.0
_PX_PER_M_AHEAD = 16.0


def residual_picture(views: Sequence[BoardView], calibration: LensCalibration) -> BgrImage:
    """Return a picture of the calibrated size with each corner and its residual, 50 times as long.

    Green is less than 0.5 px, red more than 1.5 px. Residuals without a pattern are noise; those of
    one board that point in one direction mean that it was bent, or moved.
    """
    lens = calibration.lens
    picture = np.full((lens.height, lens.width, 3), 32, np.uint8)
    for view, residuals in zip(views, calibration.residuals, strict=True):
        for corner, residual in zip(view.corners, residuals, strict=True):
            length = float(np.hypot(*residual))
            colour = (80, 220, 80) if length < 0.5 else (60, 200, 255)
            colour = colour if length < 1.5 else (60, 60, 255)
            draw_lines(picture, [np.stack([corner, corner + _MAGNIFIED * residual])], colour, 1)
            x, y = np.rint(corner).astype(int)
            cv2.circle(picture, (int(x), int(y)), 2, colour, -1, cv2.LINE_AA)
    text = f"{len(views)} views, {calibration.error_px:.3f} px; lines are {_MAGNIFIED:g} x"
    write(picture, text, (12, 28), 0.6)
    return picture


def grid_picture(image: BgrImage, camera: CameraModel, lanes: Sequence[Lane]) -> BgrImage:
    """Return a copy of `image`, of the camera's size, with a grid on the road: a line across each
    5 m, and lines along it 1.8 m from the middle and each 3.6 m beyond."""
    picture: BgrImage = image.copy()
    ahead = np.linspace(2.0, BIRDS_EYE_AHEAD_M, 200)
    across = np.linspace(-BIRDS_EYE_SIDE_M, BIRDS_EYE_SIDE_M, 60)
    for side in (-5.4, -1.8, 1.8, 5.4):
        _draw(picture, camera, np.stack([ahead, np.full_like(ahead, side)], 1), _GRID_BGR, 1)
    for distance in np.arange(5.0, BIRDS_EYE_AHEAD_M + 1.0, 5.0):
        _draw(picture, camera, np.stack([np.full_like(across, distance), across], 1), _GRID_BGR, 1)
        x, y = camera.image_of(np.array([[distance, -2.0]]))[0]
        if np.isfinite([x, y]).all() and 0 <= x < image.shape[1] and 0 <= y < image.shape[0]:
            write(picture, f"{distance:g} m", (int(x), int(y) - 3), 0.45)
    for lane in lanes:
        if lane.ground is not None:
            _draw(picture, camera, _course(lane), _colour(lane), 2)
    return picture


def birds_eye_picture(image: BgrImage, camera: CameraModel, lanes: Sequence[Lane]) -> BgrImage:
    """Return the road from above, 9 m to each side and 50 m ahead, the vehicle at the bottom.

    Straight lanes of a right calibration are parallel here, and vertical where the vehicle drives
    along them.
    """
    width, height = (
        round(2 * BIRDS_EYE_SIDE_M * _PX_PER_M),
        round(BIRDS_EYE_AHEAD_M * _PX_PER_M_AHEAD),
    )
    columns, rows = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
    ground = np.stack(
        [
            BIRDS_EYE_AHEAD_M - rows.ravel() / _PX_PER_M_AHEAD,
            BIRDS_EYE_SIDE_M - columns.ravel() / _PX_PER_M,
        ],
        axis=1,
    )
    seen = np.nan_to_num(camera.image_of(ground), nan=-1e4).astype(np.float32)
    seen = seen.reshape(height, width, 2)
    picture: BgrImage = np.asarray(
        cv2.remap(image, seen[..., 0], seen[..., 1], cv2.INTER_LINEAR), np.uint8
    )
    for distance in np.arange(10.0, BIRDS_EYE_AHEAD_M, 10.0):
        row = round((BIRDS_EYE_AHEAD_M - distance) * _PX_PER_M_AHEAD)
        cv2.line(picture, (0, row), (width, row), _GRID_BGR, 1)
        write(picture, f"{distance:g} m", (4, row - 4), 0.45)
    for lane in lanes:
        if lane.ground is not None:
            course = _course(lane)
            points = np.stack(
                [
                    (BIRDS_EYE_SIDE_M - course[:, 1]) * _PX_PER_M,
                    (BIRDS_EYE_AHEAD_M - course[:, 0]) * _PX_PER_M_AHEAD,
                ],
                axis=1,
            )
            draw_lines(picture, [points], _colour(lane), 2)
    return picture


def beside(left: BgrImage, right: BgrImage) -> BgrImage:
    """Return both pictures side by side, at the height of the first."""
    scale = left.shape[0] / right.shape[0]
    size = (round(right.shape[1] * scale), left.shape[0])
    return np.hstack([left, np.asarray(cv2.resize(right, size, interpolation=cv2.INTER_AREA))])


def _course(lane: Lane) -> NDArray[np.float64]:
    assert lane.ground is not None  # noqa: S101  # for the type checker: the caller has looked
    polynomial = lane.ground.polynomial
    x = np.linspace(polynomial.x_min_m, polynomial.x_max_m, 60)
    return np.stack([x, np.polynomial.polynomial.polyval(x, polynomial.coefficients)], axis=1)


def _colour(lane: Lane) -> tuple[int, int, int]:
    return _LANE_BGR.get(lane.index, _OTHER_LANE_BGR)


def _draw(
    picture: BgrImage,
    camera: CameraModel,
    ground: NDArray[np.float64],
    colour: tuple[int, int, int],
    thickness: int,
) -> None:
    pixels = camera.image_of(ground)
    near = (np.abs(pixels) < 20_000.0).all(axis=1)  # False for NaN
    draw_lines(picture, [pixels[near]], colour, thickness)
