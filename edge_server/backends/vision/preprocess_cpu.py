"""A camera frame becomes a network's input on the CPU: the definition of the numbers.

Colour first, by OpenCV's integer cvtColor (BT.601, video range; for NV12 on ARM OpenCV has other
code before 4.9, as JetPack 6 has it); then one bilinear interpolation in 8 bits, a resize or a map;
then value * scale in 32-bit floats, rounded once more if the output is float16. The kernels in
`cuda/kernels` give the same bits.
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
    """For every network pixel, where in the camera's frame it lies.

    One map from network to camera pixel, undistortion, crop and resize in one: a pixel is
    interpolated once, not twice, and the frame is read once. The lens is undone in steps of
    1/32 px, which is what OpenCV's 8-bit remap did for all its versions; with float maps its
    numbers depend on the version and the processor, with this fixed-point form they do not.
    Outside the frame lies black.

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
        """The map that undoes a lens and resizes `region` of the undistorted frame.

        Args:
            camera_matrix: (3, 3), of the camera's full frame in px, as cv2.calibrateCamera
                gives it.
            distortion: OpenCV's coefficients k1 k2 p1 p2 [k3 ...].
            region: what of the undistorted frame the network sees, in px of the full frame.
            width, height: the network's size in px.
        """
        # Sample centres at half pixels, as the resize has them.
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
        """From columns and rows in px of the frame, each (H, W) float32."""
        return cls(*cv2.convertMaps(x, y, cv2.CV_16SC2))


def bgr_of(
    pixel_format: PixelFormat,
    pixels: NDArray[np.uint8],
    chroma: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """The frame as (H, W, 3) uint8 BGR.

    Args:
        pixel_format: what the planes hold.
        pixels: BGR (H, W, 3), YUY2 (H, W, 2), or NV12's luma (H, W); rows may have gaps.
        chroma: NV12's U and V in turns, (H / 2, W); for the others None.
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

    Resized to H, W (sample centres at half pixels, no antialiasing); or, with a map of that size,
    undistorted. A slice of a larger image is a region: what lies outside is not mixed in.
    """
    _, height, width = out.shape
    if undistortion is not None:
        frame = cv2.remap(frame, undistortion.positions, undistortion.fractions, cv2.INTER_LINEAR)
    elif frame.shape[:2] != (height, width):
        frame = cv2.resize(frame, (width, height), interpolation=cv2.INTER_LINEAR)
    for plane, target in zip(cv2.split(frame), out, strict=True):
        np.multiply(plane, scale, out=target, dtype=np.float32)
