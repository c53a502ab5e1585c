"""What a model in a repository consists of, by content.

This runs on the far side of a push too, where there may be nothing but Python: only the standard
library here, and what keeps to it (`far_side.py`).
"""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from edge_server.errors import ModelConfigError
from edge_server.repository.tree import look, opened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from edge_server.repository.tree import ModelTree

MANIFEST = "manifest.json"
SIGNATURE = "manifest.json.sig"
# Neither is content: both tell of it.
ABOUT_CONTENT = frozenset({MANIFEST, SIGNATURE})
MOST_MANIFEST_BYTES = 4 << 20
CHUNK_BYTES = 1 << 20


class FileContent(NamedTuple):
    """One file's."""

    sha256: str
    size: int


class Inventory(NamedTuple):
    """One model of a repository, read from end to end.

    Attributes:
        files: path → content, all but the manifest and its signature.
        empty: directories with nothing in them, as an ensemble's versions are; sorted.
        versions: ascending.
        manifest: the exact bytes; None where there is none.
        signature: likewise.
        has_previous: `rollback` has something to go back to.
        fault: why it cannot be used or read; then the rest is empty.
    """

    name: str
    files: Mapping[str, FileContent] = {}
    empty: tuple[str, ...] = ()
    versions: tuple[int, ...] = ()
    manifest: bytes | None = None
    signature: bytes | None = None
    has_previous: bool = False
    fault: str = ""


class Source:
    """Bytes to be copied, hashed as they are read.

    Args:
        read: gives so many bytes, fewer only at the end.
        progress: is told of every so many bytes more.
        executable: the copy is to be as well.
    """

    def __init__(
        self,
        read: Callable[[int], bytes],
        progress: Callable[[int], None] | None = None,
        *,
        executable: bool = False,
    ) -> None:
        self.executable = executable
        self._read = read
        self._progress = progress
        self._sha256 = hashlib.sha256()
        self._size = 0

    def read(self, size: int) -> bytes:
        data = self._read(size)
        self._sha256.update(data)
        self._size += len(data)
        if self._progress is not None:
            self._progress(len(data))
        return data

    def content(self) -> FileContent:
        """Of what has been read so far."""
        return FileContent(self._sha256.hexdigest(), self._size)


class Sink(Protocol):
    """Where a model's files go."""

    def directory(self, path: str) -> None: ...

    def file(self, path: str, size: int, mtime_ns: int, source: Source) -> None:
        """Take `size` bytes of `source`; no more, and an error where there are fewer."""


def take_inventory(repository: Path, name: str) -> Inventory:
    """Read all of model `name`; what cannot be read is its fault.

    Raises:
        ModelConfigError: the repository itself cannot be read.
    """
    tree = look_at(repository, name)
    before = (repository / previous(name)).is_dir()
    if tree.fault:
        return Inventory(name, has_previous=before, fault=tree.fault)
    try:
        files = {
            file.path: _content(tree, file.path)
            for file in tree.files
            if file.path not in ABOUT_CONTENT
        }
        about = about_in(tree)
    except OSError as error:
        fault = f"{tree.directory}: cannot be read: {error.strerror or error}"
        return Inventory(name, has_previous=before, fault=fault)
    versions = sorted(int(d) for d in tree.directories if d.isdecimal() and d[0] != "0")
    return Inventory(
        name,
        files,
        tree.empty_directories,
        tuple(versions),
        about.get(MANIFEST),
        about.get(SIGNATURE),
        before,
    )


def digest_of(contents: Mapping[str, FileContent], empty: Iterable[str]) -> str:
    """The SHA-256 of a model's content: all but its name, its manifest and its signature.

    Args:
        empty: the directories with nothing in them.
    """
    lines = [
        f"{path}\0{each.size}\0{each.sha256}\n"
        for path, each in sorted(contents.items())
        if path not in ABOUT_CONTENT
    ]
    lines += [f"{path}/\0\n" for path in sorted(empty)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def look_at(repository: Path, name: str) -> ModelTree:
    """Raises: ModelConfigError: the repository itself cannot be read."""
    try:
        return look(repository, name)
    except OSError as error:
        raise ModelConfigError(
            f"{repository}: the model repository cannot be read: {error.strerror}; it must be a "
            "directory that is there and that this user may read"
        ) from error


def previous(name: str) -> str:
    """The directory of what a model was before."""
    return f".previous-{name}"


@contextmanager
def source_of(
    tree: ModelTree, path: str, progress: Callable[[int], None] | None = None
) -> Iterator[Source]:
    """The file at `path` of `tree`.

    Raises:
        OSError: it vanished meanwhile, or cannot be read.
    """
    with opened(tree, path) as descriptor, os.fdopen(descriptor, "rb", closefd=False) as file:
        mode = os.fstat(descriptor).st_mode
        yield Source(file.read, progress, executable=bool(mode & stat.S_IXUSR))


def about_in(tree: ModelTree) -> dict[str, bytes]:
    """The manifest and the signature of `tree`, if they are there, by path.

    Of one that is too long there is enough to find it faulty.

    Raises:
        OSError: it vanished meanwhile, or cannot be read.
    """
    found = {}
    for file in tree.files:
        if file.path in ABOUT_CONTENT:
            with source_of(tree, file.path) as source:
                found[file.path] = source.read(MOST_MANIFEST_BYTES)
    return found


def _content(tree: ModelTree, path: str) -> FileContent:
    with source_of(tree, path) as source:
        while source.read(CHUNK_BYTES):
            pass
        return source.content()
