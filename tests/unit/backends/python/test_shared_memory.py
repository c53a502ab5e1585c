"""Shared memory of one writer and one reader: blocks live as long as views on them, and tensors of
every type come out as they went in."""

from __future__ import annotations

import gc
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_server.backends.python.messages import TensorPlace
from edge_server.backends.python.shared_memory import (
    HEADER_BYTES,
    MIB,
    MOST_BYTES_ELEMENTS,
    MOST_TENSORS,
    ArenaFull,
    ArenaReader,
    ArenaWriter,
    check_places,
    decode_bytes,
    encode_bytes,
    make_arena_file,
    pack_all,
    pack_for_daemon,
    unpack,
    unpack_all,
)
from edge_server.tensors import DataType

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def arena(
    size_bytes: int = 4 * MIB, *, writable: bool = False
) -> Iterator[tuple[ArenaWriter, ArenaReader]]:
    fd = make_arena_file("test", size_bytes)
    writer, reader = ArenaWriter(fd), ArenaReader(fd, writable=writable)
    os.close(fd)
    yield writer, reader


def block(value: int, size_bytes: int = 1000) -> np.ndarray:
    return np.full(size_bytes, value, np.uint8)


def test_what_is_put_is_what_is_seen_without_a_copy() -> None:
    with arena() as (writer, reader):
        values = np.arange(12, dtype="<f4").reshape(3, 4)
        offset = writer.put(values)
        seen = reader.view(offset, values.nbytes).view("<f4").reshape(3, 4)
        assert np.array_equal(seen, values)
        assert not seen.flags.owndata
        assert not seen.flags.writeable
        assert seen.ctypes.data % HEADER_BYTES == 0


def test_an_array_that_is_not_contiguous_is_put_in_c_order() -> None:
    with arena() as (writer, reader):
        values = np.arange(12, dtype="<i8").reshape(3, 4).T
        offset = writer.put(values)
        assert reader.view(offset, values.nbytes).tobytes() == values.tobytes()


def test_a_block_is_not_written_again_while_any_view_on_it_lives() -> None:
    with arena() as (writer, reader):
        part = reader.view(writer.put(block(1)), 1000)[10:20].view("<u2")
        for value in range(2, 100):
            offset = writer.put(block(value))
            del offset
        gc.collect()
        assert set(part.view(np.uint8).tolist()) == {1}


def test_memory_is_used_again_when_the_last_view_is_gone() -> None:
    with arena() as (writer, reader):
        first = writer.put(block(1))
        view = reader.view(first, 1000)[5:]
        second = writer.put(block(2))
        assert second != first
        reader.view(second, 1000)
        del view
        assert writer.put(block(3)) == first


def test_a_block_that_the_reader_never_receives_can_be_taken_back() -> None:
    with arena() as (writer, _):
        first = writer.put(block(1))
        writer.take_back(first)
        assert writer.put(block(2)) == first


