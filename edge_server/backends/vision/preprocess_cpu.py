"""Convert a camera frame to a network's input on the CPU: the reference for the exact numbers.

One bilinear interpolation in 8 bits, a resize or a map, of BGR, or of luma and chroma apart, each
at its own resolution; then Y, U and V become B, G and R in whole numbers (`pixels.YuvToBgr`); then
value * scale in 32-bit floats, rounded once more if the output is float16. The kernels in
`gpu/kernels` return the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import cv2
import numpy as np

from edge_server.cameras.colour import bgr_of_channels, channels_of, layers_of, resized

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from edge_server.cameras.colour import Layer
    from edge_server.pixels import CropRegion, Image


@dataclass(frozen=True, eq=False)
class UndistortionMap:
    """The position in the camera's frame of every network pixel: (H, W, 2) int16, column and row,
    and (H, W) uint16, row fraction << 5 | column fraction, each in 1/32 px.

    One map for undistortion, crop and resize together: each pixel is interpolated once. The
    fixed-point form is that of OpenCV's 8-bit remap of every version; with float maps the results
    depend on version and processor. Pixels outside the frame are black."""

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
        """Return the map that undistorts and resizes `region` of the undistorted frame, in px of
        the full frame, to the network's `width` and `height`. `camera_matrix`, (3, 3), is of the
        full frame, as cv2.calibrateCamera returns it, `distortion` OpenCV's k1 k2 p1 p2 [k3
        ...]."""
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

    @cached_property
    def by_step(self) -> Mapping[tuple[int, int], UndistortionMap]:
        """The map of each layer of an image, by the layer's columns and rows in px per pixel."""
        columns = self.positions[..., 0] * np.int32(_STEPS) + (self.fractions & _STEPS - 1)
        rows = self.positions[..., 1] * np.int32(_STEPS) + (self.fractions >> 5)
        half_columns, half_rows = _halved(columns), _halved(rows)
        return {
            (1, 1): self,
            (2, 1): _map_of(half_columns, rows),
            (2, 2): _map_of(half_columns, half_rows),
        }


# Steps of a position in a map, per px.
_STEPS = 32


def _halved(positions: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the positions in a plane of half the pixels; its first centre lies at 0.5 px."""
    return (positions >> 1) - _STEPS // 4


def _map_of(columns: NDArray[np.int32], rows: NDArray[np.int32]) -> UndistortionMap:
    positions = np.stack([columns, rows], axis=-1)
    fractions = (rows & _STEPS - 1) << 5 | columns & _STEPS - 1
    return UndistortionMap((positions >> 5).astype(np.int16), fractions.astype(np.uint16))


def scale_frame(
    image: Image,
    scale: np.float32,
    out: NDArray[np.float32] | NDArray[np.float16],
    undistortion: UndistortionMap | None = None,
    region: CropRegion | None = None,
) -> None:
    """Write `image` into `out`, (3, H, W) float32 or float16: planes B, G, R, scaled.

    The region, or the whole image, is resized to H, W (sample centres at half pixels, no
    antialiasing); pixels outside the region are never mixed in. With a map of the size H, W, the
    image is undistorted instead; the map includes its own region.
    """
    _, height, width = out.shape
    layers = layers_of(image, None if undistortion else region)
    if undistortion is None:
        taken = [resized(layer.pixels, width, height) for layer in layers]
    else:
        taken = [_undistorted(layer, undistortion) for layer in layers]
    channels = channels_of(image.pixel_format, taken)
    bgr = bgr_of_channels(image.pixel_format, image.colour, channels)
    for plane, target in zip(cv2.split(bgr), out, strict=True):
        np.multiply(plane, scale, out=target, dtype=np.float32)


def _undistorted(layer: Layer, undistortion: UndistortionMap) -> NDArray[np.uint8]:
    of_layer = undistortion.by_step[layer.step_px]
    return cv2.remap(  # type: ignore[no-any-return]  # OpenCV has no types
        layer.pixels,
        of_layer.positions,
        of_layer.fractions,
        cv2.INTER_LINEAR,
        borderMode=cv2.BORDER_CONSTANT,
        borderValue=layer.black,
    )
