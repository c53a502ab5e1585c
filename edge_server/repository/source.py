"""Where a loader finds models' files: on disk as they are now, or as they were accepted."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from edge_server.repository.scan import files_in, find_model, model_names, scan_repositories

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from edge_server.errors import ModelConfigError
    from edge_server.model_config.files import ModelFiles
    from edge_server.repository.scan import ReadModel
    from edge_server.repository.store import StagedModel

    Found = ModelFiles | ModelConfigError


class ModelSource(Protocol):
    """Finds models' files, or says why they cannot be used."""

    def all(self) -> Mapping[str, Found]:
        """Every model, sorted by name.

        Raises:
            ModelConfigError: a repository itself cannot be read.
        """
        ...

    def find(self, name: str) -> Found | None:
        """One model; None where there is none of that name."""
        ...

    def names(self) -> Mapping[str, int]:
        """Model name → in how many places it is.

        Raises:
            ModelConfigError: a repository itself cannot be read.
        """
        ...

    @property
    def where(self) -> str:
        """For texts that say where a model is not."""
        ...


class Repositories:
    """Model repositories in Triton's layout, as they are at the moment of each call.

    Args:
        read: gives the files of the model in a directory; None is those in the directory itself,
            for repositories that nobody else writes to.
    """

    def __init__(self, paths: Sequence[Path], read: ReadModel | None = None) -> None:
        self._paths = tuple(paths)
        self._read = read

    def all(self) -> Mapping[str, Found]:
        return scan_repositories(self._paths, self._read)

    def find(self, name: str) -> Found | None:
        return find_model(self._paths, name, self._read)

    def names(self) -> Mapping[str, int]:
        return model_names(self._paths)

    @property
    def where(self) -> str:
        return ", ".join(map(str, self._paths))


class AcceptedModels:
    """Private copies of models, held from when they were believed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: dict[str, StagedModel] = {}
        self._shown: dict[str, Path] = {}

    def show(self, name: str, directory: Path) -> None:
        """Call the model's files by this directory in texts."""
        with self._lock:
            self._shown[name] = directory

    def put(self, name: str, staged: StagedModel | None) -> StagedModel | None:
        """Let `staged` be the model from now on; None takes it out.

        Returns:
            What it was before.
        """
        with self._lock:
            before = self._models.pop(name, None)
            if staged is not None:
                self._models[name] = staged
            return before

    def all(self) -> Mapping[str, Found]:
        with self._lock:
            models = dict(sorted(self._models.items()))
            shown = dict(self._shown)
        return {name: _files(staged, shown.get(name)) for name, staged in models.items()}

    def find(self, name: str) -> Found | None:
        with self._lock:
            staged, shown = self._models.get(name), self._shown.get(name)
        return None if staged is None else _files(staged, shown)

    def names(self) -> Mapping[str, int]:
        with self._lock:
            return dict.fromkeys(sorted(self._models), 1)

    @property
    def where(self) -> str:
        return "what was accepted of the model repositories"


def _files(staged: StagedModel, shown: Path | None) -> ModelFiles:
    found = files_in(staged.directory)
    return replace(found, fingerprint=staged.fingerprint, holder=staged, shown=shown)
