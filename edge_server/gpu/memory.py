"""Device memory, host memory that the device can access, arrays, and a pool of device memory: no
frame allocates once every size has occurred."""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from edge_server.errors import InternalError, Unavailable
from edge_server.gpu.stream import GpuEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import DTypeLike, NDArray

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
        if not self._written:
            raise InternalError(
                f"{self.device}: {self.nbytes} bytes are read that nothing was written to"
            )
        return self._ready

    def written(self, stream: Stream) -> None:
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
        return self.buffer.ready

    def written(self, stream: Stream) -> None:
        self.buffer.written(stream)

    def read_by(self, event: GpuEvent) -> None:
        self.buffer.read_by(event)

    def reshape(self, shape: tuple[int, ...]) -> CudaArray:
        """Return the same memory in another shape; one dimension may be -1."""
        # numpy's rules and error texts, on an array that takes no memory.
        new = np.broadcast_to(np.int8(0), self.shape).reshape(shape).shape
        return self._view(new, self.pointer)

    def __getitem__(self, rows: slice) -> CudaArray:
        """Return consecutive rows of the first axis, in the same memory."""
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


class DeviceCopies:
    """The copies of one host array, by device."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.made: dict[Device, CudaArray] = {}


class UploadOnce:
    """A host array that is copied to each device once, by its first reader there. Safe from any
    thread; the host's array stays unchanged."""

    __slots__ = ("_copies", "_host", "dtype", "nbytes", "shape")

    def __init__(self, host: NDArray[Any], copies: DeviceCopies | None = None) -> None:
        self._host = host
        self._copies = copies or DeviceCopies()
        self.shape, self.dtype, self.nbytes = host.shape, host.dtype, host.nbytes

    def reshape(self, shape: tuple[int, ...]) -> UploadOnce:
        """Return the same array in another shape, and with the same copies."""
        return UploadOnce(self._host.reshape(shape), self._copies)

    def on_host(self) -> NDArray[Any]:
        """Return the host's array itself."""
        return self._host

    def on(self, device: Device, upload: Callable[[NDArray[Any]], CudaArray]) -> CudaArray:
        """Return the copy on `device`, which `upload` makes where there is none yet."""
        with self._copies.lock:
            if device not in self._copies.made:
                self._copies.made[device] = upload(self._host)
            return self._copies.made[device].reshape(self.shape)


# cuda.h, CU_MEMHOSTALLOC_*.
_PORTABLE, _DEVICE_MAP = 1, 2
# Buffer sizes are multiples of this, so that nearly equal sizes share buffers.
STEP_BYTES = 512


class DeviceMemory:
    """Bytes on the device, of undefined content, freed soon after garbage collection.

    Allocation waits for the driver: keep the memory, or use a `BufferPool`.

    Attributes:
        pointer: aligned to 256 bytes at least.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self.nbytes = nbytes
        address = ctypes.c_uint64()
        device.allocate(
            f"allocate {nbytes} bytes",
            "cuMemAlloc_v2",
            ctypes.byref(address),
            ctypes.c_size_t(nbytes),
        )
        self.pointer = address.value
        weakref.finalize(self, device.free, "cuMemFree_v2", address).atexit = False


class MappedMemory:
    """Pinned host memory that kernels access in place.

    On an integrated GPU no copy is made, but the GPU does not cache the memory: read it once. On
    any other GPU each access crosses the bus.

    Attributes:
        array: the host's view, which keeps the memory alive by itself.
        pointer: the device's address of the memory.
    """

    def __init__(self, device: Device, shape: Sequence[int], dtype: DTypeLike) -> None:
        owner = _PinnedMemory(device, shape, dtype, mapped=True)
        self.array = owner.array(shape, dtype)
        self.pointer = owner.pointer

    @property
    def nbytes(self) -> int:
        return self.array.nbytes


def pinned_array(device: Device, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """Return a host array that the GPU copies asynchronously; it must live, and stay unchanged,
    until the copy is done."""
    return _PinnedMemory(device, shape, dtype, mapped=False).array(shape, dtype)


class _PinnedMemory:
    """The owner of pinned memory; numpy keeps it alive with every view."""

    def __init__(
        self, device: Device, shape: Sequence[int], dtype: DTypeLike, *, mapped: bool
    ) -> None:
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        address, on_device = ctypes.c_void_p(), ctypes.c_uint64()
        device.allocate(
            f"pin {nbytes} bytes of host memory",
            "cuMemHostAlloc",
            ctypes.byref(address),
            ctypes.c_size_t(max(nbytes, 1)),
            ctypes.c_uint(_PORTABLE | (_DEVICE_MAP if mapped else 0)),
        )
        weakref.finalize(self, device.free, "cuMemFreeHost", address).atexit = False
        if mapped:
            device.call(
                "map host memory",
                "cuMemHostGetDevicePointer_v2",
                ctypes.byref(on_device),
                address,
                ctypes.c_uint(0),
            )
        self.pointer = on_device.value
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address.value, False),
            "version": 3,
        }

    def array(self, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        return np.asarray(self).view(dtype).reshape(tuple(shape))


@dataclass(frozen=True)
class ByteSpan:
    """A view on a part of device memory, without ownership."""

    pointer: int
    nbytes: int


class StagingBuffer:
    """Device memory for one tensor, with its counterpart on the host.

    Where the GPU accesses the host's memory both are the same (mapped pinned memory), and no copy
    is made. Otherwise pinned memory stands beside the device memory, for asynchronous copies; if
    not `pinned`, copies go directly from and to the caller's array, and `host` is None."""

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

    @property
    def allocated_bytes(self) -> int:
        return self.nbytes if self.is_mapped or self.host is None else 2 * self.nbytes

    def larger(self, nbytes: int) -> StagingBuffer:
        return StagingBuffer(self._device, nbytes, mapped=self.is_mapped, pinned=self._pinned)

    def span(self, begin: int, nbytes: int) -> ByteSpan:
        return ByteSpan(self.pointer + begin, nbytes)


