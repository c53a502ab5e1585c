"""Models to deliver."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from edge_server.cli.model_push import pack, sent_entries
from edge_server.repository.content import take_inventory
from edge_server.repository.transfer import read_archive, receive, write_archive

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from edge_server.repository.transfer import Delivery, Entry

CONFIG = (
    'backend: "identity" input { name: "a" data_type: TYPE_FP32 dims: -1 } '
    'output { name: "b" data_type: TYPE_FP32 dims: -1 }'
)


class Archived:
    """A repository that is reached by archives, as over ssh, but in this process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self, name: str, progress: Callable[[int], None] | None = None) -> Generator[Entry]:
        stream = io.BytesIO()
        write_archive(stream, sent_entries(name, self.path))
        return read_archive(io.BytesIO(stream.getvalue()), progress)


def push(
    model: Path,
    target: Path | Archived,
    *,
    progress: Callable[[int], None] | None = None,
    **how: Any,
) -> Delivery:
    """What `models push` does, without waiting for a daemon."""
    path = target if isinstance(target, Path) else target.path
    package = pack(model, there=lambda name: take_inventory(path, name), **how)
    entries = package.entries(progress)
    if isinstance(target, Archived):
        stream = io.BytesIO()
        write_archive(stream, entries)
        entries = read_archive(io.BytesIO(stream.getvalue()))
    return replace(receive(path, entries), note=package.note)


class MakeModel(Protocol):
    def __call__(self, name: str = "m", **files: str) -> Path: ...


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """Writes a model of the identity backend, version 1 with a file, somewhere of its own."""

    def make(name: str = "m", **files: str) -> Path:
        directory = tmp_path / "made" / name
        (directory / "1").mkdir(parents=True, exist_ok=True)
        (directory / "config.pbtxt").write_text(CONFIG)
        (directory / "1" / "weights").write_text("1")
        for path, text in files.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_text(text)
        return directory

    return make
