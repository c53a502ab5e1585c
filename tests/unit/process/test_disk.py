"""What is wrong with a place decides whether another start may help."""

from __future__ import annotations

import errno
import os
import tempfile
from typing import TYPE_CHECKING

import pytest

from edge_server.errors import SettingsError, Unavailable
from edge_server.process import disk
from edge_server.process.disk import (
    error_of_place,
    floor_bytes,
    lock_directory,
    make_locked_directory,
    orphans,
    stays,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.ENOSPC, errno.EIO])
def test_what_a_mount_or_room_would_mend_may_pass(number: int) -> None:
    error = error_of_place(OSError(number, "why"), "log.file: why")
    assert type(error) is Unavailable
    assert str(error) == "log.file: why"


@pytest.mark.parametrize("number", [errno.ELOOP, errno.EISDIR, errno.EEXIST, errno.ENOTDIR])
def test_something_of_another_kind_stays(number: int) -> None:
    assert type(error_of_place(OSError(number, "why"), "why")) is SettingsError


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE])
def test_a_fault_of_the_disk_or_a_shortage_may_pass_for_every_path(number: int) -> None:
    for mounted in (True, False):
        assert not stays(OSError(number, "why"), mounted=mounted)


def test_only_a_path_that_may_be_mounted_later_may_be_missing_until_then() -> None:
    missing = OSError(errno.ENOENT, "why")
    assert stays(missing)
    assert not stays(missing, mounted=False)


def test_a_directory_whose_process_died_before_it_named_it_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".x-died").mkdir()
    (tmp_path / "x-died").mkdir()
    mine, lock = make_locked_directory(tmp_path, "x-")
    try:
        assert [path.name for path, _ in orphans(tmp_path, "x-")] == ["x-died"]
    finally:
        os.close(lock)
    assert {path.name for path in tmp_path.iterdir()} == {"x-died", mine.name}


@pytest.mark.parametrize("when", ["before its lock", "while it is locked", "after its lock"])
def test_a_new_directory_that_another_process_takes_for_an_orphan_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    made: list[Path] = []
    held: list[int] = []
    mkdtemp, lock = tempfile.mkdtemp, lock_directory

    def make(**options: object) -> str:
        path = tmp_path.joinpath(mkdtemp(**options).rpartition("/")[2])
        made.append(path)
        if len(made) == 1 and when == "before its lock":
            path.rmdir()
        elif len(made) == 1 and when == "while it is locked":
            held.append(lock(path))
        return str(path)

    def lock_then_lose(path: Path) -> int:
        descriptor = lock(path)
        if len(made) == 1 and when == "after its lock":
            path.rmdir()
        return descriptor

    monkeypatch.setattr(tempfile, "mkdtemp", make)
    monkeypatch.setattr(disk, "lock_directory", lock_then_lose)
    path, descriptor = make_locked_directory(tmp_path, "x-")
    os.close(descriptor)
    assert len(made) == 2
    assert path.name == made[1].name[1:]
    for each in held:
        os.close(each)


def test_the_floor_of_a_small_disk_is_a_part_of_it(tmp_path: Path) -> None:
    size = os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    assert floor_bytes(tmp_path, 1) == 1
    assert floor_bytes(tmp_path, 2 * size) == size // 20
