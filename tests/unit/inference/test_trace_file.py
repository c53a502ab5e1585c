"""Files of traces: whole after every write, in numbered parts, never too large, never elsewhere."""

from __future__ import annotations

import json
import os
import resource
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from edge_server.errors import SettingsError, Unavailable
from edge_server.inference.tracing import Sampler, TraceFile, TraceRule

if TYPE_CHECKING:
    from collections.abc import Iterator

ONE = Sampler(TraceRule(timestamps=True))
BLOCK = 4096


def element(number: int, size: int = 0) -> bytes:
    return json.dumps({"id": number, "x": "x" * size}).encode()


def ids(path: Path) -> list[int]:
    values: list[dict[str, Any]] = json.loads(path.read_text())
    return [value["id"] for value in values]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


def test_it_is_a_whole_array_after_every_write(path: Path) -> None:
    file = TraceFile(str(path))
    assert not path.exists()
    for number in range(5):
        assert file.write(ONE, element(number))
        assert ids(path) == list(range(number + 1))


def test_so_many_share_a_numbered_file(path: Path) -> None:
    file = TraceFile(str(path))
    by_twos = Sampler(TraceRule(timestamps=True, log_frequency=2))
    by_threes = Sampler(TraceRule(timestamps=True, log_frequency=3))
    for number, sampler in enumerate(
        [by_twos, by_threes, by_twos, by_twos, by_threes, ONE, by_threes, by_threes]
    ):
        assert file.write(sampler, element(number))
    found = {each.name: ids(each) for each in path.parent.iterdir()}
    assert found == {
        "trace.json": [5],
        "trace.json.0": [0, 2],
        "trace.json.1": [1, 4, 6],
        "trace.json.2": [3],
        "trace.json.3": [7],
    }


def test_what_an_earlier_run_left_stays_until_there_is_something_new(path: Path) -> None:
    path.write_text("old")
    file = TraceFile(str(path))
    assert path.read_text() == "old"
    file.write(ONE, element(1))
    assert ids(path) == [1]


def test_a_file_that_somebody_moved_or_cut_is_begun_anew(path: Path) -> None:
    file = TraceFile(str(path))
    file.write(ONE, element(1))
    path.rename(path.with_name("mine"))
    file.write(ONE, element(2))
    assert ids(path) == [2]
    os.truncate(path, 3)
    file.write(ONE, element(3))
    assert ids(path) == [3]


def test_beyond_the_limit_nothing_is_written_and_that_is_logged_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = TraceFile(str(path), most_bytes=4 * BLOCK)
    written = [file.write(ONE, element(number, 1000)) for number in range(30)]
    assert written == [True] * sum(written) + [False] * (30 - sum(written))
    assert 14 <= sum(written) <= 16
    assert path.stat().st_size <= 4 * BLOCK
    assert ids(path) == list(range(sum(written)))
    assert file.full
    assert len(caplog.records) == 1


def test_every_small_file_counts_as_a_block(path: Path) -> None:
    file = TraceFile(str(path), most_bytes=4 * BLOCK)
    alone = Sampler(TraceRule(timestamps=True, log_frequency=1))
    assert [file.write(alone, element(number)) for number in range(6)] == [True] * 4 + [False] * 2
    assert len(list(path.parent.iterdir())) == 4


def test_files_of_earlier_runs_count_until_they_are_replaced(path: Path) -> None:
    path.write_bytes(bytes(2 * BLOCK))
    path.with_name("trace.json.7").write_bytes(bytes(BLOCK))
    path.with_name("trace.json.old").write_bytes(bytes(9 * BLOCK))
    file = TraceFile(str(path), most_bytes=4 * BLOCK)
    assert file.write(ONE, element(0, 2 * BLOCK))
    assert not file.write(ONE, element(1, BLOCK))
    assert ids(path) == [0]


def refusal(path: Path) -> str:
    with pytest.raises((SettingsError, Unavailable)) as caught:
        TraceFile(str(path))
    return str(caught.value)


def test_a_path_that_cannot_be_written_is_an_error_with_the_remedy(
    tmp_path: Path, path: Path
) -> None:
    for bad, why in (
        (tmp_path, "Is a directory"),
        (tmp_path / "none" / "file", "No such file or directory"),
        (Path("/dev/null"), "is no plain file"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        assert refusal(bad) == (
            f"trace.file: {bad}: {why}; give a path in a directory that this user may write to "
            "(--trace-config triton,file=FILE)"
        )


def test_no_link_is_followed(tmp_path: Path, path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    path.symlink_to(target)
    assert ": is a link;" in refusal(path)
    path.unlink()
    file = TraceFile(str(path))
    path.symlink_to(target)
    part = Sampler(TraceRule(timestamps=True, log_frequency=1))
    path.with_name("trace.json.0").symlink_to(target)
    assert not file.write(ONE, element(1))
    assert not file.write(part, element(2))
    assert target.read_text() == "precious"


def test_a_pipe_without_a_reader_does_not_hold_it(path: Path) -> None:
    os.mkfifo(path)
    assert "trace.file" in refusal(path)


@contextmanager
def small_disk() -> Iterator[None]:
    """Files end at 10000 bytes, as on a disk that is full; pytest's own report among them.

    Python ignores the signal of such a write, and raises OSError.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_traces_leaves_a_whole_file_and_is_logged_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = TraceFile(str(path))
    with small_disk():
        written = [file.write(ONE, element(number, 3000)) for number in range(6)]
    assert written == [True] * 3 + [False] * 3
    assert ids(path) == [0, 1, 2]
    assert file.write(ONE, element(9))
    assert ids(path) == [0, 1, 2, 9]
    assert len(caplog.records) == 1
    large = Sampler(TraceRule(timestamps=True, log_frequency=1))
    with small_disk():
        assert not file.write(large, element(1, 20_000))
    assert not path.with_name("trace.json.0").exists()
