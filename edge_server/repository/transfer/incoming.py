"""A model on its way into a repository: whole under its own name, or not there at all.

This runs on the far side of a push too: only the standard library here (`far_side.py`).
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from typing import TYPE_CHECKING

from edge_server.errors import ModelConfigError, NotFound
from edge_server.repository.scan import NAME_RULE, is_model_name
from edge_server.repository.transfer.inventory import (
    ABOUT_CONTENT,
    CHUNK_BYTES,
    MANIFEST,
    SIGNATURE,
    previous,
    take_inventory,
)
from edge_server.repository.transfer.swap import FILLED, lock, locked, swap, sync, tidy, writing
from edge_server.repository.tree import (
    DEEPEST,
    MOST_BYTES,
    MOST_FILES,
    empty_directories,
    is_left_behind,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Literal

    from edge_server.repository.transfer.inventory import FileContent, Source

    Outcome = Literal["new", "replaced", "unchanged"]


class Incoming:
    """A directory under a dot name, which nobody takes for a model, filled and then put in place.

    Whatever ends the process, and whenever: under the model's name is what was there before, or
    all of the new one. What is left over has a dot name; the next one to come removes it.
    """

    def __init__(self, repository: Path, name: str) -> None:
        """Make it.

        Raises:
            ModelConfigError: `name` can be no model's, or the repository is not there.
            InternalError: the file system does not take it.
        """
        if not is_model_name(name):
            raise ModelConfigError(f"'{name}' is no model: {NAME_RULE}; rename it")
        self._repository = repository
        self._name = name
        self._directories = {""}
        self.contents: dict[str, FileContent] = {}
        self.placed_ns = 0  # just before it was, by the monotonic clock here
        self._bytes = 0
        self._root = repository / f"{FILLED}{name}-{secrets.token_hex(4)}"
        with locked(repository), writing(repository):
            tidy(repository)
            self._root.mkdir()
            # Says that somebody is at work here, for as long as this process lives.
            self._lock = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            lock(self._lock)

    def directory(self, path: str) -> None:
        """Raises: ModelConfigError: no such path may be in a model; InternalError."""
        _require_inside(path)
        self._count()
        with writing(self._root):
            (self._root / path).mkdir(parents=True, exist_ok=True)
        parts = path.split("/")
        self._directories |= {"/".join(parts[:end]) for end in range(1, len(parts) + 1)}

    def file(self, path: str, size: int, mtime_ns: int, source: Source) -> None:
        """Write `size` bytes of `source`, safe from a power cut when this returns.

        Raises:
            ModelConfigError: no such path may be in a model, it is too much, or `source` ends
                early.
            OSError: `source` cannot be read.
            InternalError: the file system does not take it.
        """
        _require_inside(path)
        self._count(size)
        folder, _, _ = path.rpartition("/")
        if folder and folder not in self._directories:
            self.directory(folder)
        # Less what the umask takes, as for every file that this user makes.
        mode = 0o777 if source.executable else 0o666
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with writing(self._root):
            descriptor = os.open(self._root / path, flags, mode)
        with os.fdopen(descriptor, "wb") as file:
            left = size
            while left:
                data = source.read(min(left, CHUNK_BYTES))
                if not data:
                    raise ModelConfigError(
                        f"{path}: ends {left} bytes early: it was changed while it was copied, or "
                        "the connection broke; try again"
                    )
                with writing(self._root / path):
                    file.write(data)
                left -= len(data)
            with writing(self._root / path):
                file.flush()
                os.utime(descriptor, ns=(mtime_ns, mtime_ns))
                os.fsync(descriptor)
        self.contents[path] = source.content()

    def read(self, path: str) -> bytes:
        """A file that came, whole."""
        return (self._root / path).read_bytes()

    @property
    def empty_directories(self) -> tuple[str, ...]:
        """Those that came with nothing in them, sorted."""
        return empty_directories(self._directories - {""}, self.contents)

    def place(self, expected: Mapping[str, FileContent]) -> Outcome:
        """Put it under its name; what was there stays as the previous one, for `roll_back`.

        Where the same content is there already nothing is changed, so that pushing twice does not
        lose the way back.

        Args:
            expected: what it must consist of, manifest and signature included.

        Raises:
            ModelConfigError: it consists of something else, or what is under that name is no
                directory.
            InternalError: the file system refuses.
        """
        if self.contents != expected:
            paths = sorted(
                path
                for path in self.contents.keys() | expected.keys()
                if self.contents.get(path) != expected.get(path)
            )
            raise ModelConfigError(f"{paths[0]}: arrived with other content; push again")
        for path in sorted(self._directories, reverse=True):
            sync(self._root / path)
        with locked(self._repository), writing(self._repository):
            self.placed_ns = time.monotonic_ns()
            target = self._repository / self._name
            if not os.path.lexists(target):
                self._root.rename(target)
                sync(self._repository)
                return "new"
            if target.is_symlink() or not target.is_dir():
                raise ModelConfigError(f"{target}: is no directory; remove it, or rename it")
            if self._is_there():
                self.placed_ns = 0
                return "unchanged"
            before = self._repository / previous(self._name)
            swap(self._root, target)
            if os.path.lexists(before):
                swap(self._root, before)
            else:
                self._root.rename(before)
            sync(self._repository)
        return "replaced"

    def close(self) -> None:
        """Remove what was not put in place, and what that has replaced."""
        shutil.rmtree(self._root, ignore_errors=True)
        os.close(self._lock)

    def _is_there(self) -> bool:
        there = take_inventory(self._repository, self._name)
        about = {MANIFEST: there.manifest, SIGNATURE: there.signature}
        files = {path: c for path, c in self.contents.items() if path not in ABOUT_CONTENT}
        return (
            files == there.files
            and self.empty_directories == there.empty
            and all(self.read(path) == about[path] for path in ABOUT_CONTENT & self.contents.keys())
        )

    def _count(self, size: int = 0) -> None:
        self._bytes += size
        if len(self.contents) + len(self._directories) > MOST_FILES or self._bytes > MOST_BYTES:
            raise ModelConfigError(
                f"model '{self._name}': more than {MOST_FILES} files or {MOST_BYTES >> 30} GiB; is "
                "it a model?"
            )


def roll_back(repository: Path, name: str) -> int:
    """Model `name` and what it was before change places; a second time undoes it.

    Returns:
        When, just before: `time.monotonic_ns()`.

    Raises:
        NotFound: nothing is known of what it was before.
        ModelConfigError: the repository is not there.
        InternalError: the file system refuses.
    """
    if not is_model_name(name):
        raise ModelConfigError(f"'{name}' is no model: {NAME_RULE}")
    with locked(repository), writing(repository):
        tidy(repository)
        before, target = repository / previous(name), repository / name
        if not before.is_dir() or before.is_symlink():
            raise NotFound(
                f"{repository}: of model '{name}' there is nothing to go back to: no push has "
                "replaced it yet"
            )
        began_ns = time.monotonic_ns()
        if os.path.lexists(target):
            swap(before, target)
        else:
            before.rename(target)
        sync(repository)
    return began_ns


def _require_inside(path: str) -> None:
    parts = path.split("/")
    if len(parts) > DEEPEST:
        raise ModelConfigError(f"{path[:200]}: more than {DEEPEST} directories deep; flatten it")
    if any(not part or is_left_behind(part) or "\0" in part for part in parts):
        raise ModelConfigError(f"{path!r} may be no file of a model")
