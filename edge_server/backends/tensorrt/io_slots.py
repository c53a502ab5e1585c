"""Memory of an instance's inputs and outputs on device and host, and the copies in and out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.gpu.device_array import CudaArray
from edge_server.gpu.memory import DeviceMemory, MappedMemory, pinned_array
from edge_server.tensors import element_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from edge_server.backends.contract import ExecuteRequest
    from edge_server.backends.tensorrt.plan_build.build_options import Shape
    from edge_server.gpu.device import Device
    from edge_server.gpu.memory import BufferPool
    from edge_server.gpu.stream import Stream

# The alignment of every address that TensorRT gets.
ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class ByteSpan:
    """A view on a part of device memory, without ownership."""

    pointer: int
    nbytes: int


class StagingBuffer:
    """Device memory for one tensor, with its counterpart on the host.

    Where the GPU accesses the host's memory both are the same (mapped pinned memory), and no copy
    is made. Otherwise pinned memory stands beside the device memory, for asynchronous copies.

    Args:
        pinned: False copies directly from and to the caller's array.

    Attributes:
        host: the host's view; None without host memory of its own.
    """

    def __init__(self, device: Device, nbytes: int, *, mapped: bool, pinned: bool) -> None:
        self._device = device
        self._pinned = pinned
        self.nbytes = max(1, nbytes)
        self.is_mapped = mapped
        self.host: NDArray[np.uint8] | None = None
        self._memory: DeviceMemory | MappedMemory
        if mapped:
            self._memory = MappedMemory(device, (self.nbytes,), np.uint8)
            self.host = self._memory.array
        else:
            self._memory = DeviceMemory(device, self.nbytes)
            if pinned:
                self.host = pinned_array(device, (self.nbytes,), np.uint8)

    @property
    def pointer(self) -> int:
        return self._memory.pointer

    def larger(self, nbytes: int) -> StagingBuffer:
        """Return another buffer of this kind."""
        return StagingBuffer(self._device, nbytes, mapped=self.is_mapped, pinned=self._pinned)

    def span(self, begin: int, nbytes: int) -> ByteSpan:
        return ByteSpan(self.pointer + begin, nbytes)


def as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the same memory as bytes; `array` is C-contiguous."""
    return array.reshape(-1).view(np.uint8)


class InputSlot:
    """Gathers the requests' parts of one input at the address that TensorRT reads.

    Args:
        staging: has the size of the largest batch of any profile.
    """

    def __init__(
        self, name: str, device: Device, dtype: np.dtype[Any], staging: StagingBuffer
    ) -> None:
        self.name = name
        self.dtype = dtype
        self._device = device
        self._staging = staging
        # Held until the next run: copies may still read these arrays.
        self._held: list[object] = []

    @property
    def pointer(self) -> int:
        """The input's fixed address, unless the run reads it in place."""
        return self._staging.pointer

    def begin(self) -> None:
        """Release the arrays of the last run, which is done."""
        self._held.clear()

    def clear(self, stream: Stream) -> None:
        """Set the buffer to 0: stale bytes may be NaN, or an index out of range."""
        stream.fill(self._staging.span(0, self._staging.nbytes))

    def in_place(self, requests: Sequence[ExecuteRequest], stream: Stream) -> CudaArray | None:
        """Return the batch's only part if it already lies on the device and can be read in place.

        `stream` waits for the stream that writes it.
        """
        if len(requests) > 1:
            return None
        array = self._on_device(requests[0])
        if array is None or array.pointer % ALIGNMENT_BYTES or not array.nbytes:
            return None
        stream.wait(array.ready)
        self._held.append(array)
        return array

    def gather(
        self, requests: Sequence[ExecuteRequest], stream: Stream, into: Shape | None = None
    ) -> list[CudaArray]:
        """Copy all parts, one behind the other, to `pointer`.

        Args:
            into: a larger shape, in whose first corner the only part or the rows are put; the rest
                is 0.

        Returns:
            The arrays that are read on the device: mark them read by this run.
        """
        staging = self._staging
        read: list[CudaArray] = []
        if into is not None and self._is_inside(requests, into):
            self._put_inside(requests, stream, into)
            return read
        begin = copied_to = 0
        for request in requests:
            array = self._on_device(request)
            if array is not None and array.nbytes:
                self._flush(stream, copied_to, begin)
                stream.wait(array.ready)
                stream.copy(staging.span(begin, array.nbytes), array)
                read.append(array)
                self._held.append(array)
                begin += array.nbytes
                copied_to = begin
                continue
            part = self._part(request)
            end = begin + part.nbytes
            if staging.host is not None:
                staging.host[begin:end] = part
            elif part.nbytes:
                stream.to_device(staging.span(begin, part.nbytes), part)
                copied_to = end
            self._count(request, part.nbytes)
            begin = end
        self._flush(stream, copied_to, begin)
        return read

    def _is_inside(self, requests: Sequence[ExecuteRequest], into: Shape) -> bool:
        """Return whether `into` differs by more than additional rows at the end."""
        return any(request.inputs[self.name].shape[1:] != into[1:] for request in requests)

    def _put_inside(self, requests: Sequence[ExecuteRequest], stream: Stream, into: Shape) -> None:
        whole = np.zeros(into, self.dtype)
        row = 0
        for request in requests:
            array = request.inputs[self.name]
            part = array.array if array.on_device is None else array.on_device.on_host()
            corner = [slice(row, row + len(part)), *(slice(0, size) for size in part.shape[1:])]
            whole[tuple(corner)] = part
            row += len(part)
            self._count(request, part.nbytes)
        if self._staging.host is None:
            stream.to_device(self._staging.span(0, whole.nbytes), whole)
        else:
            self._staging.host[: whole.nbytes] = as_bytes(whole)
            self._flush(stream, 0, whole.nbytes)

    def _part(self, request: ExecuteRequest) -> NDArray[np.uint8]:
        tensor = request.inputs[self.name]
        array = tensor.array
        if tensor.on_device is not None:
            # On another GPU, or of another library.
            array = tensor.on_device.on_host()
            request.copied("to_host", array.nbytes)
        return as_bytes(array)

    def _on_device(self, request: ExecuteRequest) -> CudaArray | None:
        array = request.inputs[self.name].on_device
        mine = isinstance(array, CudaArray) and array.device is self._device
        return array if mine else None  # type: ignore[return-value]

    def _flush(self, stream: Stream, begin: int, end: int) -> None:
        """Copy pinned memory from `begin` to `end` to the device."""
        staging = self._staging
        if begin < end and staging.host is not None and not staging.is_mapped:
            stream.to_device(staging.span(begin, end - begin), staging.host[begin:end])

    def _count(self, request: ExecuteRequest, nbytes: int) -> None:
        if not self._staging.is_mapped:
            request.copied("to_device", nbytes)


