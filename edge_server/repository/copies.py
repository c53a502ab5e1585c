"""The directories of a model store: finished copies by key, and those that are being made."""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.errors import ModelConfigError
from edge_server.repository.content import TornModel, content_of
from edge_server.repository.staged_copy import remove, sync
from edge_server.repository.tree import look

if TYPE_CHECKING:
    from edge_server.repository.store_state import KeptCopy

_KEY = re.compile(r"[0-9a-f]{64}\Z")


class Copies:
    """`copies/<key>/<model>` below `directory`, each there as a whole or not at all.

    What is not whole is in `incoming`, and cleared away at the next start. The caller sees to it
    that only one thread at a time is here, but for `path` and `is_whole`.
    """

    def __init__(self, directory: Path) -> None:
        """Raises: OSError: they cannot be made or read."""
        self._finished = directory / "copies"
        self._incoming = directory / "incoming"
        for folder in (self._finished, self._incoming):
            folder.mkdir(mode=0o700, exist_ok=True)
        for left in self._incoming.iterdir():
            remove(left)
        # By the name in either directory.
        names = (entry.name for entry in self._finished.iterdir())
        self._sizes = {name: 0 for name in names if _KEY.match(name)}

    @property
    def keys(self) -> set[str]:
        return {name for name in self._sizes if _KEY.match(name)}

    @property
    def size_bytes(self) -> int:
        """Of all copies, and of those that are being made."""
        return sum(self._sizes.values())

    def size_of(self, key: str) -> int:
        return self._sizes[key]

    def path(self, key: str, name: str) -> Path:
        """Where the directory of model `name` is, in the copy of that key."""
        return self._finished / key / name

    def is_whole(self, kept: KeptCopy, name: str) -> bool | None:
        """Whether every byte of it is as it was when it was copied.

        None where that cannot be told now, as where the disk does not answer or too many files are
        open: the copy may be good.
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
        """As `weigh`, of a copy of which nothing is known."""
        folders = os.walk(self._finished / key)
        files = (Path(folder, name) for folder, _, names in folders for name in names)
        with suppress(OSError):
            self._sizes[key] = sum(file.lstat().st_size for file in files)

    def begin(self, size_bytes: int) -> Path:
        """A new directory for a copy of that size."""
        place = Path(tempfile.mkdtemp(dir=self._incoming))
        self._sizes[place.name] = size_bytes
        return place

    def give_up(self, place: Path) -> None:
        """`place` is no more, whether or not something is in it."""
        del self._sizes[place.name]
        remove(place)

    def finish(self, place: Path, key: str) -> None:
        """Make what is in `place` the copy of that key, durably.

        One of the same key that came meanwhile is as good.

        Raises: OSError: it could not be done.
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

    def drop(self, key: str) -> None:
        """Remove a copy.

        Raises: OSError: it cannot be removed, and stays.
        """
        aside = self._incoming / key
        remove(aside)
        # At once, so that never half a copy is there.
        with suppress(FileNotFoundError):
            (self._finished / key).rename(aside)
        del self._sizes[key]
        remove(aside)
