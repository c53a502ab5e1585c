"""Reads model repositories in Triton's layout, without side effects."""

from __future__ import annotations

import logging
import re
from collections import Counter
from typing import TYPE_CHECKING

from edge_server.errors import ModelConfigError, ModelLoadError
from edge_server.model_config.files import ModelFiles, reading
from edge_server.process.threads import run_parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    ReadModel = Callable[[Path], ModelFiles]

log = logging.getLogger(__name__)

# These names are safe in a path, a log line and a topic.
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
NAME_RULE = (
    "a model name has at most 64 letters, digits, '_', '.' and '-' and starts with a letter or "
    "digit"
)
APPEARS_TWICE = "model appears in two or more repositories"
# Copying and hashing models uses both processors and disks.
_READERS = 4
_VERSION = re.compile(r"[1-9][0-9]{0,17}\Z")


class Repositories:
    """Model repositories in Triton's layout, read anew at each call.

    Args:
        paths: the directories of the repositories.
        read: returns the files of the model in a directory, for example of a copy; None reads the
            directory itself, for repositories without other writers.
    """

    def __init__(self, paths: Sequence[Path], read: ReadModel | None = None) -> None:
        self._paths = tuple(paths)
        self._read = read

    def all(self) -> Mapping[str, ModelFiles | ModelConfigError]:
        return scan_repositories(self._paths, self._read)

    def find(self, name: str) -> ModelFiles | ModelConfigError | None:
        return find_model(self._paths, name, self._read)

    def names(self) -> Mapping[str, int]:
        return model_names(self._paths)

    @property
    def where(self) -> str:
        return ", ".join(map(str, self._paths))


def scan_repositories(
    paths: Iterable[Path], read: ReadModel | None = None
) -> dict[str, ModelFiles | ModelConfigError]:
    """Return model name → its files or the error, over all repositories, sorted by name.

    Plain files beside the models, and directories without a valid model name, are left out.

    Args:
        paths: the directories of the repositories.
        read: returns the files of the model in a directory; called from several threads; default:
            `files_in`.

    Raises:
        ModelConfigError: a repository itself cannot be read.
    """
    directories: dict[str, list[Path]] = {}
    for path in paths:
        for directory in _directories(path):
            # Leftovers of file systems, editors and Python.
            if directory.name.startswith((".", "_")) or directory.name == "lost+found":
                log.debug("repository %s: %r is no model", path, directory.name)
            elif not is_model_name(directory.name):
                log.warning(
                    "repository %s: directory %r is left out: %s; rename it",
                    path,
                    directory.name,
                    NAME_RULE,
                )
            else:
                directories.setdefault(directory.name, []).append(directory)
    found = run_parallel("read", _READERS, lambda m: _files(*m, read), directories.items())
    return dict(sorted(zip(directories, found, strict=True)))


def model_names(paths: Iterable[Path]) -> dict[str, int]:
    """Return model name → number of repositories that hold the model.

    Raises:
        ModelConfigError: a repository itself cannot be read.
    """
    directories = (directory for path in paths for directory in _directories(path))
    return Counter(d.name for d in directories if is_model_name(d.name))


def find_model(
    paths: Iterable[Path], name: str, read: ReadModel | None = None
) -> ModelFiles | ModelConfigError | None:
    """Return one model's files or the error; None if no repository holds the model.

    An invalid model name never reaches the file system.
    """
    if not is_model_name(name):
        return None
    found = [path / name for path in paths if _may_be_directory(path / name)]
    return _files(name, found, read) if found else None


def files_in(directory: Path) -> ModelFiles:
    """Return the files of the model in `directory`, which is named after the model.

    Raises:
        ModelConfigError: the directory cannot be read.
    """
    return ModelFiles(directory.name, directory, _versions(directory))


def is_model_name(name: str) -> bool:
    return _MODEL_NAME.match(name) is not None


def _directories(repository: Path) -> Iterator[Path]:
    try:
        entries = sorted(repository.iterdir())
    except OSError as error:
        # May pass: the repository may be mounted later.
        raise ModelLoadError(
            f"{repository}: the model repository cannot be read: {error.strerror}"
        ) from error
    return (entry for entry in entries if _may_be_directory(entry))


def _may_be_directory(entry: Path) -> bool:
    """Return False only if `entry` is surely no directory; otherwise the read reports the error."""
    try:
        return entry.is_dir()
    except OSError:
        return True


def _files(
    name: str, directories: list[Path], read: ReadModel | None
) -> ModelFiles | ModelConfigError:
    if len(directories) > 1:
        found = ", ".join(map(str, directories))
        log.error("model %s: not unique across all model repositories: %s", name, found)
        return ModelConfigError(f"{APPEARS_TWICE}: {found}; rename or remove all but one")
    try:
        return (read or files_in)(directories[0])
    except ModelConfigError as error:
        return error


def _versions(model: Path) -> dict[int, Path]:
    versions: dict[int, Path] = {}
    with reading(model):
        directories = [entry for entry in model.iterdir() if entry.is_dir()]
    for entry in directories:
        if entry.name.startswith("."):
            continue
        if _VERSION.match(entry.name):
            versions[int(entry.name)] = entry
        elif entry.name.isdecimal():
            log.warning(
                "model %s: ignore version directory '%s' which contains leading zeros in its "
                "directory name",
                model.name,
                entry.name,
            )
        elif entry.name not in {"configs", "warmup", "initial_state", "golden"}:
            log.warning(
                "model %s: ignore version directory %r which fails to convert to integral number",
                model.name,
                entry.name,
            )
    return dict(sorted(versions.items()))