class OutputSlot:
    """Memory for one output, and the copies out of it.

    Args:
        staging: has the size of the largest output for any profile's inputs; a larger output gets
            more memory.
        pool: for outputs that stay on the device.
    """

    def __init__(self, dtype: np.dtype[Any], staging: StagingBuffer, pool: BufferPool) -> None:
        self.dtype = dtype
        self._pool = pool
        # Graphs write to this buffer, which is therefore never replaced.
        self._usual = staging
        self._larger: StagingBuffer | None = None
        self._written = self._usual

    @property
    def is_mapped(self) -> bool:
        """Whether the host reads the output in place, without a copy."""
        return self._usual.is_mapped

    def holds(self, shape: Shape) -> bool:
        """Return whether an output of that shape fits the fixed buffer."""
        return self._bytes(shape) <= self._usual.nbytes

    def pointer(self, shape: Shape) -> int:
        """Return the address at which the next run writes an output of that shape."""
        nbytes = self._bytes(shape)
        if nbytes <= self._usual.nbytes:
            self._written = self._usual
        elif self._larger is not None and nbytes <= self._larger.nbytes:
            self._written = self._larger
        else:
            self._written = self._larger = self._usual.larger(nbytes)
        return self._written.pointer

    def array(self, shape: Shape, stream: Stream) -> CudaArray:
        """Return device memory that its receiver may hold for any time.

        Raises:
            Unavailable: callers already hold too much of it.
        """
        return self._pool.take(stream, shape, self.dtype)

    def copy_to(self, array: CudaArray, stream: Stream) -> None:
        """Copy the output at `pointer` to `array`."""
        if array.nbytes:
            stream.copy(array, self._written.span(0, array.nbytes))

    def begin_to_host(self, shape: Shape, stream: Stream) -> NDArray[Any]:
        """Return the output at `pointer` on the host, complete once `stream` has done its work
        so far."""
        nbytes = self._bytes(shape)
        staging = self._written
        # Without pinned memory the copy is done when this returns.
        host = np.empty(nbytes, np.uint8) if staging.host is None else staging.host[:nbytes]
        if nbytes and not staging.is_mapped:
            stream.to_host(host, staging.span(0, nbytes))
        return host.view(self.dtype).reshape(shape)

    def owned(self, host: NDArray[Any]) -> NDArray[Any]:
        """Return a copy of the result of `begin_to_host` that the next run does not overwrite."""
        return host if self._written.host is None else host.copy()

    def _bytes(self, shape: Shape) -> int:
        return element_count(shape) * self.dtype.itemsize
