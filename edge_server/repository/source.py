"""Model sources for the loader: the repositories on disk, or the accepted copies."""

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
    """Finds the files of models, or the error why they are unusable."""

    def all(self) -> Mapping[str, Found]:
        """Return every model, sorted by name.

        Raises:
            ModelConfigError: a repository itself cannot be read.
        """
        ...

    def find(self, name: str) -> Found | None:
        """Return one model; None if there is no model of that name."""
        ...

    def names(self) -> Mapping[str, int]:
        """Return model name → number of places that hold the model.

        Raises:
            ModelConfigError: a repository itself cannot be read.
        """
        ...

    @property
    def where(self) -> str:
        """The place of the models, for error texts."""
        ...


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
    """The accepted private copies of models, held until they are replaced. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: dict[str, StagedModel] = {}
        self._shown: dict[str, Path] = {}

    def show(self, name: str, directory: Path) -> None:
        """Name this directory, not the copy's, in texts about the model's files."""
        with self._lock:
            self._shown[name] = directory

    def put(self, name: str, staged: StagedModel | None) -> StagedModel | None:
        """Make `staged` the accepted copy of `name`; None removes the model.

        Returns:
            The copy accepted before.
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
