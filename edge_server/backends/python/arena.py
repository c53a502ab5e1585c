"""Shared memory with one writer and one reader: an anonymous file that both processes map.

A block is written once, read in place, and free again when its reader's last view on it is gone.
The reader says so by a byte in the block's own header, so that nothing has to be sent and a
finalizer may do it on any thread. The file has no name: nothing is left behind, whoever dies.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Before each block; keeps what follows aligned for every element type and cache line.
HEADER_BYTES = 64
MIB = 1 << 20
_LOOK_S = 0.001
_CLOSED = -1


class ArenaFull(Exception):
    """There is no room, and the arena may not grow."""


def make_arena_file(name: str) -> int:
    """A descriptor of a new, empty arena, which no process can shrink under another's feet."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


class ArenaWriter:
    """Puts arrays into the arena; grows it as needed, up to its limit, and never gives back.

    Args:
        fd: of the file; the writer's from now on.
        limit_bytes: of the whole file.
        patience_s: how long `put` waits for the reader to free something.
    """

    def __init__(self, fd: int, limit_bytes: int, patience_s: float = 0.0) -> None:
        self.fd = fd
        self._limit_bytes = limit_bytes
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._extents: list[_WriterExtent] = []
        self._size_bytes = 0

    def put(self, array: NDArray[Any]) -> int:
        """Copy `array`, in C order, into a block; its offset.

        Raises:
            ArenaFull: nothing became free in time.
        """
        need_bytes = HEADER_BYTES + -(-array.nbytes // HEADER_BYTES) * HEADER_BYTES
        extent, start = self._allocate(need_bytes)
        begin = start + HEADER_BYTES
        target = extent.memory[begin : begin + array.nbytes]
        np.copyto(target.view(array.dtype).reshape(array.shape), array)
        return extent.offset + begin

    def take_back(self, offset: int) -> None:
        """Free a block that the reader will never hear of."""
        with self._lock:
            for extent in self._extents:
                if extent.offset < offset < extent.offset + len(extent.memory):
                    extent.memory[offset - HEADER_BYTES - extent.offset] = 0

    def close(self) -> None:
        """Grow no more; what is mapped stays valid."""
        with self._lock:
            os.close(self.fd)
            self.fd = _CLOSED

    def _allocate(self, need_bytes: int) -> tuple[_WriterExtent, int]:
        give_up_at = time.monotonic() + self._patience_s
        while True:
            with self._lock:
                for extent in self._extents:
                    start = extent.allocate(need_bytes)
                    if start is not None:
                        return extent, start
                if self.fd == _CLOSED:
                    raise ArenaFull("the other side is gone")
                if self._size_bytes + need_bytes <= self._limit_bytes:
                    extent = self._grow(need_bytes)
                    return extent, extent.allocate(need_bytes) or 0
                used_bytes = sum(extent.used_bytes for extent in self._extents)
            if time.monotonic() >= give_up_at:
                raise ArenaFull(
                    f"{need_bytes} bytes do not fit: {used_bytes} of {self._limit_bytes} bytes of "
                    "shared memory are in use"
                )
            time.sleep(_LOOK_S)

    def _grow(self, need_bytes: int) -> _WriterExtent:
        # Doubled, so that few extents ever come to be; whole MiB, so that each can be mapped.
        wish_bytes = max(need_bytes, self._size_bytes, MIB)
        size_bytes = min(-(-wish_bytes // MIB) * MIB, self._limit_bytes - self._size_bytes)
        size_bytes = max(size_bytes, -(-need_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        os.ftruncate(self.fd, self._size_bytes + size_bytes)
        extent = _WriterExtent(self.fd, self._size_bytes, size_bytes)
        self._size_bytes += size_bytes
        self._extents.append(extent)
        return extent


class _WriterExtent:
    """One mapped stretch of the file; no block crosses its ends."""

    def __init__(self, fd: int, offset: int, size_bytes: int) -> None:
        self.offset = offset
        self.memory = np.frombuffer(mmap.mmap(fd, size_bytes, offset=offset), np.uint8)
        # (start, end), by place. What the reader has freed is found when room is looked for.
        self._used: list[tuple[int, int]] = []

    @property
    def used_bytes(self) -> int:
        return sum(end - start for start, end in self._used)

    def allocate(self, need_bytes: int) -> int | None:
        """Where a block of that size begins; None where there is no room."""
        self._used = [block for block in self._used if self.memory[block[0]]]
        free_from = 0
        for index, (start, end) in enumerate([*self._used, (len(self.memory), 0)]):
            if start - free_from >= need_bytes:
                self._used.insert(index, (free_from, free_from + need_bytes))
                self.memory[free_from] = 1
                return free_from
            free_from = end
        return None


class ArenaReader:
    """Looks at what the other side has put into its arena.

    Args:
        fd: of the file; the reader's from now on.
        writable: whether views may be written to; the writer never looks at a block again.
    """

    def __init__(self, fd: int, *, writable: bool) -> None:
        self.fd = fd
        self._writable = writable
        self._lock = threading.Lock()
        self._mapped: list[tuple[int, mmap.mmap]] = []
        self._mapped_bytes = 0

    def view(self, offset: int, size_bytes: int) -> NDArray[np.uint8]:
        """The block's bytes; it is free once this array and all views on it are gone.

        Raises:
            ValueError: there is no such block.
        """
        start, mapping = self._find(offset, size_bytes)
        return np.asarray(_Block(mapping, offset - start, size_bytes, self._writable))

    def close(self) -> None:
        """Map nothing new; the views that there are stay valid."""
        with self._lock:
            os.close(self.fd)
            self.fd = _CLOSED

    def _find(self, offset: int, size_bytes: int) -> tuple[int, mmap.mmap]:
        with self._lock:
            end = offset + size_bytes
            if end > self._mapped_bytes:
                self._map_what_is_new()
            for start, mapping in self._mapped:
                if start + HEADER_BYTES <= offset and end <= start + len(mapping):
                    return start, mapping
        raise ValueError(f"no block of {size_bytes} bytes at {offset}")

    def _map_what_is_new(self) -> None:
        # The file ends where an extent of the writer ends, so no block crosses a mapping's end.
        if self.fd == _CLOSED:
            return
        new_bytes = os.fstat(self.fd).st_size - self._mapped_bytes
        if new_bytes > 0:
            mapping = mmap.mmap(self.fd, new_bytes, offset=self._mapped_bytes)
            self._mapped.append((self._mapped_bytes, mapping))
            self._mapped_bytes += new_bytes


class _Block:
    """What a view's memory belongs to: numpy holds on to it for as long as any view lives."""

    __slots__ = ("__array_interface__", "_header", "_mapping", "_process")

    def __init__(self, mapping: mmap.mmap, start: int, size_bytes: int, writable: bool) -> None:
        self._mapping = mapping
        self._header = start - HEADER_BYTES
        self._process = os.getpid()
        address = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
        self.__array_interface__ = {
            "data": (address + start, not writable),
            "shape": (size_bytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        # A process that a model forks has a copy of every view, and says nothing by dropping it.
        if os.getpid() == self._process:
            self._mapping[self._header] = 0
