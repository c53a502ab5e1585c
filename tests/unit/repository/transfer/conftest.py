"""Models to deliver, and an ssh that goes nowhere."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

import pytest

from edge_server.repository.transfer.remote import RemoteRepository

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = (
    'backend: "identity" input { name: "a" data_type: TYPE_FP32 dims: -1 } '
    'output { name: "b" data_type: TYPE_FP32 dims: -1 }'
)
# Takes what ssh takes, and runs the command as the login shell of a host would, here: a simulation,
# which shows the far side but no connection.
_SSH = """\
#!/bin/sh
while [ "$1" != -- ]; do shift; done
shift 2
%s
PATH="/usr/bin:$PATH" exec sh -c "$*"
"""


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


class SimulatedSsh(Protocol):
    def __call__(self, first: str = "") -> RemoteRepository: ...


@pytest.fixture
def over_ssh(tmp_path: Path, repository: Path) -> SimulatedSsh:
    """`repository` as if it were elsewhere; `first` is shell text to run before the command."""

    def reach(first: str = "") -> RemoteRepository:
        command = tmp_path / "ssh"
        command.write_text(_SSH % first)
        command.chmod(0o755)
        return RemoteRepository("host", os.fspath(repository), [os.fspath(command), "-q"])

    return reach
