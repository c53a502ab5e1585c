"""The files of a model, and the errors for files that are missing or cannot be read."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from edge_server.errors import ModelConfigError, ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CONFIG_NAME = "config.pbtxt"
WARMUP_DIRECTORY = "warmup"
INITIAL_STATE_DIRECTORY = "initial_state"
GOLDEN_DIRECTORY = "golden"

# Errors of the file itself. Any other error, like EIO, ESTALE or EMFILE, may pass.
_STAYS = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EACCES,
        errno.EPERM,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.EINVAL,
    }
)


@dataclass(frozen=True)
class ModelFiles:
    """One model directory of a repository.

    Attributes:
        name: the model's name, which is the directory's.
        directory: holds config.pbtxt (optional) and the version directories.
        versions: version number → its directory, in ascending order.
        fingerprint: of an immutable copy; None where the files have to be read.
        holder: keeps such a copy on disk as long as any reference to `holder` exists.
        shown: the directory in the repository, where `directory` is a copy of it.
    """

    name: str
    directory: Path
    versions: Mapping[int, Path]
    fingerprint: frozenset[tuple[str, int, int, int, int]] | None = None
    holder: object = None
    shown: Path | None = None

    @property
    def config_path(self) -> Path:
        return self.directory / CONFIG_NAME

    @property
    def shown_config_path(self) -> Path:
        """The path of config.pbtxt in the repository, for texts."""
        return (self.shown or self.directory) / CONFIG_NAME

    def as_shown(self, text: str) -> str:
        """`text` with the paths of the repository in place of the copy's."""
        if self.shown is None:
            return text
        return text.replace(str(self.directory), str(self.shown))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError inside the block into an error that names path, reason and remedy.

    Raises:
        ModelConfigError: instead of the OSError; ModelLoadError where that may pass.
    """
    try:
        yield
    except OSError as error:
        raise cannot_be_read(error.filename or path, error) from error


def cannot_be_read(path: Path | str, error: OSError) -> ModelConfigError:
    """The error for an unreadable file of a model; a ModelLoadError where the cause may pass."""
    text = f"{path}: cannot be read: {error.strerror or error}"
    # Our own error, for a link without a target, has no errno.
    if error.errno is None or error.errno in _STAYS:
        return ModelConfigError(f"{text}; the user that the daemon runs as must be able to read it")
    return ModelLoadError(f"{text}; the kernel's log may tell what is wrong with the disk")


def require_path(path: Path, model: str) -> None:
    """Raises: ModelConfigError: `path`, which the model needs, is no file or is unreadable."""
    with reading(path):
        if not path.is_file():
            raise ModelConfigError(f"{path}: missing; model '{model}' is loaded from it")
        path.open("rb").close()


def is_file_name(name: str) -> bool:
    """Whether `name` is a relative path that stays below its start, symbolic links aside."""
    path = PurePosixPath(name)
    return (
        bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name
    )


def outside(directory: Path, name: str) -> bool:
    """Whether `name` is absolute, climbs out of `directory`, or is a link that leads out of it.

    Raises:
        ModelConfigError: a link on the way cannot be followed.
    """
    if not is_file_name(name):
        return True
    with reading(directory / name):
        try:
            real = (directory / name).resolve()
            return not real.is_relative_to(directory.resolve())
        except RuntimeError as error:  # a circle of links, as Python before 3.13 reports it
            raise OSError(str(error)) from error
