"""Pictures of boards that a known lens takes, pixel by pixel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cv2
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.lanes.camera_model import CameraModel, Lens
    from edge_server.tools.boards import CalibrationBoard

_PX = 70  # of a square in the printed board
_LINES = 2  # white squares around it


def printed(board: CalibrationBoard) -> NDArray[np.uint8]:
    """Return the board's print, grey; a square has `_PX` px, the margin `_LINES` squares."""
    if board.kind == "charuco":
        dictionary = cv2.aruco.getPredefinedDictionary(getattr(cv2.aruco, board.dictionary))
        size = (board.columns, board.rows)
        pattern = cv2.aruco.CharucoBoard(size, board.square_m, board.marker_m, dictionary)
        pattern.setLegacyPattern(board.legacy)
        inner = pattern.generateImage((board.columns * _PX, board.rows * _PX))
    else:
        rows, columns = np.indices((board.rows + 1, board.columns + 1))
        inner = np.kron(
            ((rows + columns) % 2 * 255).astype(np.uint8), np.ones((_PX, _PX), np.uint8)
        )
    return np.pad(inner, _LINES * _PX, constant_values=255)


class BoardCamera:
    """Takes pictures of boards with a known lens."""

    def __init__(self, lens: Lens) -> None:
        self.lens = lens
        columns, rows = np.meshgrid(np.arange(lens.width), np.arange(lens.height))
        pixels = np.stack([columns.ravel(), rows.ravel()], axis=1).astype(np.float64)
        rays = lens.rays_of(pixels).xy
        self._rays = np.c_[rays, np.ones(len(rays))]

    def picture(
        self,
        board: CalibrationBoard,
        turn: tuple[float, float, float],
        place: tuple[float, float, float],
    ) -> NDArray[np.uint8]:
        """Return the picture of a board whose middle is at `place` (right, down, ahead, m), turned
        by that rotation vector."""
        rotation = cv2.Rodrigues(np.array(turn, np.float64))[0]
        normal, shift = rotation[:, 2], np.array(place)
        with np.errstate(divide="ignore", invalid="ignore"):
            depth = (normal @ shift) / (self._rays @ normal)
        on_board = (self._rays * depth[:, None] - shift) @ rotation
        extra = 0 if board.kind == "charuco" else 1
        middle = np.array([board.columns + extra, board.rows + extra]) / 2 + _LINES
        where = (on_board[:, :2] / board.square_m + middle) * _PX - 0.5
        return self._draw(printed(board), where, depth > 0)

    def picture_on_ground(
        self, board: CalibrationBoard, camera: CameraModel, x_m: float, y_m: float
    ) -> NDArray[np.uint8]:
        """Return the picture of a chessboard on the road, its nearest left inner corner there."""
        direction = self._rays[:, [2, 0, 1]] * (1, -1, -1) @ camera.mounting.rotation.T
        reach = camera.mounting.height_m / np.maximum(-direction[:, 2], 1e-9)
        ground = direction[:, :2] * reach[:, None] + camera.mounting.position[:2]
        across = (y_m - ground[:, 1]) / board.square_m + 1 + _LINES
        ahead = (ground[:, 0] - x_m) / board.square_m + 1 + _LINES
        where = np.stack([across, ahead], axis=1) * _PX - 0.5
        return self._draw(printed(board), where, direction[:, 2] < -1e-3)

    def _draw(
        self, print_: NDArray[np.uint8], where: NDArray[np.float64], seen: NDArray[np.bool_]
    ) -> NDArray[np.uint8]:
        where = np.where(seen[:, None] & np.isfinite(where), where, -1e4).astype(np.float32)
        where = where.reshape(self.lens.height, self.lens.width, 2)
        # An eye that does not blur would see jagged edges.
        soft = cv2.GaussianBlur(print_, (0, 0), 1.5)
        grey = cv2.remap(soft, where[..., 0], where[..., 1], cv2.INTER_LINEAR, borderValue=110)
        return np.repeat(grey[..., None], 3, axis=2)


# Near and far, in the middle and the corners, tilted in each direction.
POSES = [
    ((0.0, 0.0, 0.0), (0.0, 0.0, 0.55)),
    ((0.4, 0.0, 0.1), (-0.12, -0.06, 0.5)),
    ((-0.4, 0.1, 0.0), (0.12, 0.06, 0.5)),
    ((0.0, 0.45, 0.0), (0.12, -0.06, 0.5)),
    ((0.1, -0.45, 0.1), (-0.12, 0.06, 0.5)),
    ((0.35, 0.35, 0.0), (0.0, 0.0, 0.42)),
    ((-0.3, 0.4, 0.2), (0.05, 0.0, 0.45)),
    ((0.3, -0.4, -0.2), (-0.05, 0.02, 0.6)),
    ((-0.5, 0.0, 0.0), (0.0, -0.05, 0.6)),
    ((0.0, 0.6, 0.3), (-0.1, 0.0, 0.6)),
]
