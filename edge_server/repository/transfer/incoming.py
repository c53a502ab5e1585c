"""Places a model into a repository atomically.

The remote agent runs this module, too, so it uses only the standard library (see
`remote_agent.py`).
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
    """A model directory that is filled under a dot name, which no scan reads, and then placed.

    If the process ends at any time, the model's name refers to the complete old or to the complete
    new directory. Leftovers have a dot name, and the next transfer removes them.
    """

    def __init__(self, repository: Path, name: str) -> None:
        """Create the directory in `repository`.

        Raises:
            ModelConfigError: `name` is not a model name, or the repository does not exist.
            InternalError: the file system refuses the directory.
        """
        if not is_model_name(name):
            raise ModelConfigError(f"'{name}' is no model: {NAME_RULE}; rename it")
        self._repository = repository
        self._name = name
        self._directories = {""}
        self.contents: dict[str, FileContent] = {}
        self.placed_ns = 0  # the monotonic time of this machine just before the placement
        self._bytes = 0
        self._root = repository / f"{FILLED}{name}-{secrets.token_hex(4)}"
        with locked(repository), writing(repository):
            tidy(repository)
            self._root.mkdir()
            # Marks the directory as in use for as long as this process lives.
            self._lock = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            lock(self._lock)

    def directory(self, path: str) -> None:
        """Create the directory at `path`, with its parents.

        Raises:
            ModelConfigError: `path` is not allowed in a model, or the model has too many files.
            InternalError: the file system refuses the directory.
        """
        _require_inside(path)
        self._count()
        with writing(self._root):
            (self._root / path).mkdir(parents=True, exist_ok=True)
        parts = path.split("/")
        self._directories |= {"/".join(parts[:end]) for end in range(1, len(parts) + 1)}

    def file(self, path: str, size: int, mtime_ns: int, source: Source) -> None:
        """Write `size` bytes of `source` to `path`; return once the data is durable.

        Args:
            path: the path relative to the model's directory.
            size: the size of the file in bytes.
            mtime_ns: the modification time of the file, in nanoseconds.
            source: the data.

        Raises:
            ModelConfigError: `path` is not allowed in a model, the model is too large, or `source`
                ends early.
            OSError: `source` cannot be read.
            InternalError: the file system refuses the file.
        """
        _require_inside(path)
        self._count(size)
        folder, _, _ = path.rpartition("/")
        if folder and folder not in self._directories:
            self.directory(folder)
        # The umask applies, as to every file of this user.
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
        """Return the content of a received file."""
        return (self._root / path).read_bytes()

    @property
    def empty_directories(self) -> tuple[str, ...]:
        """The received empty directories, sorted."""
        return empty_directories(self._directories - {""}, self.contents)

    def place(self, expected: Mapping[str, FileContent]) -> Outcome:
        """Place the model under its name; keep the replaced model as the previous one.

        If the repository holds the same content already, nothing changes, so that a second push
        does not lose the previous model that `roll_back` needs.

        Args:
            expected: path → content of every file, manifest and signature included.

        Returns:
            The outcome: "new", "replaced" or "unchanged".

        Raises:
            ModelConfigError: the received content differs, or the model's name refers to something
                other than a directory.
            InternalError: the file system refuses a rename.
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
        """Remove the directory if it was not placed, or the older previous model after a swap."""
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
    """Swap model `name` with its previous model; a second call undoes the swap.

    Returns:
        The time just before the swap, `time.monotonic_ns()`.

    Raises:
        NotFound: the repository holds no previous model.
        ModelConfigError: `name` is not a model name, or the repository does not exist.
        InternalError: the file system refuses a rename.
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
