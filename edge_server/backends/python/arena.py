"""Shared memory with one writer and one reader: an anonymous file that both processes map.

A block is written once, read in place, and free again when its reader's last view on it is gone.
The reader says so by a byte in the block's own header, so that nothing has to be sent and a
finalizer may do it on any thread. The file has no name: nothing is left behind, whoever dies.

Both map all of it from the start. It takes memory where blocks have been, and they are put as far
in front as there is room.
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
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class ArenaFull(Exception):
    """There is no room."""


def make_arena_file(name: str, size_bytes: int) -> int:
    """A descriptor of a new, empty arena, whose size no process can change under another's feet."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


class ArenaWriter:
    """Puts arrays into the arena.

    Args:
        fd: of the file; the caller's to close, at any time.
        patience_s: how long `put` waits for the reader to free something.
    """

    def __init__(self, fd: int, patience_s: float = 0.0) -> None:
        self._memory = np.frombuffer(mmap.mmap(fd, 0), np.uint8)
        self._patience_s = patience_s
        self._lock = threading.Lock()
        # (begin, end), by place. What the reader has freed is found when room is looked for.
        self._used: list[tuple[int, int]] = []
        self._closed = False

    def put(self, array: NDArray[Any]) -> int:
        """Copy `array`, in C order, into a block; its offset.

        Raises:
            ArenaFull: there never is so much room, or it did not become free in time.
        """
        need_bytes = HEADER_BYTES + -(-array.nbytes // HEADER_BYTES) * HEADER_BYTES
        begin = self._wait_for_room(need_bytes) + HEADER_BYTES
        target = self._memory[begin : begin + array.nbytes]
        np.copyto(target.view(array.dtype).reshape(array.shape), array)
        return begin

    def take_back(self, offset: int) -> None:
        """Free a block that the reader will never hear of."""
        with self._lock:
            self._memory[offset - HEADER_BYTES] = 0

    def close(self) -> None:
        """Take nothing more."""
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
        """Where a block of that size begins; None where there is no room."""
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
    """Looks at what the other side has put into its arena.

    Args:
        fd: of the file; the caller's to close, at any time.
        writable: whether views may be written to; the writer never looks at a block again.
    """

    def __init__(self, fd: int, *, writable: bool) -> None:
        self._mapping = mmap.mmap(fd, 0)
        self._writable = writable

    @property
    def size_bytes(self) -> int:
        """Of the whole arena."""
        return len(self._mapping)

    def view(self, offset: int, size_bytes: int) -> NDArray[np.uint8]:
        """The block's bytes; it is free once this array and all views on it are gone.

        Raises:
            ValueError: there is no such block.
        """
        if not (offset >= HEADER_BYTES and 0 <= size_bytes <= len(self._mapping) - offset):
            raise ValueError(f"no block of {size_bytes} bytes at {offset}")
        return np.asarray(_Block(self._mapping, offset, size_bytes, self._writable))


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
