"""An array in device memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from edge_server.gpu.buffer import Buffer
from edge_server.gpu.dlpack import CUDA, described, make_capsule

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.gpu.device import Device
    from edge_server.gpu.event import Event
    from edge_server.gpu.stream import Stream

# DLPack's and the CUDA array interface's number for the legacy default stream.
_LEGACY_STREAM = 1
_NO_WAITING = -1


class CudaArray:
    """A C-contiguous array in device memory; copied to the host only by `on_host`.

    A reader orders its stream after `ready`, and calls `read_by` when it is done; then the memory
    is reusable as soon as the last reference to the array is gone, and no thread waits. A library
    that reads the array through DLPack or the CUDA array interface waits by itself, but cannot
    report the end of its read: the lender must call `read_by` for it.
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

    @staticmethod
    def of(thing: Any, stream: Stream) -> CudaArray:
        """Return a view on another library's array on the device of `stream`, without a copy.

        Args:
            thing: has `__cuda_array_interface__` or `__dlpack__`; it stays alive with the array.
            stream: waits for the other library's pending work on the array, and so do readers of
                the array.

        Raises:
            TypeError: `thing` is no array on this device, or not C-contiguous.
        """
        pointer, shape, dtype, owner = described(thing, stream)
        nbytes = math.prod(shape) * dtype.itemsize
        buffer = Buffer(stream.device, pointer, nbytes, owner)
        buffer.written(stream)
        return CudaArray(buffer, shape, dtype)

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
    def ready(self) -> Event:
        """The event after which the array may be read.

        Raises:
            InternalError: no write was recorded.
        """
        return self.buffer.ready

    def written(self, stream: Stream) -> None:
        """Record that the work which `stream` holds now writes the array; readers wait for that
        work."""
        self.buffer.written(stream)

    def read_by(self, event: Event) -> None:
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

    def on_host(self, stream: Stream | None = None) -> NDArray[Any]:
        """Return a copy on the host; this thread sleeps until the array is written and copied.

        Args:
            stream: the stream of the copy; by default the writer's own.
        """
        stream = stream or self.ready.stream
        assert stream is not None  # noqa: S101 - written() has set it
        if stream is not self.ready.stream:
            stream.wait(self.ready)
        # A copy to pageable memory busy-waits until earlier work is done, so this thread first
        # sleeps on the event.
        self.ready.wait()
        array = np.empty(self.shape, self.dtype)
        stream.to_host(array, self)
        stream.synchronize()
        return array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3; a reader waits for the stream that writes the array."""
        stream = self.ready.stream
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.pointer, False),
            "version": 3,
            "strides": None,
            "stream": stream.handle if stream else None,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CUDA, self.device.index)

    def __dlpack__(
        self, *, stream: int | None = None, copy: bool | None = None, **_: object
    ) -> object:
        """Return a DLPack capsule over the same memory, which stays alive until the consumer is
        done.

        Args:
            stream: the consumer's stream, which is ordered after the array's writer; -1 skips that.

        Raises:
            BufferError: a copy is requested, or DLPack lacks the element type.
        """
        if copy:
            raise BufferError("an array on the device is lent, not copied")
        if stream != _NO_WAITING and (writer := self.ready.stream):
            writer.hold_back_handle(_LEGACY_STREAM if stream is None else stream)
        return make_capsule(self, self.pointer, self.shape, self.dtype, self.__dlpack_device__())

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("this array lies on the device; on_host() copies it")

    def __repr__(self) -> str:
        return f"CudaArray({list(self.shape)}, {self.dtype}, on {self.device})"

    def _view(self, shape: tuple[int, ...], pointer: int) -> CudaArray:
        return CudaArray(self.buffer, shape, self.dtype, pointer=pointer, lease=self._lease)