class BufferPool:
    """Device arrays for one user (a model's instance), at most `limit_bytes` in total.

    A buffer returns to the pool when the last array over it is garbage-collected, on any thread;
    the next user's stream, not its thread, waits for the streams that still read the buffer.
    """

    def __init__(self, device: Device, limit_bytes: int, name: str) -> None:
        self.device = device
        self.limit_bytes = limit_bytes
        self.name = name
        self._held_bytes = 0
        self._lock = threading.Lock()
        self._idle: list[Buffer] = []
        # The pool also refers to lent buffers: an array may die in a reference cycle, and the
        # garbage collector then runs the finalizers of memory and event before the lease returns
        # the buffer.
        self._lent: set[Buffer] = set()
        # Arrays die wherever the garbage collector runs, even inside `take`, so this takes no lock.
        self._returned: deque[Buffer] = deque()
        self._closed = False

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def take(self, stream: Stream, shape: Sequence[int], dtype: DTypeLike) -> CudaArray:
        """Return an array of undefined content, for the next work of `stream` to write; call
        `written` on the array after that work."""
        dtype = np.dtype(dtype)
        need_bytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            buffer = self._fitting(need_bytes) or self._new(need_bytes)
            self._lent.add(buffer)
        buffer.reuse(stream)
        return CudaArray(buffer, tuple(shape), dtype, lease=_Lease(self, buffer))

    def give_back(self, buffer: Buffer) -> None:
        """Return a buffer without references to the pool; called by leases only."""
        if not self._closed:
            self._returned.append(buffer)

    def close(self) -> None:
        """Free idle buffers; a buffer in use is freed with its last array."""
        with self._lock:
            self._closed = True
            self._idle.clear()
            self._returned.clear()
            self._lent.clear()

    def _fitting(self, need_bytes: int) -> Buffer | None:
        """Return the smallest idle buffer of at least that size, unless it wastes more than it
        uses."""
        while self._returned:
            buffer = self._returned.popleft()
            self._lent.discard(buffer)
            self._idle.append(buffer)
        fitting = [b for b in self._idle if need_bytes <= b.nbytes <= 2 * _rounded(need_bytes)]
        if not fitting:
            return None
        buffer = min(fitting, key=lambda b: b.nbytes)
        self._idle.remove(buffer)
        return buffer

    def _new(self, need_bytes: int) -> Buffer:
        nbytes = _rounded(need_bytes)
        # Idle buffers of other sizes are freed first.
        while self._idle and self._held_bytes + nbytes > self.limit_bytes:
            self._held_bytes -= self._idle.pop(0).nbytes
        if self._held_bytes + nbytes > self.limit_bytes:
            raise Unavailable(
                f"{self.device}: {self.name}: {nbytes} bytes are wanted, {self._held_bytes} of "
                f"at most {self.limit_bytes} are in use"
            )
        memory = DeviceMemory(self.device, nbytes)
        self._held_bytes += nbytes
        return Buffer(self.device, memory.pointer, nbytes, memory)


class _Lease:
    """Returns its buffer to the pool when the last array that shares it is garbage-collected."""

    __slots__ = ("_buffer", "_pool")

    def __init__(self, pool: BufferPool, buffer: Buffer) -> None:
        self._pool = pool
        self._buffer = buffer

    def __del__(self) -> None:
        self._pool.give_back(self._buffer)


def _rounded(nbytes: int) -> int:
    return max(STEP_BYTES, -(-nbytes // STEP_BYTES) * STEP_BYTES)
