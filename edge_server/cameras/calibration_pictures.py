"""Pictures by which a person checks a calibration: residuals, a grid, a bird's-eye view."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cv2
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from edge_server.cameras.boards import BoardView, LensCalibration
    from edge_server.lanes.camera_model import CameraModel
    from edge_server.lanes.types import Lane

    BgrImage = NDArray[np.uint8]

# Residuals are drawn this much longer than they are.
_MAGNIFIED = 50.0
_FONT = cv2.FONT_HERSHEY_SIMPLEX
_GRID_BGR = (0, 220, 255)
_LANE_BGR = {-1: (80, 220, 60), 1: (60, 160, 255)}
_OTHER_LANE_BGR = (220, 80, 220)
_SUBPIXEL_BITS = 4

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
            begin, end = (_fixed(point) for point in (corner, corner + _MAGNIFIED * residual))
            cv2.line(picture, begin, end, colour, 1, cv2.LINE_AA, _SUBPIXEL_BITS)
            cv2.circle(picture, begin, 2 << _SUBPIXEL_BITS, colour, -1, cv2.LINE_AA, _SUBPIXEL_BITS)
    text = f"{len(views)} views, {calibration.error_px:.3f} px; lines are {_MAGNIFIED:g} x"
    _write(picture, text, (12, 28))
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
            _write(picture, f"{distance:g} m", (int(x), int(y) - 3), 0.45)
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
        _write(picture, f"{distance:g} m", (4, row - 4), 0.45)
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
            _polyline(picture, points, _colour(lane), 2)
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
    _polyline(picture, pixels[near], colour, thickness)


def _polyline(
    picture: BgrImage,
    points: NDArray[np.float64],
    colour: tuple[int, int, int],
    thickness: int,
) -> None:
    fixed = np.rint(points * (1 << _SUBPIXEL_BITS)).astype(np.int32)
    cv2.polylines(picture, [fixed], False, colour, thickness, cv2.LINE_AA, _SUBPIXEL_BITS)


def _fixed(point: NDArray[np.floating]) -> tuple[int, int]:
    x, y = np.rint(point * (1 << _SUBPIXEL_BITS)).astype(int)
    return int(x), int(y)


def _write(picture: BgrImage, text: str, place: tuple[int, int], scale: float = 0.6) -> None:
    cv2.putText(picture, text, place, _FONT, scale, (0, 0, 0), 3, cv2.LINE_AA)
    cv2.putText(picture, text, place, _FONT, scale, (255, 255, 255), 1, cv2.LINE_AA)
