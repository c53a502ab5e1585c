"""The files of a model: versions, labels, and the errors for files that cannot be read."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from edge_server.errors import ModelConfigError, ModelLoadError
from edge_server.process.disk import stays

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

log = logging.getLogger(__name__)

CONFIG_NAME = "config.pbtxt"
CONFIGS_DIRECTORY = "configs"
WARMUP_DIRECTORY = "warmup"
INITIAL_STATE_DIRECTORY = "initial_state"
GOLDEN_DIRECTORY = "golden"

# The largest published label sets have some twenty thousand lines of a few words.
MAX_LABEL_FILE_BYTES = 16 * 1024 * 1024
# How many missing versions the log names.
_MOST_NAMED = 8


@dataclass(frozen=True)
class ModelFiles:
    """One model directory of a repository, with its version directories in ascending order.

    Attributes:
        fingerprint: of an immutable copy; None where the files have to be read.
        holder: keeps such a copy on disk as long as any reference to `holder` exists.
        shown: the directory in the repository, where `directory` is a copy of it.
        config_name: the configuration's path in `directory`."""

    name: str
    directory: Path
    versions: Mapping[int, Path]
    fingerprint: frozenset[tuple[str, int, int, int, int]] | None = None
    holder: object = None
    shown: Path | None = None
    config_name: str = CONFIG_NAME

    @property
    def config_path(self) -> Path:
        return self.directory / self.config_name

    @property
    def shown_config_path(self) -> Path:
        return (self.shown or self.directory) / self.config_name

    def with_custom_config(self, name: str) -> ModelFiles:
        """Return these files with `configs/<name>.pbtxt` as configuration, where it exists."""
        path = f"{CONFIGS_DIRECTORY}/{name}.pbtxt"
        if not name:
            return self
        with reading(self.directory / path):
            exists = (self.directory / path).exists()
        return replace(self, config_name=path) if exists else self

    def as_shown(self, text: str) -> str:
        """`text` with the paths of the repository in place of the copy's, links followed or not."""
        if self.shown is None:
            return text
        real = os.path.realpath(self.directory)
        for copy in sorted({real, str(self.directory)}, key=len, reverse=True):
            text = text.replace(copy, str(self.shown))
        return text


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError inside the block into a ModelConfigError that names path, reason and remedy;
    into a ModelLoadError where that may pass."""
    try:
        yield
    except OSError as error:
        raise cannot_be_read(error.filename or path, error) from error


def cannot_be_read(path: Path | str, error: OSError) -> ModelConfigError:
    """The error for an unreadable file of a model; a ModelLoadError where the cause may pass."""
    text = f"{path}: cannot be read: {error.strerror or error}"
    if stays(error):
        return ModelConfigError(f"{text}; the user that the daemon runs as must be able to read it")
    return ModelLoadError(f"{text}; the kernel's log may name the fault of the disk")


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
    """Whether `name` is absolute, climbs out of `directory`, or is a link that leads out of it."""
    if not is_file_name(name):
        return True
    with reading(directory / name):
        try:
            real = (directory / name).resolve()
            return not real.is_relative_to(directory.resolve())
        except RuntimeError as error:  # a circle of links, as Python before 3.13 reports it
            raise OSError(str(error)) from error


def read_labels(message: Any, files: ModelFiles) -> Mapping[str, tuple[str, ...]]:
    """Read output → labels by index, for each output with a `label_filename`. Raises
    ModelConfigError where a file is outside the model's directory, unreadable, too large or not
    UTF-8 text."""
    return {
        output.name: _labels(output, message.name, files)
        for output in message.output
        if output.label_filename
    }


def _labels(output: Any, model: str, files: ModelFiles) -> tuple[str, ...]:
    name = output.label_filename
    if outside(files.directory, name):
        raise ModelConfigError(
            f"{files.config_path}: label file path '{name}' for output '{output.name}' in model "
            f"'{model}' is outside model directory"
        )
    path = files.directory / name
    with reading(path):
        if not path.is_file():
            raise ModelConfigError(
                f"{path}: missing; output '{output.name}' of model '{model}' has its labels there"
            )
        with path.open("rb") as file:
            raw = file.read(MAX_LABEL_FILE_BYTES + 1)
    if len(raw) > MAX_LABEL_FILE_BYTES:
        raise ModelConfigError(
            f"{path}: a label file has at most {MAX_LABEL_FILE_BYTES} bytes; this one is larger"
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ModelConfigError(
            f"{path}: not UTF-8 text at byte {error.start}; a label file has a label a line"
        ) from error
    return tuple(line.removesuffix("\r") for line in text.removesuffix("\n").split("\n"))


def select_versions(message: Any, files: ModelFiles) -> tuple[int, ...]:
    """Return the versions that a completed configuration's policy selects, ascending."""
    available = sorted(files.versions)
    policy = message.version_policy
    choice = policy.WhichOneof("policy_choice")
    if choice == "specific":
        wanted = sorted(set(policy.specific.versions))
        selected = [version for version in wanted if version in files.versions]
        if missing := sorted(set(wanted) - set(selected)):
            log.error(
                "model %s: version %s is specified but not on disk%s",
                files.name,
                ", ".join(map(str, missing[:_MOST_NAMED])),
                f", nor are {len(missing) - _MOST_NAMED} others"
                if len(missing) > _MOST_NAMED
                else "",
            )
    elif choice == "all":
        selected = available
    else:
        selected = available[-max(policy.latest.num_versions, 1) :]
    if not selected:
        raise ModelConfigError(
            f"{files.directory}: at least one version must be available under the version policy "
            f"of model '{files.name}'; make a directory '1' with the model's file in it (a version "
            "is a whole number, like 1, not 1.0 or 01)"
        )
    return tuple(selected)
