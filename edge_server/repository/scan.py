"""What is on disk: one or more repositories in Triton's layout, read without side effects."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from edge_server.errors import ModelConfigError
from edge_server.model_config.files import ModelFiles, reading

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

log = logging.getLogger(__name__)

# Names that can never walk out of a directory, a log line or a topic.
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
_VERSION = re.compile(r"[1-9][0-9]{0,17}\Z")


def scan_repositories(paths: Iterable[Path]) -> dict[str, ModelFiles | ModelConfigError]:
    """Model name → its files, or why they cannot be used; over all repositories, sorted by name.

    Plain files beside the models are not models, nor is a directory whose name cannot be one.

    Raises:
        ModelConfigError: a repository itself cannot be read.
    """
    directories: dict[str, list[Path]] = {}
    for path in paths:
        for directory in _model_directories(path):
            directories.setdefault(directory.name, []).append(directory)
    return {name: _files(name, found) for name, found in sorted(directories.items())}


def _model_directories(repository: Path) -> Iterator[Path]:
    try:
        entries = sorted(repository.iterdir())
    except OSError as error:
        raise ModelConfigError(
            f"{repository}: the model repository cannot be read: {error.strerror}"
        ) from error
    for entry in entries:
        if not _may_be_directory(entry):
            continue
        # What file systems, editors and Python leave behind.
        if entry.name.startswith((".", "_")) or entry.name == "lost+found":
            log.debug("repository %s: %r is no model", repository, entry.name)
        elif not _MODEL_NAME.match(entry.name):
            log.warning(
                "repository %s: directory %r is left out: a model name has at most 64 letters, "
                "digits, '_', '.' and '-' and starts with a letter or digit; rename it",
                repository,
                entry.name,
            )
        else:
            yield entry


def _may_be_directory(entry: Path) -> bool:
    """False for what surely is none; where it cannot be told, reading it will say why."""
    try:
        return entry.is_dir()
    except OSError:
        return True


def _files(name: str, directories: list[Path]) -> ModelFiles | ModelConfigError:
    if len(directories) > 1:
        found = ", ".join(map(str, directories))
        log.error("model %s: not unique across all model repositories: %s", name, found)
        return ModelConfigError(
            f"model appears in two or more repositories: {found}; rename or remove all but one"
        )
    try:
        return ModelFiles(name, directories[0], _versions(directories[0]))
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
        elif entry.name not in {"configs", "warmup", "initial_state"}:
            log.warning(
                "model %s: ignore version directory %r which fails to convert to integral number",
                model.name,
                entry.name,
            )
    return dict(sorted(versions.items()))
