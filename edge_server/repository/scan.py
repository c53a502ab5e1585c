"""What is on disk: one or more repositories in Triton's layout, read without side effects."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from edge_server.errors import ModelConfigError
from edge_server.model_config.files import ModelFiles

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

log = logging.getLogger(__name__)

# Names that can never walk out of a directory, a log line or a topic.
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
_VERSION = re.compile(r"[1-9][0-9]{0,17}\Z")


def scan_repositories(paths: Iterable[Path]) -> dict[str, ModelFiles]:
    """Model name → its files, over all repositories, sorted by name.

    Hidden entries and plain files beside the models are not models.

    Raises:
        ModelConfigError: a repository cannot be read, a model name is unusable, or a model
            appears in two repositories.
    """
    models: dict[str, ModelFiles] = {}
    for path in paths:
        for files in _scan(path):
            if files.name in models:
                raise ModelConfigError(
                    f"{files.directory}: model appears in two or more repositories, also in "
                    f"{models[files.name].directory}; rename or remove one"
                )
            models[files.name] = files
    return dict(sorted(models.items()))


def _scan(repository: Path) -> list[ModelFiles]:
    try:
        entries = sorted(repository.iterdir())
    except OSError as error:
        raise ModelConfigError(
            f"{repository}: the model repository cannot be read: {error.strerror}"
        ) from error
    directories = [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    for directory in directories:
        if not _MODEL_NAME.match(directory.name):
            raise ModelConfigError(
                f"{directory}: a model name has at most 64 letters, digits, '_', '.' and '-' and "
                "starts with a letter or digit; rename the directory"
            )
    return [ModelFiles(d.name, d, _versions(d)) for d in directories]


def _versions(model: Path) -> dict[int, Path]:
    versions: dict[int, Path] = {}
    for entry in model.iterdir():
        if not entry.is_dir() or entry.name.startswith("."):
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
                "model %s: ignore version directory '%s' which fails to convert to integral number",
                model.name,
                entry.name,
            )
    return dict(sorted(versions.items()))
