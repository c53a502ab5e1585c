"""Tensors through shared memory: every type comes out as it went in."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_server.backends.python.arena import (
    MIB,
    ArenaFull,
    ArenaReader,
    ArenaWriter,
    make_arena_file,
)
from edge_server.backends.python.messages import TensorPlace
from edge_server.backends.python.packing import (
    MOST_BYTES_ELEMENTS,
    MOST_TENSORS,
    check_places,
    decode_bytes,
    encode_bytes,
    pack_all,
    pack_for_daemon,
    unpack,
    unpack_all,
)
from edge_server.tensors import DataType


@pytest.fixture
def arena() -> tuple[ArenaWriter, ArenaReader]:
    fd = make_arena_file("test", MIB)
    arena = ArenaWriter(fd), ArenaReader(fd, writable=False)
    os.close(fd)
    return arena


@pytest.mark.parametrize("datatype", [d for d in DataType if d is not DataType.BYTES])
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4)])
def test_every_type_and_shape_comes_out_as_it_went_in(
    arena: tuple[ArenaWriter, ArenaReader], datatype: DataType, shape: tuple[int, ...]
) -> None:
    writer, reader = arena
    array = np.zeros(shape, datatype.numpy)
    if array.size:
        array.reshape(-1).view(np.uint8)[:] = 1
    (place,) = pack_all([("x", datatype, array)], writer)
    seen = unpack(place, reader)
    assert (seen.dtype, seen.shape) == (datatype.numpy, shape)
    assert seen.tobytes() == array.tobytes()


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=50), max_size=10))
def test_bytes_elements_are_whatever_they_are(elements: list[bytes]) -> None:
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    assert decode_bytes(encode_bytes(array), array.shape).tolist() == elements


@pytest.mark.parametrize(
    ("stored", "shape"),
    [(b"\x05\x00\x00\x00ab", (1,)), (b"\x01\x00\x00\x00ab", (1,)), (b"", (1,)), (b"a", (0,))],
)
def test_bytes_that_do_not_add_up_are_refused(stored: bytes, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"BYTES element|bytes more"):
        decode_bytes(np.frombuffer(stored, np.uint8), shape)


def test_tensors_that_do_not_all_fit_leave_nothing_behind(
    arena: tuple[ArenaWriter, ArenaReader],
) -> None:
    writer, _ = arena
    large = np.zeros(MIB * 2 // 3, np.uint8)
    for _ in range(3):
        with pytest.raises(ArenaFull):
            pack_all([("a", DataType.UINT8, large), ("b", DataType.UINT8, large)], writer)
    pack_all([("a", DataType.UINT8, large)], writer)


@pytest.mark.parametrize(
    ("places", "says"),
    [
        # Each of them fits, all of them lie in the same bytes.
        ([("UINT8", (MIB - 64,), MIB - 64)] * 2, "bytes of tensors in a memory of 1048576"),
        ([("UINT8", (MIB,), MIB - 64), ("UINT8", (1,), -MIB)] * 2, "bytes of tensors in a memory"),
        ([("UINT8", (1,), 1)] * (MOST_TENSORS + 1), "1025 tensors at once"),
        ([("BYTES", (1 << 40,), 4)], "elements of BYTES at once"),
        ([("BYTES", (1 << 20,), 4), ("BYTES", (-5,), 4), ("BYTES", (1,), 4)], "elements of BYTES"),
    ],
)
def test_places_that_cannot_be_are_refused_before_anything_is_made_of_them(
    arena: tuple[ArenaWriter, ArenaReader],
    places: list[tuple[str, tuple[int, ...], int]],
    says: str,
) -> None:
    named = [TensorPlace(f"t{n}", t, shape, 64, size) for n, (t, shape, size) in enumerate(places)]
    for check in (check_places, unpack_all):
        with pytest.raises(ValueError, match=says):
            check(named, arena[1])


def test_who_gives_too_much_is_told_where_it_was_given(
    arena: tuple[ArenaWriter, ArenaReader],
) -> None:
    one = ("x", DataType.UINT8, np.zeros(1, np.uint8))
    with pytest.raises(ArenaFull, match="1025 tensors at once; at most 1024 are taken"):
        pack_for_daemon([one] * (MOST_TENSORS + 1), arena[0])
    many = ("x", DataType.BYTES, np.empty(MOST_BYTES_ELEMENTS + 1, np.object_))
    with pytest.raises(ArenaFull, match="elements of BYTES at once; at most 1048576 are taken"):
        pack_for_daemon([many], arena[0])
    assert len(pack_for_daemon([one] * 3, arena[0])) == 3
