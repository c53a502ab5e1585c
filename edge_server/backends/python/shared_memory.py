"""Tensors in shared memory with one writer and one reader: one copy in, views out.

The memory is an anonymous file that both processes map. A block is written once, read in place, and
freed when the reader's last view on the block is gone. The reader frees the block by a byte in the
block's header, so freeing sends no message and a finalizer may free on any thread. The file has no
name, so a crash of either process leaves no file behind.

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

from edge_server.backends.python.messages import TensorPlace
from edge_server.tensors import DataType, element_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

# Header of each block; its size keeps the data aligned for every element type and cache line.
HEADER_BYTES = 64
MIB = 1 << 20
# Limit on the tensors in one message of a model. Each BYTES element is a Python object.
MOST_TENSORS = 1024
MOST_BYTES_ELEMENTS = 1 << 20

_LOOK_S = 0.001
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_LENGTH_BYTES = 4

# A tensor to send: name, type, array.
Content = tuple[str, DataType, "NDArray[Any]"]


class ArenaFull(Exception):
    """The arena has no room for the block."""


def make_arena_file(name: str, size_bytes: int) -> int:
    """Return a descriptor of a new, empty arena whose size is sealed against both processes."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


class ArenaWriter:
    """Copies arrays into the arena, whose `fd` the caller may close; `put` waits `timeout_s` for
    the reader to free a block."""

    def __init__(self, fd: int, timeout_s: float = 0.0) -> None:
        self._memory = np.frombuffer(mmap.mmap(fd, 0), np.uint8)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        # (begin, end) of each block, by offset. The writer finds freed blocks when it looks for
        # room.
        self._used: list[tuple[int, int]] = []

    def put(self, array: NDArray[Any]) -> int:
        """Copy `array`, in C order, into a block; return the block's offset.

        Raises:
            ArenaFull: the array is larger than the arena, or no room became free in time.
        """
        need_bytes = HEADER_BYTES + -(-array.nbytes // HEADER_BYTES) * HEADER_BYTES
        give_up_at = time.monotonic() + self._timeout_s
        while (block := self._allocate(need_bytes)) is None:
            if need_bytes > len(self._memory) or time.monotonic() >= give_up_at:
                used_bytes = sum(end - begin for begin, end in self._used)
                raise ArenaFull(
                    f"{need_bytes} bytes do not fit: {used_bytes} of {len(self._memory)} bytes of "
                    "shared memory are in use"
                )
            time.sleep(_LOOK_S)
        begin = block + HEADER_BYTES
        target = self._memory[begin : begin + array.nbytes]
        np.copyto(target.view(array.dtype).reshape(array.shape), array)
        return begin

    def take_back(self, offset: int) -> None:
        with self._lock:
            self._memory[offset - HEADER_BYTES] = 0

    def _allocate(self, need_bytes: int) -> int | None:
        """Return the offset of a free gap of that size; None if the arena has no such gap."""
        with self._lock:
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
    """Maps the blocks that the other process has written to its arena. Views may be written to
    where `writable`: the writer never reads a block again."""

    def __init__(self, fd: int, *, writable: bool) -> None:
        self._mapping = mmap.mmap(fd, 0)
        self._writable = writable
        self.size_bytes = len(self._mapping)

    def view(self, offset: int, size_bytes: int) -> NDArray[np.uint8]:
        """Return the block's bytes; the block is freed when this array and all views on it are
        gone."""
        if not (offset >= HEADER_BYTES and 0 <= size_bytes <= self.size_bytes - offset):
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


def pack_all(tensors: Iterable[Content], arena: ArenaWriter) -> list[TensorPlace]:
    """Copy tensors into `arena`: all, or none.

    Raises:
        ArenaFull: the tensors do not fit.
    """
    places: list[TensorPlace] = []
    try:
        for name, datatype, array in tensors:
            stored = encode_bytes(array) if datatype is DataType.BYTES else array
            offset = arena.put(stored)
            places.append(TensorPlace(name, datatype.value, array.shape, offset, stored.nbytes))
    except BaseException:
        take_back(places, arena)
        raise
    return places


def pack_for_daemon(tensors: Sequence[Content], arena: ArenaWriter) -> list[TensorPlace]:
    """Copy tensors like `pack_all`, within the limits of the daemon."""
    bytes_sizes = (array.size for _, type_, array in tensors if type_ is DataType.BYTES)
    if fault := _too_many(len(tensors), sum(bytes_sizes)):
        raise ArenaFull(fault)
    return pack_all(tensors, arena)


def take_back(places: Iterable[TensorPlace], arena: ArenaWriter) -> None:
    for place in places:
        arena.take_back(place.offset)


def check_places(places: Sequence[TensorPlace], arena: ArenaReader) -> None:
    """Check that the places lie in `arena` without overlap; raises ValueError, also for too
    many."""
    bytes_sizes = (element_count(p.shape) for p in places if p.datatype == DataType.BYTES.value)
    if fault := _too_many(len(places), sum(max(0, size) for size in bytes_sizes)):
        raise ValueError(fault)
    size_bytes = sum(max(0, place.size_bytes) for place in places)
    if size_bytes > arena.size_bytes:
        raise ValueError(f"{size_bytes} bytes of tensors in a memory of {arena.size_bytes}")


def unpack_all(places: Sequence[TensorPlace], arena: ArenaReader) -> dict[str, NDArray[Any]]:
    check_places(places, arena)
    return {place.name: unpack(place, arena) for place in places}


def unpack(place: TensorPlace, arena: ArenaReader) -> NDArray[Any]:
    """Return the tensor at `place`, a view on the memory; BYTES are copies. Raises ValueError where
    the arena has no such block, or that does not match `place`."""
    datatype = DataType(place.datatype)
    stored = arena.view(place.offset, place.size_bytes)
    if datatype is DataType.BYTES:
        return decode_bytes(stored, place.shape)
    return stored.view(datatype.numpy).reshape(place.shape)


def encode_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Encode BYTES elements in C order, each behind its 4-byte little-endian length; one that is
    not `bytes` as the UTF-8 of its `str`, like Triton's clients do."""
    parts: list[bytes] = []
    for element in array.flat:
        data = element if isinstance(element, bytes) else str(element).encode()
        parts += (len(data).to_bytes(_LENGTH_BYTES, "little"), data)
    return np.frombuffer(b"".join(parts), np.uint8)


def bytes_elements(data: bytes) -> Iterator[bytes]:
    begin = 0
    while begin < len(data):
        first = begin + _LENGTH_BYTES
        begin = first + int.from_bytes(data[begin:first], "little")
        if begin > len(data):
            raise ValueError("a BYTES element is cut short")
        yield data[first:begin]


def decode_bytes(stored: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.object_]:
    """Decode BYTES elements from their stored form. Raises ValueError where their number differs
    from `shape`, or one is cut short."""
    elements = np.empty(element_count(shape), np.object_)
    count = 0
    for element in bytes_elements(stored.tobytes()):
        if count == elements.size:
            raise ValueError(f"more BYTES elements than {elements.size}")
        elements[count] = element
        count += 1
    if count < elements.size:
        raise ValueError(f"{count} BYTES elements, not {elements.size}")
    return elements.reshape(shape)


def _too_many(tensors: int, bytes_elements: int) -> str:
    if tensors > MOST_TENSORS:
        return f"{tensors} tensors at once; at most {MOST_TENSORS} are taken"
    if bytes_elements > MOST_BYTES_ELEMENTS:
        return (
            f"{bytes_elements} elements of BYTES at once; at most {MOST_BYTES_ELEMENTS} are taken"
        )
    return ""
