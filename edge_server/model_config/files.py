"""Where a model's files are, and what to say when one of them is missing or cannot be read."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_server.errors import ModelConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

CONFIG_NAME = "config.pbtxt"


@dataclass(frozen=True)
class ModelFiles:
    """One model directory of a repository.

    Attributes:
        name: the model's name, which is the directory's.
        directory: holds config.pbtxt (optional) and the version directories.
        versions: version number → its directory, in ascending order.
    """

    name: str
    directory: Path
    versions: Mapping[int, Path]

    @property
    def config_path(self) -> Path:
        return self.directory / CONFIG_NAME


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What the file system refuses inside becomes an error that names path, reason and remedy.

    Raises:
        ModelConfigError: instead of the OSError.
    """
    try:
        yield
    except OSError as error:
        raise ModelConfigError(
            f"{error.filename or path}: cannot be read: {error.strerror or error}; the user that "
            "the daemon runs as must be able to read it"
        ) from error


def require_path(path: Path, model: str) -> None:
    """Raises: ModelConfigError: `path`, which the model needs, is no file or cannot be read."""
    with reading(path):
        if not path.is_file():
            raise ModelConfigError(f"{path}: missing; model '{model}' is loaded from it")
        path.open("rb").close()
