"""The verbs of models as a user runs them, and models to push."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.verb import run_verb

from edge_server.cli.model_push import pack
from edge_server.cli.models import faults_of
from edge_server.repository.content import take_inventory
from edge_server.repository.transfer import receive

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path


TIMEOUT_S = 60.0
CONFIG = (
    'backend: "identity" input { name: "a" data_type: TYPE_FP32 dims: -1 } '
    'output { name: "b" data_type: TYPE_FP32 dims: -1 }'
)


def models(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_verb("models", *arguments)


def done(*arguments: str | Path) -> str:
    """What the command prints when all is well."""
    process = models(*arguments)
    assert process.returncode == 0, process.stderr
    return process.stdout


def make_model(folder: Path, text: str) -> Path:
    directory = folder / "m"
    (directory / "1").mkdir(parents=True, exist_ok=True)
    (directory / "config.pbtxt").write_text(CONFIG)
    (directory / "1" / "weights").write_text(text)
    return directory


def push(model: Path, repository: Path) -> None:
    receive(repository, pack(model).entries())


def is_whole(repository: Path, name: str) -> bool:
    return faults_of(take_inventory(repository, name)) == []
