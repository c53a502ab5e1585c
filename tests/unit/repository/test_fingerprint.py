"""Any change of a model's files shows, in whichever direction its time goes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from edge_server.repository.scan import fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "m"
    (directory / "1").mkdir(parents=True)
    (directory / "config.pbtxt").write_text("a")
    (directory / "1" / "model.onnx").write_text("b")
    return directory


def make_older(model: Path) -> None:
    os.utime(model / "config.pbtxt", ns=(1, 1))


def replace_by_an_equal(model: Path) -> None:
    old = (model / "config.pbtxt").stat()
    (model / "new").write_text("a")
    os.utime(model / "new", ns=(old.st_atime_ns, old.st_mtime_ns))
    (model / "new").replace(model / "config.pbtxt")


def exchange_in_place(model: Path) -> None:
    """Same size, time and inode: what the kernel notes of the inode alone tells."""
    file = model / "config.pbtxt"
    old = file.stat()
    while file.stat().st_ctime_ns == old.st_ctime_ns:
        file.write_text("b")
        os.utime(file, ns=(old.st_atime_ns, old.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        make_older,
        exchange_in_place,
        replace_by_an_equal,
        lambda model: (model / "1" / "model.onnx").unlink(),
        lambda model: (model / "2").mkdir(),
        lambda model: (model / "config.pbtxt").write_text("ab"),
        lambda model: (model / "1").rename(model / "2"),
    ],
)
def test_a_change_shows(model: Path, change: Callable[[Path], object]) -> None:
    before = fingerprint(model)
    assert fingerprint(model) == before
    change(model)
    assert fingerprint(model) != before


def test_what_editors_and_python_leave_behind_does_not(model: Path) -> None:
    before = fingerprint(model)
    (model / ".config.pbtxt.swp").touch()
    (model / "config.pbtxt~").touch()
    (model / "1" / "__pycache__").mkdir()
    assert fingerprint(model) == before


def test_what_cannot_be_read_and_a_link_in_a_circle_are_no_error(
    model: Path, unreadable: Callable[[Path], None]
) -> None:
    unreadable(model / "odd")
    (model / "1" / "back").symlink_to(model)
    assert fingerprint(model) == fingerprint(model)
    assert [size for _, size, *_ in fingerprint(model / "nowhere")] == [-1]
