"""Model sources for the loader, and the repositories on disk as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from edge_server.repository.scan import find_model, model_names, scan_repositories

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from edge_server.errors import ModelConfigError
    from edge_server.model_config.files import ModelFiles
    from edge_server.repository.scan import ReadModel

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
