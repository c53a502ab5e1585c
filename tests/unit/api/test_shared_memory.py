"""A region is a bounded part of one object, and no name or number leads out of it."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from edge_server.api.admission import ByteBudget
from edge_server.api.parameters import region_of
from edge_server.api.shared_memory import SharedMemory
from edge_server.errors import (
    AlreadyExists,
    EdgeServerError,
    InvalidRequest,
    NotFound,
    Unavailable,
)


@pytest.fixture
def regions(tmp_path: Path) -> SharedMemory:
    """Over a directory with one object, `key`, of 100 bytes that count."""
    directory = tmp_path / "shm"
    directory.mkdir()
    (directory / "key").write_bytes(bytes(range(100)))
    (tmp_path / "outside").write_bytes(bytes(100))
    (directory / "link").symlink_to(tmp_path / "outside")
    return SharedMemory(directory)


def test_copies_count_where_the_caller_came_in_and_regions_are_for_all(
    regions: SharedMemory,
) -> None:
    tcp, unix = ByteBudget(), ByteBudget()
    ours, theirs = regions.counted_by(tcp), regions.counted_by(unix)
    ours.register("r", "key", 0, 100)
    copy = theirs.find("r", 0, 100).read()
    assert (tcp.used_bytes, unix.used_bytes) == (0, 100)
    del copy
    assert unix.used_bytes == 0
    theirs.unregister("")
    assert ours.regions("") == []


def test_a_region_whose_last_request_ends_meanwhile_is_no_error(
    regions: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions.register("r", "key", 0, 100)
    used = [regions.find("r", 0, 4)]
    regions.unregister("r")
    names = WeakValueDictionary.keys

    def keys(of: WeakValueDictionary[str, object]) -> list[str]:
        found = list(names(of))
        used.clear()
        return found

    monkeypatch.setattr(WeakValueDictionary, "keys", keys)
    assert len(regions.regions("")) == len(used)


def test_a_region_in_use_stays_listed_until_its_last_request_is_done(
    regions: SharedMemory,
) -> None:
    regions.register("r", "key", 0, 100)
    used = regions.find("r", 0, 4)
    regions.unregister("r")
    assert [region.name for region in regions.regions("")] == ["r"]
    with pytest.raises(NotFound):
        regions.find("r", 0, 4)
    with pytest.raises(AlreadyExists):
        regions.register("r", "key", 0, 100)
    used.write("out", memoryview(b"1234"))
    del used
    assert regions.regions("") == []
    regions.register("r", "key", 0, 100)


def test_a_slice_is_read_at_the_right_place(regions: SharedMemory) -> None:
    regions.register("r", "/key", 10, 50)
    copy = regions.find("r", 5, 3).read()
    assert bytes(copy) == bytes([15, 16, 17])
    assert copy.readonly


def test_what_was_read_stays_what_it_was_when_the_object_changes(regions: SharedMemory) -> None:
    regions.register("r", "key", 10, 50)
    before = regions.find("r", 0, 50).read()
    regions.find("r", 7, 4).write("y", memoryview(b"abcd"))
    assert bytes(before) == bytes(range(10, 60))
    assert bytes(regions.find("r", 7, 4).read()) == b"abcd"


def test_a_region_that_is_unregistered_lives_as_long_as_a_request_has_it(
    regions: SharedMemory,
) -> None:
    regions.register("r", "key", 0, 100)
    found = regions.find("r", 0, 100)
    regions.unregister("r")
    gc.collect()
    assert np.frombuffer(found.read(), np.uint8).sum() == sum(range(100))
    with pytest.raises(NotFound, match="Unable to find shared memory region: 'r'"):
        regions.find("r", 0, 1)
    regions.unregister("r")


def test_an_object_that_has_become_smaller_is_an_error_not_a_crash(
    regions: SharedMemory, tmp_path: Path
) -> None:
    regions.register("r", "key", 0, 100)
    (tmp_path / "shm" / "key").write_bytes(b"")
    with pytest.raises(InvalidRequest, match="has become smaller"):
        regions.find("r", 0, 100).read()
    with pytest.raises(InvalidRequest, match="has become smaller"):
        regions.find("r", 0, 100).write("y", memoryview(b"x"))


def test_an_object_that_shrinks_while_it_is_read_is_an_error_not_a_crash(
    regions: SharedMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions.register("r", "key", 0, 100)
    read = os.preadv

    def read_a_little(file: int, buffers: list[memoryview], place: int) -> int:
        got = read(file, [buffers[0][:30]], place)
        os.truncate(tmp_path / "shm" / "key", 40)
        return got

    monkeypatch.setattr(os, "preadv", read_a_little)
    with pytest.raises(InvalidRequest, match="has become smaller"):
        regions.find("r", 0, 100).read()


def test_copies_count_as_long_as_somebody_has_one(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(bytes(100))
    regions = SharedMemory(tmp_path, ByteBudget(150), longest_bytes=90)
    regions.register("r", "key", 0, 100)
    with pytest.raises(InvalidRequest, match=r"it has 90 at most \(grpc.max_message_bytes\)"):
        regions.find("r", 0, 91).read()
    first = np.frombuffer(regions.find("r", 0, 90).read(), np.uint8)
    with pytest.raises(Unavailable, match=r"grpc\.max_pending_bytes"):
        regions.find("r", 0, 90).read()
    assert not first.any()
    del first
    assert len(regions.find("r", 0, 90).read()) == 90


def descriptors_of(path: Path) -> int:
    """Of that file alone: what another test left is closed whenever it is collected."""
    opened = Path("/proc/self/fd").iterdir()
    return sum(os.path.realpath(each) == str(path) for each in opened)


def test_as_many_regions_as_there_may_be_have_a_descriptor_each(
    regions: SharedMemory, tmp_path: Path
) -> None:
    file = (tmp_path / "shm/key").resolve()
    for number in range(256):
        regions.register(f"r{number}", "key", 0, 100)
    assert descriptors_of(file) == 256
    with pytest.raises(Unavailable, match="256 shared memory regions are registered already"):
        regions.register("r", "key", 0, 100)
    regions.unregister("")
    gc.collect()
    assert descriptors_of(file) == 0
    regions.register("r", "key", 0, 100)


@pytest.mark.parametrize(
    ("key", "offset", "byte_size", "says"),
    [
        ("", 0, 1, "cannot register shared memory region 'r' - invalid shm key ''"),
        ("///", 0, 1, "cannot register shared memory region 'r' - invalid shm key '///'"),
        ("none", 0, 1, "Unable to open shared memory region: 'none'"),
        ("../outside", 0, 1, "Unable to open shared memory region: '../outside'"),
        ("..", 0, 1, "Unable to open shared memory region: '..'"),
        ("link", 0, 1, "Unable to open shared memory region: 'link'"),
        ("a\0b", 0, 1, "Unable to open shared memory region: 'a\0b'"),
        (
            "/triton_python_backend_shm_region_1",
            0,
            1,
            "cannot register shared memory region 'r' with key "
            "'/triton_python_backend_shm_region_1' as the key contains the reserved prefix "
            "'triton_python_backend_shm_region_'",
        ),
        ("key", 0, 0, "failed to register shared memory region 'r': invalid args"),
        ("key", 51, 50, "failed to register shared memory region 'r': invalid args"),
        ("key", 2**64 - 1, 2**64 - 1, "failed to register shared memory region 'r': invalid args"),
    ],
)
def test_what_cannot_be_a_region_is_refused_in_the_contracts_words(
    regions: SharedMemory, key: str, offset: int, byte_size: int, says: str
) -> None:
    with pytest.raises(EdgeServerError) as caught:
        regions.register("r", key, offset, byte_size)
    assert str(caught.value) == says
    assert regions.regions("") == []


def test_a_name_is_not_longer_than_anybody_needs(regions: SharedMemory) -> None:
    regions.register("n" * 1024, "key", 0, 100)
    with pytest.raises(InvalidRequest, match="has 1025 characters, at most 1024 are allowed"):
        regions.register("n" * 1025, "key", 0, 100)


def test_a_name_is_given_once(regions: SharedMemory) -> None:
    regions.register("r", "key", 0, 100)
    with pytest.raises(AlreadyExists, match="shared memory region 'r' already in manager"):
        regions.register("r", "key", 0, 100)
    regions.unregister("")
    with pytest.raises(NotFound, match="Unable to find system shared memory region: 'r'"):
        regions.regions("r")


@pytest.mark.parametrize(
    ("offset", "byte_size", "says"),
    [
        (51, 0, "Invalid offset for shared memory region: 'r'"),
        (50, 1, "Invalid offset for shared memory region: 'r'"),
        (49, 2, "Invalid offset + byte size for shared memory region: 'r'"),
        (-1, 0, "Invalid offset for shared memory region: 'r'"),
        (-1, 1, "Invalid offset for shared memory region: 'r'"),
        (
            *(32, -32),
            "Integer overflow detected: byte_size (18446744073709551584) + offset (32) exceeds "
            "maximum value (18446744073709551615) for region 'r'",
        ),
    ],
)
def test_a_place_outside_of_the_region_is_refused(
    regions: SharedMemory, offset: int, byte_size: int, says: str
) -> None:
    regions.register("r", "key", 10, 50)
    with pytest.raises(InvalidRequest) as caught:
        regions.find("r", offset, byte_size)
    assert str(caught.value) == says


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1))
def test_no_numbers_lead_out_of_a_region(
    regions: SharedMemory, offset: int, byte_size: int
) -> None:
    regions.unregister("r")
    regions.register("r", "key", 10, 50)
    try:
        found = regions.find("r", offset, byte_size)
    except InvalidRequest:
        return
    assert found.offset >= 0
    assert found.byte_size >= 0
    assert found.offset + found.byte_size <= 50


def test_parameters_that_do_not_go_together_are_refused() -> None:
    parameters = pb.ModelInferRequest().parameters
    assert region_of("a", parameters) is None
    parameters["shared_memory_offset"].int64_param = 1
    with pytest.raises(InvalidRequest, match="'shared_memory_offset' can not be specified without"):
        region_of("a", parameters)
    parameters["shared_memory_region"].string_param = "r"
    with pytest.raises(InvalidRequest, match="'shared_memory_byte_size' must be specified along"):
        region_of("a", parameters)
    parameters["shared_memory_byte_size"].int64_param = 2
    assert region_of("a", parameters) == ("r", 1, 2)
    parameters["shared_memory_byte_size"].string_param = "2"
    with pytest.raises(InvalidRequest, match="expected int64_param"):
        region_of("a", parameters)
