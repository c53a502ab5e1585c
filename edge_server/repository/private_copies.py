"""Private copies of models for the modes NONE and EXPLICIT, which keep no store."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.errors import ModelConfigError, ModelLoadError
from edge_server.process.disk import make_locked_directory, orphans, stays
from edge_server.repository.content import TornModel, copy_model, remove
from edge_server.repository.scan import files_in
from edge_server.repository.tree import look

if TYPE_CHECKING:
    from edge_server.model_config.files import ModelFiles
    from edge_server.repository.tree import ModelTree

# Attempts to copy a model whose files change during the copy.
_ATTEMPTS = 3
_USUAL = Path("/var/tmp")  # noqa: S108 - only for a directory that `mkdtemp` makes there


class PrivateDirectory:
    """A directory that no other process changes, locked, in `TMPDIR` or else in /var/tmp.

    The directory is created at first use and removed at close. /tmp is in memory on many systems,
    and too small for models. The next process removes the directory of a killed one. Because the
    directory is locked, systemd-tmpfiles does not remove it.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._root: Path | None = None
        self._lock = -1

    def path(self) -> Path:
        """Return the directory, created at the first call.

        Raises:
            OSError: the directory cannot be created.
        """
        with self._mutex:
            if self._root is None:
                parent, prefix = _parent(), f"edge-server-{os.geteuid()}-"
                for orphan, _ in orphans(parent, prefix):
                    shutil.rmtree(orphan, ignore_errors=True)
                self._root, self._lock = make_locked_directory(parent, prefix)
            return self._root

    def close(self) -> None:
        """Remove the directory with all its contents, even files in use."""
        with self._mutex:
            root, self._root = self._root, None
            if root is not None:
                shutil.rmtree(root, ignore_errors=True)
                os.close(self._lock)


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
        for _ in range(_ATTEMPTS - 1):
            with suppress(TornModel):
                return _Copy(_look(directory), self._directory)
        return _Copy(_look(directory), self._directory)


class _Copy:
    """A copy of a model's directory, removed when this object is no longer referenced.

    Attributes:
        tree: the tree that was copied.
        directory: the model's directory in the copy.
        fingerprint: the fingerprint by content.

    Raises:
        TornModel: the model changed during the copy.
        ModelConfigError: the model cannot be read or copied, or differs from its manifest;
            ModelLoadError if a retry may succeed.
    """

    def __init__(self, tree: ModelTree, private: PrivateDirectory) -> None:
        self.tree = tree
        try:
            place = Path(tempfile.mkdtemp(dir=private.path()))
            removal = weakref.finalize(self, remove, place)
            self.directory = place / tree.name
            try:
                self.fingerprint = copy_model(tree, self.directory).fingerprint
            except BaseException:
                removal()  # now, as the exception references this object
                raise
        except OSError as error:
            kind = ModelConfigError if stays(error) else ModelLoadError
            raise kind(
                f"{tree.directory}: cannot be copied: {error.filename or 'the copy'}: "
                f"{error.strerror or error}; make room there, or name another directory in TMPDIR"
            ) from error


def _look(directory: Path) -> ModelTree:
    try:
        return look(directory.parent, directory.name, follow_links=True)
    except OSError as error:
        kind = ModelConfigError if stays(error) else ModelLoadError
        raise kind(
            f"{directory.parent}: the model repository cannot be read: {error.strerror}"
        ) from error


def _parent() -> Path:
    given = os.environ.get("TMPDIR", "")
    # Not tried out, as `gettempdir` does: on a full disk it finds no directory at all, and hides
    # why.
    if given and Path(given).is_dir():
        return Path(given)
    if not given and os.access(_USUAL, os.W_OK | os.X_OK):
        return _USUAL
    return Path(tempfile.gettempdir())