def test_the_error_of_a_full_arena_names_how_full_it_is() -> None:
    with arena(MIB) as (writer, reader):
        kept = reader.view(writer.put(block(1, MIB // 2)), MIB // 2)
        with pytest.raises(ArenaFull, match=r"do not fit: 524352 of 1048576 bytes .* in use"):
            writer.put(block(2, MIB // 2))
        del kept
        writer.put(block(3, MIB // 2))


def test_views_outlive_the_arena() -> None:
    with arena() as (writer, reader):
        view = reader.view(writer.put(block(7)), 1000)
    del writer, reader
    gc.collect()
    assert set(view.tolist()) == {7}


def test_nobody_can_shrink_the_memory_under_the_other() -> None:
    fd = make_arena_file("test", MIB)
    for size_bytes in (0, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size_bytes)
    os.close(fd)


def test_whatever_has_been_put_an_empty_arena_takes_what_fits_into_it() -> None:
    with arena(4 * MIB) as (writer, reader):
        for size_bytes in (100, MIB, 3 * MIB, 4 * MIB - HEADER_BYTES):
            view = reader.view(writer.put(block(1, size_bytes)), size_bytes)
            del view


def test_it_takes_memory_only_where_blocks_have_been() -> None:
    fd = make_arena_file("test", 1024 * MIB)
    writer, reader = ArenaWriter(fd), ArenaReader(fd, writable=False)
    for value in range(100):
        view = reader.view(writer.put(block(value, MIB)), MIB)
        del view
    assert os.fstat(fd).st_blocks * 512 < 2 * MIB
    os.close(fd)


@pytest.mark.parametrize("timeout_s", [0.0, 1e6])
def test_what_can_never_fit_is_refused_at_once(timeout_s: float) -> None:
    fd = make_arena_file("test", MIB)
    writer = ArenaWriter(fd, timeout_s)
    os.close(fd)
    with pytest.raises(ArenaFull, match="0 of 1048576 bytes"):
        writer.put(block(1, MIB))


@pytest.mark.parametrize(
    "place", [(0, 10), (HEADER_BYTES, 4 * MIB), (64 * MIB, 1), (-1, 4), (HEADER_BYTES, -1)]
)
def test_a_place_outside_the_memory_is_refused(place: tuple[int, int]) -> None:
    with arena() as (writer, reader):
        writer.put(block(1))
        with pytest.raises(ValueError, match="no block of"):
            reader.view(*place)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 300_000), st.integers(0, 5)),
        max_size=40,
    )
)
def test_no_view_ever_changes_whatever_is_put_and_dropped(steps: list[tuple[int, int]]) -> None:
    with arena(16 * MIB) as (writer, reader):
        views: list[tuple[int, np.ndarray]] = []
        for value, (size_bytes, drop) in enumerate(steps):
            offset = writer.put(block(value, size_bytes))
            views.append((value, reader.view(offset, size_bytes)))
            if drop < len(views):
                del views[drop]
            assert all((view == value).all() for value, view in views)
        del views


@pytest.fixture
def pair() -> tuple[ArenaWriter, ArenaReader]:
    fd = make_arena_file("test", MIB)
    pair = ArenaWriter(fd), ArenaReader(fd, writable=False)
    os.close(fd)
    return pair


@pytest.mark.parametrize("datatype", [d for d in DataType if d is not DataType.BYTES])
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4)])
def test_every_type_and_shape_comes_out_as_it_went_in(
    pair: tuple[ArenaWriter, ArenaReader], datatype: DataType, shape: tuple[int, ...]
) -> None:
    writer, reader = pair
    array = np.zeros(shape, datatype.numpy)
    if array.size:
        array.reshape(-1).view(np.uint8)[:] = 1
    (place,) = pack_all([("x", datatype, array)], writer)
    seen = unpack(place, reader)
    assert (seen.dtype, seen.shape) == (datatype.numpy, shape)
    assert seen.tobytes() == array.tobytes()


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
    with pytest.raises(ValueError, match="BYTES element"):
        decode_bytes(np.frombuffer(stored, np.uint8), shape)


def test_tensors_that_do_not_all_fit_leave_nothing_behind(
    pair: tuple[ArenaWriter, ArenaReader],
) -> None:
    writer, _ = pair
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
    pair: tuple[ArenaWriter, ArenaReader],
    places: list[tuple[str, tuple[int, ...], int]],
    says: str,
) -> None:
    named = [TensorPlace(f"t{n}", t, shape, 64, size) for n, (t, shape, size) in enumerate(places)]
    for check in (check_places, unpack_all):
        with pytest.raises(ValueError, match=says):
            check(named, pair[1])


def test_too_many_tensors_are_refused_where_they_are_sent(
    pair: tuple[ArenaWriter, ArenaReader],
) -> None:
    one = ("x", DataType.UINT8, np.zeros(1, np.uint8))
    with pytest.raises(ArenaFull, match="1025 tensors at once; at most 1024 are taken"):
        pack_for_daemon([one] * (MOST_TENSORS + 1), pair[0])
    many = ("x", DataType.BYTES, np.empty(MOST_BYTES_ELEMENTS + 1, np.object_))
    with pytest.raises(ArenaFull, match="elements of BYTES at once; at most 1048576 are taken"):
        pack_for_daemon([many], pair[0])
    assert len(pack_for_daemon([one] * 3, pair[0])) == 3
