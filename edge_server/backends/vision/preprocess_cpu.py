"""Convert a camera frame to a network's input on the CPU: the reference for the exact numbers.

One bilinear interpolation in 8 bits, a resize or a map, of BGR, or of luma and chroma apart, each
at its own resolution; then Y, U and V become B, G and R in whole numbers (`pixels.YuvToBgr`); then
value * scale in 32-bit floats, rounded once more if the output is float16. The kernels in
`gpu/kernels` return the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cv2
import numpy as np

from edge_server.backends.contract import Instance
from edge_server.cameras.colour import bgr_of
from edge_server.errors import EdgeServerError
from edge_server.pixels import Image
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from edge_server.backends.contract import ExecuteRequest
    from edge_server.backends.vision.image_preprocess_config import Preprocessing, UndistortionMap
    from edge_server.pixels import CropRegion


class CpuPreprocess(Instance):
    """An `Instance` on the CPU. Each request of a batch is converted, or refused, by itself: it has
    its own pixel format and colours."""

    def __init__(self, wanted: Preprocessing) -> None:
        self._wanted = wanted
        _, height, width = wanted.planes.shape
        # Kept, as new memory costs more than what is written into it.
        self._channels = [np.empty((height, width), np.uint8) for _ in range(3)]

    def execute(self, requests: Sequence[ExecuteRequest]) -> None:
        wanted = self._wanted
        for request in requests:
            try:
                images = request.host_inputs()[wanted.image].array
                frames = wanted.frames_of(images.shape, request.request.parameters)
            except EdgeServerError as error:
                request.respond(error, True)
                continue
            made: dict[str, Tensor] = {}
            if wanted.planes.name in request.outputs:
                shape = (frames.frame_count, *wanted.planes.shape)
                planes = np.empty(shape, wanted.planes.datatype.numpy)
                for pixels, out in zip(images if wanted.batched else [images], planes, strict=True):
                    packed = pixels if pixels.ndim == 3 else pixels[..., np.newaxis]
                    image = Image.of_packed(frames.pixel_format, packed, frames.colour)
                    scale_frame(
                        image,
                        wanted.scale,
                        out,
                        wanted.undistortion,
                        frames.region,
                        channels=self._channels,
                    )
                made[wanted.planes.name] = Tensor(planes if wanted.batched else planes[0])
            if wanted.size is not None and wanted.size in request.outputs:
                made[wanted.size] = wanted.size_tensor(frames)
            request.respond(made, True)


def scale_frame(
    image: Image,
    scale: np.float32,
    out: NDArray[np.float32] | NDArray[np.float16],
    undistortion: UndistortionMap | None = None,
    region: CropRegion | None = None,
    *,
    channels: Sequence[NDArray[np.uint8]] | None = None,
) -> None:
    """Write `image` into `out`, (3, H, W) float32 or float16: planes B, G, R, scaled.

    The region, or the whole image, is resized to H, W (sample centres at half pixels, no
    antialiasing); pixels outside the region are never mixed in. With a map of the size H, W, the
    image is undistorted instead; the map includes its own region. `channels` is memory for three
    planes of that size.
    """
    _, height, width = out.shape
    if undistortion is None:
        bgr = bgr_of(image, (width, height), region)
    else:
        bgr = bgr_of(image, (width, height), sample=undistortion.sample)
    for plane, target in zip(cv2.split(bgr, channels), out, strict=True):
        # Numpy converts and multiplies faster than it does both at once.
        np.copyto(target, plane)
        np.multiply(target, scale, out=target, dtype=np.float32)
