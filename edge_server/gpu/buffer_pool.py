"""Device memory for reuse: no frame allocates once every size has been seen."""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from edge_server.errors import Unavailable
from edge_server.gpu.buffer import Buffer
from edge_server.gpu.device_array import CudaArray
from edge_server.gpu.memory import DeviceMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike

    from edge_server.gpu.device import Device
    from edge_server.gpu.stream import Stream

# Buffers are of whole ones of these, so that nearly equal sizes share them.
STEP_BYTES = 512


class BufferPool:
    """Device arrays for one user (a model's instance), out of at most `limit_bytes`.

    A buffer comes back by itself when the last array over it is garbage, whatever thread drops
    it; the next user's stream, not its thread, waits for the streams that still read it.

    Args:
        name: the user's, for errors.
    """

    def __init__(self, device: Device, limit_bytes: int, name: str) -> None:
        self.device = device
        self.limit_bytes = limit_bytes
        self.name = name
        self._held_bytes = 0
        self._lock = threading.Lock()
        self._idle: list[Buffer] = []
        # The pool refers to buffers in use too: an array may die in a reference cycle, and the
        # collector runs the finalizers of all that is garbage with it, memory and event among
        # them, before the lease gives the buffer back.
        self._lent: set[Buffer] = set()
        # Arrays die wherever the collector finds them, also inside `take`: no lock for them.
        self._returned: deque[Buffer] = deque()
        self._closed = False

    @property
    def held_bytes(self) -> int:
        """Device memory that the pool has allocated, in use or idle."""
        return self._held_bytes

    def take(self, stream: Stream, shape: Sequence[int], dtype: DTypeLike) -> CudaArray:
        """An array whose content is undefined, to be written by what `stream` is given from now
        on; call `written` on it then.

        Raises:
            Unavailable: `limit_bytes` are in use, or the device has no more.
        """
        dtype = np.dtype(dtype)
        need_bytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            buffer = self._fitting(need_bytes) or self._new(need_bytes)
            self._lent.add(buffer)
        buffer.reuse(stream)
        return CudaArray(buffer, tuple(shape), dtype, lease=_Lease(self, buffer))

    def give_back(self, buffer: Buffer) -> None:
        """Take back a buffer without references; for leases only."""
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
        """The smallest idle buffer of enough bytes, unless it wastes more than it uses."""
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
    """Gives its buffer back when the last array that shares it is garbage."""

    __slots__ = ("_buffer", "_pool")

    def __init__(self, pool: BufferPool, buffer: Buffer) -> None:
        self._pool = pool
        self._buffer = buffer

    def __del__(self) -> None:
        self._pool.give_back(self._buffer)


def _rounded(nbytes: int) -> int:
    return max(STEP_BYTES, -(-nbytes // STEP_BYTES) * STEP_BYTES)
