"""The directories of a model store: finished copies by key, and unfinished copies."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import weakref
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.errors import ModelConfigError, ModelLoadError
from edge_server.process.disk import sync
from edge_server.repository.content import TornModel, content_of, remove
from edge_server.repository.tree import look

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edge_server.repository.store_state import KeptCopy
    from edge_server.repository.tree import Fingerprint, SeenFile

log = logging.getLogger(__name__)

_KEY = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True)
class StagedModel:
    """A copy in the store; its files stay unchanged as long as this object is referenced.

    Attributes:
        name: the model.
        digest: the SHA-256 of the content, in hex, without name, manifest and signature.
        directory: the model's directory in the store, named after the model; read-only.
        source: the files in the repository at the time of the copy.
    """

    name: str
    digest: str
    directory: Path
    source: tuple[SeenFile, ...]

    @property
    def key(self) -> str:
        """The name of the copy's directory in the store."""
        return self.directory.parent.name

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint by content, equal for two copies with equal files.

        Raises:
            ModelConfigError: the copy cannot be read now.
        """
        try:
            tree = look(self.directory.parent, self.name)
        except OSError as error:
            raise ModelLoadError(f"{self.directory}: {error.strerror or error}") from error
        if tree.fault:
            raise ModelLoadError(tree.fault)
        return content_of(tree).fingerprint


class Copies:
    """Keeps complete copies as `copies/<key>/<model>` below `directory`, never a partial copy.

    Unfinished copies are in `incoming` and are removed at the next start. The caller locks all
    methods but `is_whole`.
    """

    def __init__(self, directory: Path) -> None:
        """Open the directories below `directory`, and create them if missing.

        Raises:
            OSError: a directory cannot be created or read.
        """
        self._lent = weakref.WeakValueDictionary[int, StagedModel]()
        self._finished = directory / "copies"
        self._incoming = directory / "incoming"
        for folder in (self._finished, self._incoming):
            folder.mkdir(mode=0o700, exist_ok=True)
        for left in self._incoming.iterdir():
            remove(left)
        # Keyed by the name in either directory.
        finished = (entry for entry in self._finished.iterdir() if _KEY.match(entry.name))
        self._sizes = {entry.name: _size_bytes(entry) for entry in finished}

    @property
    def keys(self) -> set[str]:
        return {name for name in self._sizes if _KEY.match(name)}

    @property
    def size_bytes(self) -> int:
        """The size of all copies in bytes, unfinished copies included."""
        return sum(self._sizes.values())

    def lend(self, name: str, kept: KeptCopy) -> StagedModel:
        """Return the copy of model `name`, which stays as long as the result is referenced."""
        directory = self._finished / kept.key / name
        staged = StagedModel(name, kept.digest, directory, kept.source)
        self._lent[id(staged)] = staged
        return staged

    def oldest(self, spare: Iterable[str], size_bytes: int) -> set[str] | None:
        """Return the first copies of `spare` that are not in use and together have `size_bytes`;
        None if all of them have less."""
        found: set[str] = set()
        in_use = self._in_use()
        for key in spare:
            if size_bytes > 0 and key not in in_use | found:
                found.add(key)
                size_bytes -= self._sizes[key]
        return None if size_bytes > 0 else found

    def is_whole(self, kept: KeptCopy, name: str) -> bool | None:
        """Return whether the copy is unchanged, byte by byte.

        None means that the copy cannot be read now, for example because the disk fails or too many
        files are open; the copy may be intact.
        """
        try:
            tree = look(self._finished / kept.key, name)
            if tree.fault:
                return None if tree.directory.is_dir() else False
            content = content_of(tree)
        except (FileNotFoundError, TornModel):
            return False
        except (OSError, ModelConfigError):
            return None
        return (content.key(name), content.digest) == (kept.key, kept.digest)

    def begin(self, size_bytes: int) -> Path:
        """Create a directory for a new copy of `size_bytes`."""
        place = Path(tempfile.mkdtemp(dir=self._incoming))
        self._sizes[place.name] = size_bytes
        return place

    def give_up(self, place: Path) -> None:
        """Remove `place` and its contents, if any."""
        del self._sizes[place.name]
        remove(place)

    def finish(self, place: Path, key: str) -> None:
        """Make the contents of `place` the copy of `key`, durably.

        An existing copy of the same key is kept, because its content is the same.

        Raises:
            OSError: the copy cannot be moved or synced.
        """
        if key in self._sizes:
            return
        sync(place)
        place.rename(self._finished / key)
        self._sizes[key] = self._sizes[place.name]
        try:
            sync(self._finished)
        except OSError:
            self.drop(key)
            raise

    def keep_only(self, keys: set[str]) -> None:
        """Remove the copies that are neither those of `keys` nor in use, as far as the file system
        allows."""
        for key in self.keys - keys - self._in_use():
            try:
                self.drop(key)
            except OSError as error:
                log.warning("model store: copy %s cannot be removed: %s", key, error)

    def drop(self, key: str) -> None:
        """Remove a copy.

        Raises:
            OSError: the copy cannot be removed and stays.
        """
        aside = self._incoming / key
        remove(aside)
        # Renamed first, so that `copies` never holds a partial copy.
        with suppress(FileNotFoundError):
            (self._finished / key).rename(aside)
        del self._sizes[key]
        remove(aside)

    def _in_use(self) -> set[str]:
        return {staged.key for staged in self._lent.values()}


def _size_bytes(directory: Path) -> int:
    """Return the size of the files below `directory`, as far as they can be read."""
    size_bytes = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                size_bytes += Path(folder, name).lstat().st_size
    return size_bytes
