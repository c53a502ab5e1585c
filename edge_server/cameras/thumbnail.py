"""A small picture of the brightness of a frame, cheap enough to make for each one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from edge_server.pixels import ColourRange, PixelFormat

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.pixels import Image

# About so many samples across the picture. A cell is the mean of 4 x 4 of them, so that a sensor's
# noise goes down to a quarter; a tile is 3 x 2 cells, 60 x 40 px of 1280 x 720.
_SAMPLES_ACROSS = 256
_CELL = 4
_TILE_ROWS, _TILE_COLUMNS = 3, 2
_BLACK, _WHITE = 16.0, 235.0


@dataclass(frozen=True, eq=False)
class Thumbnail:
    """Samples of the brightness of a frame at equal distances.

    Attributes:
        samples: (rows, columns) uint8, as the camera sent them.
        cells: (rows / 4, columns / 4) float32, 0..255 from black to white.
        scale: from a sample to the levels of `cells`.
    """

    samples: NDArray[np.uint8]
    cells: NDArray[np.float32]
    scale: float

    @staticmethod
    def of(image: Image) -> Thumbnail | None:
        """Return the thumbnail of `image`; None where it is smaller than one tile."""
        luma = image.luma()
        step = max(1, round(luma.shape[1] / _SAMPLES_ACROSS))
        height, width = _CELL * _TILE_ROWS, _CELL * _TILE_COLUMNS
        rows = luma.shape[0] // step // height * height
        # An even number of tiles, for the halves of the picture.
        columns = luma.shape[1] // step // (2 * width) * 2 * width
        if not rows or not columns:
            return None
        samples = np.ascontiguousarray(luma[::step, ::step][:rows, :columns])
        lines = samples.astype(np.uint16).reshape(rows // _CELL, _CELL, columns)
        # Many times faster than a sum over two axes.
        sums = lines[:, 0] + lines[:, 1] + lines[:, 2] + lines[:, 3]
        sums = sums[:, 0::_CELL] + sums[:, 1::_CELL] + sums[:, 2::_CELL] + sums[:, 3::_CELL]
        cells = sums.astype(np.float32) * np.float32(1 / _CELL**2)
        scale = 1.0
        limited = image.colour.range is ColourRange.LIMITED
        if limited and image.pixel_format is not PixelFormat.BGR:
            scale = 255.0 / (_WHITE - _BLACK)
            cells = np.clip((cells - np.float32(_BLACK)) * np.float32(scale), 0, 255)
        return Thumbnail(samples, cells, scale)


def tiles_of(cells: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return `cells` as (rows, cells of a tile's row, columns, cells of a tile's column)."""
    rows, columns = cells.shape
    return cells.reshape(rows // _TILE_ROWS, _TILE_ROWS, columns // _TILE_COLUMNS, _TILE_COLUMNS)
