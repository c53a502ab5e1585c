"""The directories of a model store: finished copies by key, and unfinished copies."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.errors import ModelConfigError
from edge_server.process.disk import sync
from edge_server.repository.content import TornModel, content_of, remove
from edge_server.repository.tree import look

if TYPE_CHECKING:
    from edge_server.repository.store_state import KeptCopy

log = logging.getLogger(__name__)

_KEY = re.compile(r"[0-9a-f]{64}\Z")


class Copies:
    """Keeps complete copies as `copies/<key>/<model>` below `directory`, never a partial copy.

    Unfinished copies are in `incoming` and are removed at the next start. The caller locks all
    methods but `path` and `is_whole`.
    """

    def __init__(self, directory: Path) -> None:
        """Open the directories below `directory`, and create them if missing.

        Raises:
            OSError: a directory cannot be created or read.
        """
        self._finished = directory / "copies"
        self._incoming = directory / "incoming"
        for folder in (self._finished, self._incoming):
            folder.mkdir(mode=0o700, exist_ok=True)
        for left in self._incoming.iterdir():
            remove(left)
        # Keyed by the name in either directory.
        names = (entry.name for entry in self._finished.iterdir())
        self._sizes = {name: 0 for name in names if _KEY.match(name)}

    @property
    def keys(self) -> set[str]:
        return {name for name in self._sizes if _KEY.match(name)}

    @property
    def size_bytes(self) -> int:
        """The size of all copies in bytes, unfinished copies included."""
        return sum(self._sizes.values())

    def size_of(self, key: str) -> int:
        return self._sizes[key]

    def path(self, key: str, name: str) -> Path:
        """Return the directory of model `name` in the copy of `key`."""
        return self._finished / key / name

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

    def weigh(self, kept: KeptCopy) -> None:
        self._sizes[kept.key] = kept.size_bytes

    def measure(self, key: str) -> None:
        """Set the size of an unclaimed copy from its files on disk."""
        folders = os.walk(self._finished / key)
        files = (Path(folder, name) for folder, _, names in folders for name in names)
        with suppress(OSError):
            self._sizes[key] = sum(file.lstat().st_size for file in files)

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
        """Remove all copies but those of `keys`, as far as the file system allows."""
        for key in self.keys - keys:
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
