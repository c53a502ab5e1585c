"""What NV12 and YUY2 are in BGR, in whole numbers and numpy alone.

The kernels give these numbers to the bit. So does OpenCV where it uses its own code; its code for
ARM gives NV12 other ones before 4.9, which is what JetPack 6 has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edge_server.gpu.kernels.preprocess import PixelFormat

if TYPE_CHECKING:
    from numpy.typing import NDArray

# BT.601 in video range, times 2 to the 20: OpenCV's ITUR_BT_601_* of color_yuv.simd.hpp.
_LUMA, _BLUE_U, _GREEN_U, _GREEN_V, _RED_V = 1220542, 2116026, -409993, -852492, 1673527
_SHIFT = 20


def bgr_by_integers(
    pixel_format: PixelFormat,
    pixels: NDArray[np.uint8],
    chroma: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """As `preprocess_cpu.bgr_of`: (H, W, 3) uint8 BGR."""
    if pixel_format is PixelFormat.BGR:
        return pixels
    if pixel_format is PixelFormat.NV12:
        assert chroma is not None
        luma = pixels
        pairs = chroma.reshape(len(chroma), -1, 2).repeat(2, axis=0)
    else:
        luma = pixels[..., 0]
        pairs = pixels[..., 1].reshape(len(pixels), -1, 2)
    u, v = (pairs[..., i].repeat(2, axis=1).astype(np.int64) - 128 for i in (0, 1))
    scaled = np.maximum(luma.astype(np.int64) - 16, 0) * _LUMA + (1 << (_SHIFT - 1))
    channels = (scaled + _BLUE_U * u, scaled + _GREEN_U * u + _GREEN_V * v, scaled + _RED_V * v)
    return np.stack([c >> _SHIFT for c in channels], axis=-1).clip(0, 255).astype(np.uint8)
