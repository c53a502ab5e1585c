"""An array in device memory, with the events that order its reads and writes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from edge_server.errors import InternalError
from edge_server.gpu.stream import GpuEvent

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.gpu.device import Device
    from edge_server.gpu.stream import Stream


class Buffer:
    """Device memory whose accesses streams order by events; no thread waits.

    Args:
        owner: keeps the memory alive as long as this buffer lives.
    """

    def __init__(self, device: Device, pointer: int, nbytes: int, owner: object) -> None:
        self.device = device
        self.pointer = pointer
        self.nbytes = nbytes
        self._owner = owner
        self._ready = GpuEvent(device)
        self._written = False
        self._readers: list[GpuEvent] = []

    @property
    def ready(self) -> GpuEvent:
        """The event after which the buffer may be read.

        Raises:
            InternalError: `written` was not called.
        """
        if not self._written:
            raise InternalError(
                f"{self.device}: {self.nbytes} bytes are read that nothing was written to"
            )
        return self._ready

    def written(self, stream: Stream) -> None:
        """Record that the work which `stream` holds now writes the buffer."""
        self._ready.record(stream)
        self._written = True

    def read_by(self, event: GpuEvent) -> None:
        """Record that a reader is done after `event`, which may be recorded again later, but not
        withdrawn."""
        if event not in self._readers:
            self._readers.append(event)

    def reuse(self, stream: Stream) -> None:
        """Order `stream`'s next write after all readers, and after the last writer."""
        if self._written:
            if self._ready.stream is not stream:
                stream.wait(self._ready)
            for event in self._readers:
                stream.wait(event)
        self._readers.clear()
        self._written = False


class CudaArray:
    """A C-contiguous array in device memory; copied to the host only by `on_host`.

    A reader orders its stream after `ready`, and calls `read_by` when it is done; then the memory
    is reusable as soon as the last reference to the array is gone, and no thread waits.
    """

    __slots__ = ("_lease", "buffer", "dtype", "pointer", "shape")

    def __init__(
        self,
        buffer: Buffer,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        pointer: int = 0,
        lease: object = None,
    ) -> None:
        self.buffer = buffer
        self.shape = shape
        self.dtype = dtype
        self.pointer = pointer or buffer.pointer
        self._lease = lease

    @property
    def device(self) -> Device:
        return self.buffer.device

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ready(self) -> GpuEvent:
        """The event after which the array may be read.

        Raises:
            InternalError: no write was recorded.
        """
        return self.buffer.ready

    def written(self, stream: Stream) -> None:
        """Record that the work which `stream` holds now writes the array; readers wait for that
        work."""
        self.buffer.written(stream)

    def read_by(self, event: GpuEvent) -> None:
        """Record that a reader is done after `event`."""
        self.buffer.read_by(event)

    def reshape(self, shape: tuple[int, ...]) -> CudaArray:
        """Return the same memory in another shape; one dimension may be -1.

        Raises:
            ValueError: the shape has another number of elements.
        """
        # numpy's rules and error texts, on an array that takes no memory.
        new = np.broadcast_to(np.int8(0), self.shape).reshape(shape).shape
        return self._view(new, self.pointer)

    def __getitem__(self, rows: slice) -> CudaArray:
        """Return consecutive rows of the first axis, in the same memory.

        Raises:
            TypeError: `rows` is no slice of consecutive rows.
        """
        if not self.shape or not isinstance(rows, slice) or rows.step not in (None, 1):
            raise TypeError("of an array on the device only rows [a:b] of the first axis are taken")
        begin, end, _ = rows.indices(self.shape[0])
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        return self._view((max(0, end - begin), *self.shape[1:]), self.pointer + begin * row_bytes)

    def on_host(self) -> NDArray[Any]:
        """Return a copy on the host; this thread sleeps until the array is written and copied."""
        stream = self.ready.stream
        assert stream is not None  # noqa: S101 - written() has set it
        # A copy to pageable memory busy-waits until earlier work is done, so this thread first
        # sleeps on the event.
        self.ready.wait()
        array = np.empty(self.shape, self.dtype)
        stream.to_host(array, self)
        stream.synchronize()
        return array

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("this array lies on the device; on_host() copies it")

    def __repr__(self) -> str:
        return f"CudaArray({list(self.shape)}, {self.dtype}, on {self.device})"

    def _view(self, shape: tuple[int, ...], pointer: int) -> CudaArray:
        return CudaArray(self.buffer, shape, self.dtype, pointer=pointer, lease=self._lease)
