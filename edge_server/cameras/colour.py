"""Conversion of camera images to BGR, for people and for models that take nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cv2
import numpy as np

from edge_server.pixels import Colour, ColourMatrix, ColourRange, Image, PixelFormat

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Kr and Kb of the two recommendations.
_WEIGHTS = {ColourMatrix.BT601: (0.299, 0.114), ColourMatrix.BT709: (0.2126, 0.0722)}


def bgr_of(image: Image) -> NDArray[np.uint8]:
    """Return `image` as (H, W, 3) uint8 BGR; a BGR image's own pixels, otherwise new ones.

    Chroma is that of the nearest pixel.
    """
    match image.pixel_format:
        case PixelFormat.BGR:
            return image.planes[0]
        case PixelFormat.GREY:
            chroma = np.full((*image.luma().shape, 2), 128, np.uint8)
        case PixelFormat.YUY2:
            pairs = image.planes[0][..., 1].reshape(image.height, -1, 2)
            chroma = pairs.repeat(2, axis=1)
        case PixelFormat.NV12:
            pairs = image.planes[1].reshape(image.height // 2, -1, 2)
            chroma = pairs.repeat(2, axis=0).repeat(2, axis=1)
        case PixelFormat.I420:
            pairs = np.stack(image.planes[1:], axis=-1)
            chroma = pairs.repeat(2, axis=0).repeat(2, axis=1)
    yuv = np.dstack([image.luma(), chroma])
    return cv2.transform(yuv, _to_bgr(image.colour))  # type: ignore[no-any-return]  # OpenCV has no types


def _to_bgr(colour: Colour) -> NDArray[np.float64]:
    """Return the (3, 4) matrix from Y, U, V and 1 to B, G, R."""
    red, blue = _WEIGHTS[colour.matrix]
    green = 1 - red - blue
    black, luma, chroma = 0.0, 1.0, 1.0
    if colour.range is ColourRange.LIMITED:
        black, luma, chroma = 16.0, 255 / 219, 255 / 224
    by_blue, by_red = 2 * (1 - blue) * chroma, 2 * (1 - red) * chroma
    rows = np.array(
        [
            [luma, by_blue, 0],
            [luma, -by_blue * blue / green, -by_red * red / green],
            [luma, 0, by_red],
        ]
    )
    return np.column_stack([rows, -rows @ (black, 128, 128)])
