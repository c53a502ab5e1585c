"""A process has a directory of its own, and leaves none for ever, however it ends."""

from __future__ import annotations

import os
import resource
import stat
from typing import TYPE_CHECKING

import pytest

from edge_server.repository.content import PrivateDirectory

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def test_only_its_owner_may_look_and_the_end_removes_all(parent: Path) -> None:
    private = PrivateDirectory()
    private.close()
    assert not list(parent.iterdir())
    path = private.path()
    assert path == private.path()
    assert path.parent == parent
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    (path / "x").mkdir()
    private.close()
    private.close()
    assert not list(parent.iterdir())


def test_what_a_process_that_was_killed_has_left_goes_and_nothing_else(parent: Path) -> None:
    mine = f"edge-server-{os.geteuid()}-"
    alive, dead = PrivateDirectory(), parent / f"{mine}dead"
    # Not locked yet, by a process that makes it now.
    new = parent / f".{mine}new"
    others = parent / "edge-server-others"
    link = parent / f"{mine}link"
    link.symlink_to(others)
    for path in (dead, new, others):
        (path / "m").mkdir(parents=True)
    for path in (alive.path(), others):
        os.utime(path, (0, 0))
    private = PrivateDirectory()
    made = private.path()
    assert set(parent.iterdir()) == {alive.path(), made, new, others, link}
    assert (others / "m").exists()
    private.close()
    alive.close()


def test_a_full_disk_is_told_by_what_is_written_and_not_as_a_missing_directory(
    parent: Path,
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        private = PrivateDirectory()
        assert private.path().parent == parent
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    private.close()
