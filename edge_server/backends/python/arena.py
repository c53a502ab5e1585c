"""Shared memory with one writer and one reader: an anonymous file that both processes map.

A block is written once, read in place, and freed when the reader's last view on the block is gone.
The reader frees the block by a byte in the block's header, so freeing sends no message and a
finalizer may free on any thread. The file has no name, so a crash of either process leaves no file
behind.

Both processes map the whole file from the start. The file takes memory only where blocks have been,
and each block goes to the first place with room.
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

# Header of each block; its size keeps the data aligned for every element type and cache line.
HEADER_BYTES = 64
MIB = 1 << 20
_LOOK_S = 0.001
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class ArenaFull(Exception):
    """The arena has no room for the block."""


def make_arena_file(name: str, size_bytes: int) -> int:
    """Return a descriptor of a new, empty arena whose size is sealed against both processes."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


class ArenaWriter:
    """Copies arrays into the arena.

    Args:
        fd: descriptor of the file; owned by the caller, who may close it at any time.
        patience_s: how long `put` waits for the reader to free a block.
    """

    def __init__(self, fd: int, patience_s: float = 0.0) -> None:
        self._memory = np.frombuffer(mmap.mmap(fd, 0), np.uint8)
        self._patience_s = patience_s
        self._lock = threading.Lock()
        # (begin, end) of each block, by offset. The writer finds freed blocks when it looks for
        # room.
        self._used: list[tuple[int, int]] = []
        self._closed = False

    def put(self, array: NDArray[Any]) -> int:
        """Copy `array`, in C order, into a block; return the block's offset.

        Raises:
            ArenaFull: the array is larger than the arena, or no room became free in time.
        """
        need_bytes = HEADER_BYTES + -(-array.nbytes // HEADER_BYTES) * HEADER_BYTES
        begin = self._wait_for_room(need_bytes) + HEADER_BYTES
        target = self._memory[begin : begin + array.nbytes]
        np.copyto(target.view(array.dtype).reshape(array.shape), array)
        return begin

    def take_back(self, offset: int) -> None:
        """Free a block whose offset the reader never receives."""
        with self._lock:
            self._memory[offset - HEADER_BYTES] = 0

    def close(self) -> None:
        """Accept no further arrays."""
        self._closed = True

    def _wait_for_room(self, need_bytes: int) -> int:
        give_up_at = time.monotonic() + self._patience_s
        while True:
            with self._lock:
                if self._closed:
                    raise ArenaFull("the other side is gone")
                begin = self._allocate(need_bytes)
                if begin is not None:
                    return begin
                used_bytes = sum(end - begin for begin, end in self._used)
            if need_bytes > len(self._memory) or time.monotonic() >= give_up_at:
                raise ArenaFull(
                    f"{need_bytes} bytes do not fit: {used_bytes} of {len(self._memory)} bytes of "
                    "shared memory are in use"
                )
            time.sleep(_LOOK_S)

    def _allocate(self, need_bytes: int) -> int | None:
        """Return the offset of a free gap of that size; None if the arena has no such gap."""
        self._used = [block for block in self._used if self._memory[block[0]]]
        free_from = 0
        for index, (begin, end) in enumerate([*self._used, (len(self._memory), 0)]):
            if begin - free_from >= need_bytes:
                self._used.insert(index, (free_from, free_from + need_bytes))
                self._memory[free_from] = 1
                return free_from
            free_from = end
        return None


class ArenaReader:
    """Maps the blocks that the other process has written to its arena.

    Args:
        fd: descriptor of the file; owned by the caller, who may close it at any time.
        writable: whether views may be written to; the writer never reads a block again.
    """

    def __init__(self, fd: int, *, writable: bool) -> None:
        self._mapping = mmap.mmap(fd, 0)
        self._writable = writable

    @property
    def size_bytes(self) -> int:
        """Size of the whole arena."""
        return len(self._mapping)

    def view(self, offset: int, size_bytes: int) -> NDArray[np.uint8]:
        """Return the block's bytes; the block is freed when this array and all views on it are
        gone.

        Raises:
            ValueError: the arena has no such block.
        """
        if not (offset >= HEADER_BYTES and 0 <= size_bytes <= len(self._mapping) - offset):
            raise ValueError(f"no block of {size_bytes} bytes at {offset}")
        return np.asarray(_Block(self._mapping, offset, size_bytes, self._writable))


class _Block:
    """Owner of a view's memory: numpy keeps the block alive as long as any view lives."""

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
        # A process forked by the model has a copy of every view, and must not free the block.
        if os.getpid() == self._process:
            self._mapping[self._header] = 0
