"""`image_preprocess` on a GPU: one fused kernel per kind of frames; the planes stay there."""

from __future__ import annotations

import ctypes
import time
from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from edge_server.backends.contract import Phases, on_host
from edge_server.errors import EdgeServerError
from edge_server.gpu.device_array import CudaArray
from edge_server.gpu.kernels.preprocess import (
    MAX_FRAMES,
    FrameAddress,
    FrameLayout,
    FramePreprocess,
    PreprocessArgs,
    kernel_name,
)
from edge_server.gpu.memory import BufferPool, DeviceMemory, MappedMemory, pinned_array
from edge_server.gpu.stream import GpuEvent, Stream
from edge_server.pixels import PixelFormat
from edge_server.tensors import DataType, Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from edge_server.backends.contract import ExecuteRequest
    from edge_server.backends.vision.image_preprocess_config import Preprocessing
    from edge_server.backends.vision.preprocess_cpu import UndistortionMap
    from edge_server.backends.vision.request_frames import RequestFrames
    from edge_server.gpu.device import Device
    from edge_server.gpu.stream import Module

# An upper bound: more full batches than the data plane admits at once. Arrays that callers never
# release thus end in an error that names the instance, not in a full device.
OUTPUTS_ALIVE = 32
# Geometry of this many kinds of frames is cached, for cameras that share an instance.
SIZES_KEPT = 16
# One slot to fill, one that a kernel reads, and a spare for a GPU busy with other work.
SLOTS = 3


class GpuPreprocess:
    """An `Instance` with its own stream.

    `execute` responds without waiting for the GPU, and allocates nothing once it has received its
    largest batch. The kernel reads frames on this GPU in place; host frames are copied into pinned
    memory, which an integrated GPU reads in place and any other GPU copies again. Only that second
    copy counts as a copy to the device.

    Args:
        module: holds the kernels of `preprocess.cu`.

    Raises:
        Unavailable: the GPU has no memory for one batch of outputs.
        InternalError: the module lacks the kernel.
    """

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
        # Allocate one batch of outputs at once: a GPU without the memory fails now.
        self._pool.take(self._stream, batch_shape, self._dtype)
        self._map = (
            UndistortionOnDevice(device, self._stream, wanted.undistortion)
            if wanted.undistortion
            else None
        )
        addresses = self._map.addresses if self._map else None
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
        self._map = None

    def _image(self, request: ExecuteRequest) -> CudaArray | NDArray[np.uint8]:
        """Return the request's frames, on this GPU or on the host."""
        tensor = request.inputs[self._wanted.image]
        array = tensor.on_device
        if isinstance(array, CudaArray) and array.device is self._device:
            return array
        frames: NDArray[np.uint8] = on_host(tensor, request.copied).array
        if self._staging.copies:
            request.copied("to_device", frames.nbytes)
        return frames

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


class UndistortionOnDevice:
    """A map in device memory, allocated as long as this object lives.

    Attributes:
        addresses: of the map's positions and fractions.

    Raises:
        Unavailable: the GPU has no memory for the map.
    """

    def __init__(self, device: Device, stream: Stream, made: UndistortionMap) -> None:
        tables = [np.ascontiguousarray(made.positions), np.ascontiguousarray(made.fractions)]
        self._memory = [DeviceMemory(device, table.nbytes) for table in tables]
        for memory, table in zip(self._memory, tables, strict=True):
            stream.to_device(memory, table)
        stream.synchronize()
        self.addresses = (self._memory[0].pointer, self._memory[1].pointer)


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
        region=wanted.region(frames) if undistortion is None else None,
        undistortion=undistortion,
    )


def _tensor(array: CudaArray) -> Tensor:
    # The struct's type is numpy's, for those that take no arrays on a device.
    return Tensor(array)  # type: ignore[arg-type]


class FrameStaging:
    """A ring of pinned buffers, for one stream and one thread at a time.

    Attributes:
        copies: frames are copied to the device, because it cannot read host memory at full speed.
    """

    def __init__(self, device: Device, stream: Stream) -> None:
        self.copies = not (device.integrated and device.can_map_host_memory)
        self._device = device
        self._stream = stream
        self._slots = [_Slot(device) for _ in range(SLOTS)]
        # One buffer is enough: the stream orders copies and kernels.
        self._on_device: DeviceMemory | None = None

    def put(self, frames: Sequence[NDArray[np.uint8]]) -> int:
        """Stage `frames` one behind the other; return their address for the stream's next work.

        The caller may overwrite the frames after the return. The call waits only where the GPU is
        `SLOTS` batches behind. Call `read` once the stream has received the work that reads the
        slot.

        Raises:
            EdgeServerError: no memory is left for the frames, or the device failed.
        """
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
        """Return the first `nbytes` of the slot; a smaller slot grows."""
        if self._host.nbytes < nbytes:
            if mapped:
                memory = MappedMemory(self._device, (nbytes,), np.uint8)
                self._host, self.pointer = memory.array, memory.pointer
            else:
                self._host = pinned_array(self._device, (nbytes,), np.uint8)
        return self._host[:nbytes]
