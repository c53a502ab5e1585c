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
see `pixels.PixelFormat`. `crop` as above, of a model without a crop and a lens of its own. A batch
may mix requests of different formats, colours and crops.

The frame is resized bilinearly in 8 bits (OpenCV's INTER_LINEAR: sample centres at half pixels, no
antialiasing; with a lens one interpolation does both), luma and chroma apart and each at its own
resolution; then converted to BGR in whole numbers, then scaled in 32-bit floats. An instance on a
GPU returns the same bits as one on the CPU, and leaves the planes on the GPU.
"""

from __future__ import annotations

import ctypes
import time
from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.backends.contract import Instance, Model, Phases, on_host
from edge_server.backends.vision.image_preprocess_config import (
    SIZES_KEPT,
    Preprocessing,
    check_config,
)
from edge_server.backends.vision.preprocess_cpu import CpuPreprocess
from edge_server.errors import DeviceLost, EdgeServerError, Unavailable
from edge_server.gpu.memory import (
    BufferPool,
    CudaArray,
    DeviceMemory,
    MappedMemory,
    UploadOnce,
    pinned_array,
)
from edge_server.gpu.preprocess_kernel import (
    MAX_FRAMES,
    FrameAddress,
    FrameLayout,
    FramePreprocess,
    PreprocessArgs,
    kernel_image,
    kernel_name,
)
from edge_server.gpu.stream import GpuEvent, Module, Stream
from edge_server.pixels import PixelFormat
from edge_server.tensors import DataType, Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from edge_server.backends.contract import ExecuteRequest, LoadContext
    from edge_server.backends.vision.image_preprocess_config import RequestFrames
    from edge_server.gpu.device import Device, Devices
    from edge_server.model_config.config import ModelConfig, Placement
    from edge_server.model_config.files import ModelFiles


def complete(files: ModelFiles, version: int, config: ModelConfig) -> ModelConfig:
    del version
    check_config(files, config)
    return config


def load(context: LoadContext) -> ImagePreprocess:
    return ImagePreprocess(Preprocessing.of(context.config), context.devices)


class ImagePreprocess(Model):
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

    def close(self) -> None:
        self._modules.clear()

    def _module(self, device: Device) -> Module:
        if device.index not in self._modules:
            image = kernel_image(device.compute_capability, device.driver_version)
            self._modules[device.index] = Module(device, image)
        return self._modules[device.index]


# An upper bound: more full batches than the data plane admits at once. Arrays that callers never
# release thus end in an error that names the instance, not in a full device.
OUTPUTS_ALIVE = 32
# A frame that several networks read lives until the last of them has done so.
SHARED_FRAMES_BYTES = 512 << 20
# One slot to fill, one that a kernel reads, and a spare for a GPU busy with other work.
SLOTS = 3


class GpuPreprocess:
    """An `Instance` with its own stream. `execute` responds without waiting for the GPU, and
    allocates nothing once it has received its largest batch. The kernel reads frames on this GPU in
    place; host frames are copied into pinned memory, which an integrated GPU reads in place and any
    other GPU copies again. Only that second copy counts as a copy to the device."""

    def __init__(self, name: str, device: Device, module: Module, wanted: Preprocessing) -> None:
        self._device = device
        self._wanted = wanted
        self._stream = Stream(device)
        only = wanted.frame.pixel_format
        undistorted = wanted.undistortion is not None
        self._kernels = {
            each: module.kernel(
                kernel_name(each, undistorted=undistorted), f"{ctypes.sizeof(PreprocessArgs)}s"
            )
            for each in ([only] if only else PixelFormat)
        }
        self._staging = FrameStaging(device, self._stream)
        planes = wanted.planes
        self._dtype = planes.datatype.numpy
        batch_shape = (wanted.most_frames, *planes.shape)
        self._frame_out_bytes = int(np.prod(planes.shape)) * self._dtype.itemsize
        batch_bytes = wanted.most_frames * self._frame_out_bytes
        self._pool = BufferPool(device, OUTPUTS_ALIVE * batch_bytes, name)
        self._frames = BufferPool(device, SHARED_FRAMES_BYTES, f"{name}: frames")
        # Allocate one batch of outputs at once: a GPU without the memory fails now.
        self._pool.take(self._stream, batch_shape, self._dtype)
        made = wanted.undistortion
        tables = [] if made is None else [made.positions, made.fractions]
        self._map = [self._on_device(table) for table in tables]
        addresses = (self._map[0].pointer, self._map[1].pointer) if self._map else None
        self._geometry = lru_cache(SIZES_KEPT)(partial(_geometry, wanted, addresses))

    def execute(self, requests: Sequence[ExecuteRequest]) -> Phases | None:
        wanted = self._wanted
        began_ns = staged_ns = time.monotonic_ns()
        taken: list[tuple[ExecuteRequest, RequestFrames]] = []
        for request in requests:
            try:
                shape = request.inputs[wanted.image].shape
                taken.append((request, wanted.frames_of(shape, request.request.parameters)))
            except EdgeServerError as error:
                request.respond(error, True)
        planes: CudaArray | None = None
        try:
            if any(wanted.planes.name in request.outputs for request, _ in taken):
                # One context switch for all driver calls.
                with self._device.current("preprocess"):
                    images = [self._image(request) for request, _ in taken]
                    launches = self._launches(images, [frames for _, frames in taken])
                    staged_ns = time.monotonic_ns()
                    planes = self._preprocess(images, launches)
        except EdgeServerError as error:
            for request, _ in taken:
                request.respond(error, True)
            return None
        begin = 0
        for request, frames in taken:
            response: dict[str, Tensor] = {}
            if planes is not None and wanted.planes.name in request.outputs:
                rows = planes[begin : begin + frames.frame_count]
                response[wanted.planes.name] = _tensor(
                    rows if wanted.batched else rows.reshape(wanted.planes.shape)
                )
            if wanted.size is not None and wanted.size in request.outputs:
                response[wanted.size] = wanted.size_tensor(frames)
            request.respond(response, True)
            begin += frames.frame_count
        return Phases(staged_ns - began_ns, time.monotonic_ns() - staged_ns, 0)

    def close(self) -> None:
        # A kernel may still read the pinned memory. A lost device reads no more.
        with suppress(EdgeServerError):
            self._stream.synchronize()
        self._staging.close()
        self._pool.close()
        self._frames.close()
        self._map.clear()

    def _on_device(self, table: NDArray[Any]) -> DeviceMemory:
        memory = DeviceMemory(self._device, table.nbytes)
        contiguous = np.ascontiguousarray(table)
        self._stream.to_device(memory, contiguous)
        self._stream.synchronize()  # `contiguous` is read until then
        return memory

    def _image(self, request: ExecuteRequest) -> CudaArray | NDArray[np.uint8]:
        tensor = request.inputs[self._wanted.image]
        array = tensor.on_device
        if isinstance(array, UploadOnce):
            return array.on(self._device, partial(self._uploaded, request))
        if isinstance(array, CudaArray) and array.device is self._device:
            return array
        frames: NDArray[np.uint8] = on_host(tensor, request.copied).array
        if self._staging.copies:
            request.copied("to_device", frames.nbytes)
        return frames

    def _uploaded(self, request: ExecuteRequest, frame: NDArray[np.uint8]) -> CudaArray:
        """Return a copy that the instances of other models read too."""
        array = self._frames.take(self._stream, frame.shape, frame.dtype)
        self._stream.to_device(array, frame)
        array.written(self._stream)
        request.copied("to_device", frame.nbytes)
        return array

    def _launches(
        self, images: Sequence[CudaArray | NDArray[np.uint8]], frames: Sequence[RequestFrames]
    ) -> list[tuple[RequestFrames, list[FrameAddress]]]:
        """Return the frames of each launch of the stream's next work, in order: neighbours of the
        same format, colours and size, at most `MAX_FRAMES`."""
        on_the_host = [image for image in images if isinstance(image, np.ndarray)]
        staged = self._staging.put(on_the_host) if on_the_host else 0
        launches: list[tuple[RequestFrames, list[FrameAddress]]] = []
        for image, each in zip(images, frames, strict=True):
            if isinstance(image, CudaArray):
                if image.ready.stream is not self._stream:
                    self._stream.wait(image.ready)
                first = image.pointer
            else:
                first = staged
                staged += image.nbytes
            layout = FrameLayout.packed(each.pixel_format, each.width, each.height)
            kind = each._replace(frame_count=1)
            for begin in range(first, first + image.nbytes, image.nbytes // each.frame_count):
                if not launches or launches[-1][0] != kind or len(launches[-1][1]) == MAX_FRAMES:
                    launches.append((kind, []))
                launches[-1][1].append(layout.address(begin))
        return launches

    def _preprocess(
        self,
        images: Sequence[CudaArray | NDArray[np.uint8]],
        launches: Sequence[tuple[RequestFrames, list[FrameAddress]]],
    ) -> CudaArray:
        """Return (frames, 3, H, W), written by work that the stream now holds; no thread waits."""
        count = sum(len(addresses) for _, addresses in launches)
        shape = (count, *self._wanted.planes.shape)
        on_device = [image for image in images if isinstance(image, CudaArray)]
        try:
            planes = self._pool.take(self._stream, shape, self._dtype)
            out = planes.pointer
            for kind, addresses in launches:
                launch = self._geometry(kind).launch(addresses, out)
                kernel = self._kernels[kind.pixel_format]
                self._stream.launch(kernel, launch.grid, launch.block, launch.args)
                out += len(addresses) * self._frame_out_bytes
            planes.written(self._stream)
            for image in on_device:
                image.read_by(planes.ready)
        finally:
            # Also after a failure: a copy, or the first of two launches, may be in flight.
            if len(on_device) < len(images):
                self._staging.read()
        return planes


def _geometry(
    wanted: Preprocessing, undistortion: tuple[int, int] | None, frames: RequestFrames
) -> FramePreprocess:
    _, out_height, out_width = wanted.planes.shape
    return FramePreprocess(
        FrameLayout.packed(frames.pixel_format, frames.width, frames.height),
        out_width,
        out_height,
        scale=float(wanted.scale),
        half=wanted.planes.datatype is DataType.FP16,
        colour=frames.colour,
        # The map already includes the crop.
        region=frames.region if undistortion is None else None,
        undistortion=undistortion,
    )


def _tensor(array: CudaArray) -> Tensor:
    # The struct's type is numpy's, for those that take no arrays on a device.
    return Tensor(array)  # type: ignore[arg-type]


class FrameStaging:
    """A ring of pinned buffers, for one stream and one thread at a time. Where the device cannot
    read host memory at full speed, frames are copied to it."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self.copies = not (device.integrated and device.can_map_host_memory)
        self._device = device
        self._stream = stream
        self._slots = [_Slot(device) for _ in range(SLOTS)]
        # One buffer is enough: the stream orders copies and kernels.
        self._on_device: DeviceMemory | None = None

    def put(self, frames: Sequence[NDArray[np.uint8]]) -> int:
        """Stage `frames` one behind the other, which may be overwritten after the return; return
        their address for the stream's next work. The call waits only where the GPU is `SLOTS`
        batches behind. Call `read` once the stream has received the work that reads the slot."""
        self._slots.append(slot := self._slots.pop(0))
        slot.read.wait()
        nbytes = sum(frame.nbytes for frame in frames)
        host = slot.of(nbytes, mapped=not self.copies)
        begin = 0
        for frame in frames:
            host[begin : begin + frame.nbytes] = frame.reshape(-1)
            begin += frame.nbytes
        if not self.copies:
            return slot.pointer
        if self._on_device is None or self._on_device.nbytes < nbytes:
            self._on_device = DeviceMemory(self._device, nbytes)
        self._stream.to_device(self._on_device, host)
        return self._on_device.pointer

    def read(self) -> None:
        """Mark the slot of the last `put`: the stream has received all work that reads the slot."""
        self._slots[-1].read.record(self._stream)

    def close(self) -> None:
        """Free all slots; the stream must have finished with them."""
        self._slots.clear()
        self._on_device = None


class _Slot:
    """Pinned memory, and the event after which it may be overwritten."""

    def __init__(self, device: Device) -> None:
        self.read = GpuEvent(device)
        self.pointer = 0
        self._device = device
        self._host = np.empty(0, np.uint8)

    def of(self, nbytes: int, *, mapped: bool) -> NDArray[np.uint8]:
        if self._host.nbytes < nbytes:
            if mapped:
                memory = MappedMemory(self._device, (nbytes,), np.uint8)
                self._host, self.pointer = memory.array, memory.pointer
            else:
                self._host = pinned_array(self._device, (nbytes,), np.uint8)
        return self._host[:nbytes]
