"""A process's temporary directory is its own, and nothing leaves it behind."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from edge_server.backends.python.scratch import Scratch


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
