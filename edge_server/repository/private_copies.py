"""Private copies of models for the modes NONE and EXPLICIT, which keep no store."""

from __future__ import annotations

import tempfile
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.errors import ModelConfigError
from edge_server.repository.content import TornModel
from edge_server.repository.scan import files_in
from edge_server.repository.staged_copy import copy_model, remove
from edge_server.repository.tree import look

if TYPE_CHECKING:
    from edge_server.model_config.files import ModelFiles
    from edge_server.repository.content import Content
    from edge_server.repository.fingerprint import Fingerprint
    from edge_server.repository.private_directory import PrivateDirectory
    from edge_server.repository.tree import ModelTree

# Attempts to copy a model whose files change during the copy.
_ATTEMPTS = 3


class PrivateCopies:
    """Copies each model at the time of its load, for repositories that are not watched.

    No repository file stays open or mapped, because truncating a mapped file would kill the
    process, and no file can change after its check against the manifest. Links are followed.
    Thread-safe.

    Args:
        directory: the directory of the copies; each copy exists as long as it is referenced.
    """

    def __init__(self, directory: PrivateDirectory) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._copies = weakref.WeakValueDictionary[Path, _Copy]()

    def copy(self, directory: Path) -> ModelFiles:
        """Return the files of a copy of the model in `directory`; reuse an unchanged copy.

        Raises:
            ModelConfigError: the model cannot be read or copied, differs from its manifest, or
                keeps changing.
        """
        with self._lock:
            copy = self._copies.get(directory)
        if copy is None or copy.tree != _look(directory):
            copy = self._made(directory)
            with self._lock:
                self._copies[directory] = copy
        files = files_in(copy.directory)
        return replace(files, fingerprint=copy.fingerprint, holder=copy, shown=directory)

    def _made(self, directory: Path) -> _Copy:
        for attempt in range(_ATTEMPTS):
            try:
                return self._copied(_look(directory))
            except TornModel:
                if attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    def _copied(self, tree: ModelTree) -> _Copy:
        try:
            place = Path(tempfile.mkdtemp(dir=self._directory.path()))
            try:
                content = copy_model(tree, place / tree.name)
            except BaseException:
                remove(place)
                raise
        except OSError as error:
            raise ModelConfigError(
                f"{tree.directory}: cannot be copied: {error.filename or 'the copy'}: "
                f"{error.strerror or error}; make room there, or name another directory in TMPDIR"
            ) from error
        return _Copy(tree, place, content)


class _Copy:
    """A copy of a model's directory, removed when this object is no longer referenced.

    Attributes:
        tree: the tree that was copied.
        directory: the model's directory in the copy.
        fingerprint: the fingerprint by content.
    """

    def __init__(self, tree: ModelTree, place: Path, content: Content) -> None:
        self.tree = tree
        self.directory = place / tree.name
        self.fingerprint = _fingerprint(tree, content)
        weakref.finalize(self, remove, place)


def _look(directory: Path) -> ModelTree:
    try:
        return look(directory.parent, directory.name, follow_links=True)
    except OSError as error:
        raise ModelConfigError(
            f"{directory.parent}: the model repository cannot be read: {error.strerror}"
        ) from error


def _fingerprint(tree: ModelTree, content: Content) -> Fingerprint:
    """Return the fingerprint by content, equal for two copies with equal files."""
    files = {
        (path, file.size, 0, int(file.sha256[:16], 16), 0) for path, file in content.files.items()
    }
    return frozenset(files | {(path, 0, 0, 0, 0) for path in tree.directories})
