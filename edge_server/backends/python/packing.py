"""Convert tensors to and from places in shared memory: one copy in, views out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.backends.python.arena import ArenaFull
from edge_server.backends.python.messages import TensorPlace
from edge_server.tensors import DataType, element_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from edge_server.backends.python.arena import ArenaReader, ArenaWriter

_LENGTH_BYTES = 4
# Limit on the tensors in one message of a model. Each BYTES element is a Python object of its own.
MOST_TENSORS = 1024
MOST_BYTES_ELEMENTS = 1 << 20

_BYTES = DataType.BYTES.value

# A tensor to send: name, type, array.
Content = tuple[str, DataType, "NDArray[Any]"]


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
    """Copy tensors like `pack_all`, within the limits of the daemon.

    Raises:
        ArenaFull: the tensors do not fit, or are too many.
    """
    bytes_elements = sum(array.size for _, type_, array in tensors if type_ is DataType.BYTES)
    if (fault := _too_many(len(tensors), bytes_elements)) is not None:
        raise ArenaFull(fault)
    return pack_all(tensors, arena)


def check_places(places: Sequence[TensorPlace], arena: ArenaReader) -> None:
    """Check that the places lie in `arena` without overlap.

    Raises:
        ValueError: the places cannot lie beside each other in `arena`, or are too many.
    """
    bytes_elements = sum(max(0, element_count(p.shape)) for p in places if p.datatype == _BYTES)
    if (fault := _too_many(len(places), bytes_elements)) is not None:
        raise ValueError(fault)
    size_bytes = sum(max(0, place.size_bytes) for place in places)
    if size_bytes > arena.size_bytes:
        raise ValueError(f"{size_bytes} bytes of tensors in a memory of {arena.size_bytes}")


def unpack_all(places: Sequence[TensorPlace], arena: ArenaReader) -> dict[str, NDArray[Any]]:
    """Return the tensors of a model's message, by name.

    Raises:
        ValueError: see `check_places` and `unpack`.
    """
    check_places(places, arena)
    return {place.name: unpack(place, arena) for place in places}


def _too_many(tensors: int, bytes_elements: int) -> str | None:
    if tensors > MOST_TENSORS:
        return f"{tensors} tensors at once; at most {MOST_TENSORS} are taken"
    if bytes_elements > MOST_BYTES_ELEMENTS:
        return (
            f"{bytes_elements} elements of BYTES at once; at most {MOST_BYTES_ELEMENTS} are taken"
        )
    return None


def take_back(places: Iterable[TensorPlace], arena: ArenaWriter) -> None:
    """Free the blocks whose places the reader never receives."""
    for place in places:
        arena.take_back(place.offset)


def unpack(place: TensorPlace, arena: ArenaReader) -> NDArray[Any]:
    """Return the tensor at `place`, a view on the memory; BYTES are copies.

    Raises:
        ValueError: the arena has no such block, or the block does not match `place`.
    """
    datatype = DataType(place.datatype)
    stored = arena.view(place.offset, place.size_bytes)
    if datatype is DataType.BYTES:
        return decode_bytes(stored, place.shape)
    return stored.view(datatype.numpy).reshape(place.shape)


def encode_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Encode BYTES elements in C order, each behind its 4-byte little-endian length.

    An element that is not `bytes` is encoded as the UTF-8 of its `str`, like Triton's clients do.
    """
    parts: list[bytes] = []
    for element in array.flat:
        data = element if isinstance(element, bytes) else str(element).encode()
        parts += (len(data).to_bytes(_LENGTH_BYTES, "little"), data)
    return np.frombuffer(b"".join(parts), np.uint8)


def decode_bytes(stored: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.object_]:
    """Decode BYTES elements from their stored form.

    Raises:
        ValueError: the number of elements differs from `shape`, or an element is cut short.
    """
    data = stored.tobytes()
    elements = np.empty(element_count(shape), np.object_)
    begin = 0
    for index in range(elements.size):
        first = begin + _LENGTH_BYTES
        length = int.from_bytes(data[begin:first], "little")
        begin = first + length
        if begin > len(data):
            raise ValueError(f"BYTES element {index} is cut short")
        elements[index] = data[first:begin]
    if begin != len(data):
        raise ValueError(f"{len(data) - begin} bytes more than {elements.size} elements have")
    return elements.reshape(shape)
