"""Convert a camera frame to a network's input on the CPU: the reference for the exact numbers.

Colour first, by OpenCV's integer cvtColor (BT.601, video range; for NV12 on ARM, OpenCV before 4.9,
as in JetPack 6, has different code); then one bilinear interpolation in 8 bits, a resize or a map;
then value * scale in 32-bit floats, rounded once more if the output is float16. The kernels in
`gpu/kernels` return the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import cv2
import numpy as np

from edge_server.gpu.kernels.preprocess import CropRegion, PixelFormat

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class UndistortionMap:
    """The position in the camera's frame of every network pixel.

    One map for undistortion, crop and resize together: each pixel is interpolated once, and the
    frame is read once. Positions have steps of 1/32 px, as in OpenCV's 8-bit remap of every
    version; with float maps the results depend on version and processor, with this fixed-point form
    they do not. Pixels outside the frame are black.

    Attributes:
        positions: (H, W, 2) int16, the frame's column and row.
        fractions: (H, W) uint16, row fraction << 5 | column fraction, each in 1/32 px.
    """

    positions: NDArray[np.int16]
    fractions: NDArray[np.uint16]

    @classmethod
    def of_camera(
        cls,
        camera_matrix: NDArray[np.float64],
        distortion: NDArray[np.float64],
        region: CropRegion,
        width: int,
        height: int,
    ) -> UndistortionMap:
        """Return the map that undistorts and resizes `region` of the undistorted frame.

        Args:
            camera_matrix: (3, 3), of the camera's full frame in px, as cv2.calibrateCamera returns
                it.
            distortion: OpenCV's coefficients k1 k2 p1 p2 [k3 ...].
            region: the network's part of the undistorted frame, in px of the full frame.
            width, height: the network's size in px.
        """
        # Sample centres lie at half pixels, as in the resize.
        step_x, step_y = region.width / width, region.height / height
        network = np.array(camera_matrix, np.float64)
        network[0] /= step_x
        network[1] /= step_y
        network[0, 2] = (camera_matrix[0, 2] + 0.5 - region.x) / step_x - 0.5
        network[1, 2] = (camera_matrix[1, 2] + 0.5 - region.y) / step_y - 0.5
        positions, fractions = cv2.initUndistortRectifyMap(
            camera_matrix, distortion, None, network, (width, height), cv2.CV_16SC2
        )
        return cls(positions, fractions)

    @classmethod
    def of_points(cls, x: NDArray[np.float32], y: NDArray[np.float32]) -> UndistortionMap:
        """Return the map of columns and rows in px of the frame, each (H, W) float32."""
        return cls(*cv2.convertMaps(x, y, cv2.CV_16SC2))


def bgr_of(
    pixel_format: PixelFormat,
    pixels: NDArray[np.uint8],
    chroma: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """Return the frame as (H, W, 3) uint8 BGR.

    Args:
        pixel_format: the format of the planes.
        pixels: BGR (H, W, 3), YUY2 (H, W, 2), or NV12's luma (H, W); rows may have gaps.
        chroma: NV12's interleaved U and V, (H / 2, W); None for the other formats.
    """
    match pixel_format:
        case PixelFormat.BGR:
            return pixels
        case PixelFormat.YUY2:
            return cv2.cvtColor(pixels, cv2.COLOR_YUV2BGR_YUY2)  # type: ignore[no-any-return]
        case PixelFormat.NV12:
            assert chroma is not None  # noqa: S101 - NV12 has two planes
            pairs = chroma.reshape(len(chroma), -1, 2)
            return cv2.cvtColorTwoPlane(  # type: ignore[no-any-return]
                pixels, pairs, cv2.COLOR_YUV2BGR_NV12
            )


def scale_frame(
    frame: NDArray[np.uint8],
    scale: np.float32,
    out: NDArray[np.float32] | NDArray[np.float16],
    undistortion: UndistortionMap | None = None,
) -> None:
    """Write `frame`, (h, w, 3) uint8, into `out`, (3, H, W) float32 or float16: planar, scaled.

    The frame is resized to H, W (sample centres at half pixels, no antialiasing); or, with a map of
    that size, undistorted. A slice of a larger image is a region: pixels outside the slice are
    never mixed in.
    """
    _, height, width = out.shape
    if undistortion is not None:
        frame = cv2.remap(frame, undistortion.positions, undistortion.fractions, cv2.INTER_LINEAR)
    elif frame.shape[:2] != (height, width):
        frame = cv2.resize(frame, (width, height), interpolation=cv2.INTER_LINEAR)
    for plane, target in zip(cv2.split(frame), out, strict=True):
        np.multiply(plane, scale, out=target, dtype=np.float32)
