"""`image_preprocess`: convert a camera frame to a network's input.

Input: one UINT8 tensor, a frame in the camera's pixel format.
Outputs: one FP32 or FP16 tensor with dims [3,H,W] (planes in the order B, G, R, values times
`scale`), and optionally one INT32 tensor with dims [2]: height and width in px of the resized
region, for the model that maps network coordinates back to pixels.

Parameters in config.pbtxt:
- `scale`: factor applied to the 8-bit values (default 1/255).
- `pixel_format`: `bgr` (default; input dims [-1,-1,3]; planes keep the order of its channels),
  `grey` (dims [-1,-1,1]), `yuy2` (dims [-1,-1,2]: Y interleaved with U or V; width even), `nv12` or
  `i420` (dims [-1,-1]: H rows of luma, then H/2 of interleaved U and V, or all of U and then all of
  V; H and width even), or `any` (dims [-1,-1,-1]: the request's own, see below).
- `color_matrix`: `bt601` (default) or `bt709`, and `color_range`: `limited` (default) or `full`:
  what the values of all formats but BGR mean, where the request does not name them.
- `crop`: "x,y,width,height" in px of the frame: only that region is resized. The model rejects a
  frame that does not contain the region. With a lens, the region is one of the undistorted frame.
- `camera_matrix` "fx,fy,cx,cy", `distortion` "k1,k2,p1,p2[,k3...]", `calibrated_size` "1920x1080",
  all or none, as cv2.calibrateCamera returns them (no fisheye): the lens distortion is removed. The
  undistorted frame has the frame's size and camera matrix; pixels outside the camera's view are
  black. The model rejects frames of another size than the calibrated one.

Lanes that `lane_decode` computes with that size are thus in px of the crop, from its upper left
corner (add x and y for the frame's), and of the undistorted image where the model has a lens.

Request parameters, all optional: `color_matrix` and `color_range` as above, and `pixel_format`,
which only a model for `any` needs, and only for NV12 and I420: without it a frame with three
channels is BGR, with two YUY2, with one GREY. The packed array of each format has three axes there,
see `pixels.PixelFormat`. A batch may mix requests of different formats and colours.

The frame is resized bilinearly in 8 bits (OpenCV's INTER_LINEAR: sample centres at half pixels, no
antialiasing; with a lens one interpolation does both), luma and chroma apart and each at its own
resolution; then converted to BGR in whole numbers, then scaled in 32-bit floats. An instance on a
GPU returns the same bits as one on the CPU, and leaves the planes on the GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edge_server.backends.vision.image_preprocess_config import Preprocessing, check_config
from edge_server.backends.vision.image_preprocess_gpu import GpuPreprocess
from edge_server.backends.vision.preprocess_cpu import scale_frame
from edge_server.errors import DeviceLost, EdgeServerError, Unavailable
from edge_server.gpu.kernels import kernel_image
from edge_server.gpu.stream import Module
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_server.backends.contract import (
        ExecuteRequest,
        Instance,
        LoadContext,
        ModelMetric,
        Tensors,
    )
    from edge_server.gpu.device import Device
    from edge_server.gpu.devices import Devices
    from edge_server.model_config.config import ModelConfig, Placement
    from edge_server.model_config.files import ModelFiles


def complete(files: ModelFiles, version: int, config: ModelConfig) -> ModelConfig:
    """Complete the configuration.

    Raises:
        ModelConfigError: tensors or parameters differ from those in the module docstring.
    """
    del version
    check_config(files, config)
    return config


def load(context: LoadContext) -> ImagePreprocess:
    return ImagePreprocess(Preprocessing.of(context.config), context.devices)


class ImagePreprocess:
    """One loaded version; each instance runs only where it is placed."""

    def __init__(self, wanted: Preprocessing, devices: Devices) -> None:
        self._wanted = wanted
        self._devices = devices
        self._modules: dict[int, Module] = {}

    def make_instance(self, name: str, placement: Placement) -> Instance:
        if placement.kind != "GPU":
            return CpuPreprocess(self._wanted)
        try:
            device = self._devices.gpu(placement.gpu or 0)
            return GpuPreprocess(name, device, self._module(device), self._wanted)
        except DeviceLost:
            raise
        except EdgeServerError as error:
            raise Unavailable(f"instance {name} cannot be made: {error}") from error

    def not_ready_reason(self) -> str:
        return ""

    def metrics(self) -> Sequence[ModelMetric]:
        return ()

    def close(self) -> None:
        self._modules.clear()

    def _module(self, device: Device) -> Module:
        """Return the kernels on `device`, loaded once for all instances on that device.

        Raises:
            Unavailable: none of the shipped kernels runs on the device; the text names the remedy.
        """
        if device.index not in self._modules:
            image = kernel_image(device.compute_capability, device.driver_version)
            self._modules[device.index] = Module(device, image)
        return self._modules[device.index]


class CpuPreprocess:
    """An `Instance` on the CPU. Each request of a batch is converted, or refused, by itself: it has
    its own pixel format and colours."""

    def __init__(self, wanted: Preprocessing) -> None:
        self._wanted = wanted

    def execute(self, requests: Sequence[ExecuteRequest]) -> None:
        for request in requests:
            made: Tensors | EdgeServerError
            try:
                made = self._converted(request)
            except EdgeServerError as error:
                made = error
            request.respond(made, True)

    def close(self) -> None:
        """Do nothing: the instance owns no resources."""

    def _converted(self, request: ExecuteRequest) -> Tensors:
        wanted, outputs = self._wanted, request.outputs
        images = request.host_inputs()[wanted.image].array
        frames = wanted.frames_of(images.shape, request.request.parameters)
        made: dict[str, Tensor] = {}
        if wanted.planes.name in outputs:
            shape = (frames.frame_count, *wanted.planes.shape)
            planes = np.empty(shape, wanted.planes.datatype.numpy)
            for pixels, out in zip(images if wanted.batched else [images], planes, strict=True):
                image, region = frames.image(pixels), wanted.region(frames)
                scale_frame(image, wanted.scale, out, wanted.undistortion, region)
            made[wanted.planes.name] = Tensor(planes if wanted.batched else planes[0])
        if wanted.size is not None and wanted.size in outputs:
            made[wanted.size] = wanted.size_tensor(frames)
        return made
