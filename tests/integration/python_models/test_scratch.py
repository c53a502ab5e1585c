"""A process's temporary directory is its own, and nothing leaves it behind."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from support.waiting import wait_until

from edge_server.backends.python.session import Scratch

TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_private_and_goes_with_what_is_in_it(temporary: Path) -> None:
    scratch = Scratch()
    assert Path(scratch.path).stat().st_mode & 0o777 == 0o700
    (Path(scratch.path) / "deep").mkdir()
    (Path(scratch.path) / "deep" / "file").touch()
    scratch.close()
    assert list(temporary.iterdir()) == []


def test_what_a_dead_daemon_left_is_removed_and_what_is_used_is_not(temporary: Path) -> None:
    (temporary / "edge-server-model-dead").mkdir()
    (temporary / "edge-server-model-dead" / "file").touch()
    (temporary / "edge-server-model-link").symlink_to("/usr")
    (temporary / "other").touch()
    used = Scratch()
    other = Scratch()
    assert Path(used.path).is_dir()
    used.close()
    other.close()
    assert {path.name for path in temporary.iterdir()} == {"edge-server-model-link", "other"}


@pytest.mark.parametrize("orphan", [False, True])
def test_directories_that_are_deep_or_that_nobody_may_list_go_too(
    temporary: Path, orphan: bool
) -> None:
    scratch = None if orphan else Scratch()
    path = Path(scratch.path) if scratch else temporary / "edge-server-model-dead"
    (path / "closed" / "within").mkdir(parents=True)
    (path / "closed").chmod(0o300)
    nest(path, 1500)
    (scratch or Scratch()).close()
    # The removal goes on where it takes long.
    wait_until(lambda: not list(temporary.iterdir()), TIMEOUT_S)


def nest(path: Path, depth: int) -> None:
    """Directories within each other; no single path reaches the last."""
    fd = os.open(path, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
