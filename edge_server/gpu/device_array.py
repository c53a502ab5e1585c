"""An array that lies on a GPU."""

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

# Number of the legacy default stream in DLPack and the CUDA array interface.
_LEGACY_STREAM = 1
_NO_WAITING = -1


class CudaArray:
    """A C-contiguous array in device memory; it is never copied to the host unasked.

    A reader lets its stream wait for `ready`, and records with `read_by` when it is done; then the
    memory can be written again as soon as no reference to the array is left, and no thread
    waits. A library that reads it through DLPack or the CUDA array interface
    waits by itself, but cannot say when it is through: who lends it to one says that.
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
        """A view on what another library holds on the device of `stream`; nothing is copied.

        Args:
            thing: has `__cuda_array_interface__` or `__dlpack__`; it stays alive with the array.
            stream: waits for what the other library still does with it, and so does who reads
                the array.

        Raises:
            TypeError: it is no array on this device, or not C-contiguous.
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
        """The event after which it may be read.

        Raises:
            InternalError: nothing was written to it.
        """
        return self.buffer.ready

    def written(self, stream: Stream) -> None:
        """The work that `stream` holds now writes the array; others may read it after that."""
        self.buffer.written(stream)

    def read_by(self, event: Event) -> None:
        """Note that a reader is through after `event`."""
        self.buffer.read_by(event)

    def reshape(self, shape: tuple[int, ...]) -> CudaArray:
        """The same memory in another shape; one dimension may be -1.

        Raises:
            ValueError: it has another number of elements.
        """
        # numpy's rules and words, on an array that takes no memory.
        new = np.broadcast_to(np.int8(0), self.shape).reshape(shape).shape
        return self._view(new, self.pointer)

    def __getitem__(self, rows: slice) -> CudaArray:
        """Some rows of the first axis, in the same memory.

        Raises:
            TypeError: it is no slice of rows that follow one another.
        """
        if not self.shape or not isinstance(rows, slice) or rows.step not in (None, 1):
            raise TypeError("of an array on the device only rows [a:b] of the first axis are taken")
        begin, end, _ = rows.indices(self.shape[0])
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        return self._view((max(0, end - begin), *self.shape[1:]), self.pointer + begin * row_bytes)

    def on_host(self, stream: Stream | None = None) -> NDArray[Any]:
        """A copy on the host; this thread waits for it, asleep until the array is written.

        Args:
            stream: which makes the copy; without one it is the writer's own.
        """
        stream = stream or self.ready.stream
        assert stream is not None  # noqa: S101 - written() has set it
        if stream is not self.ready.stream:
            stream.wait(self.ready)
        # A copy to pageable memory burns a core until the work before it is done.
        self.ready.wait()
        array = np.empty(self.shape, self.dtype)
        stream.to_host(array, self)
        stream.synchronize()
        return array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3; who reads it waits for the stream that writes it."""
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
        """A DLPack capsule over the same memory, which lives until its taker is through.

        Args:
            stream: the taker's, made to wait for what writes the array; -1 if it need not wait.

        Raises:
            BufferError: a copy is wanted, or DLPack has no such type.
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
