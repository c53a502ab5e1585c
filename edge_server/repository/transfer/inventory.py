"""The inventory of a model in a repository: its files by content.

The remote agent runs this module, too, so it imports only the standard library and modules that do
the same (see `remote_agent.py`).
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
# Neither file is content; both describe the content.
ABOUT_CONTENT = frozenset({MANIFEST, SIGNATURE})
MOST_MANIFEST_BYTES = 4 << 20
CHUNK_BYTES = 1 << 20


class FileContent(NamedTuple):
    """The content of one file: SHA-256 in hex, and size in bytes."""

    sha256: str
    size: int


class Inventory(NamedTuple):
    """The complete inventory of one model of a repository.

    Attributes:
        name: the model.
        files: path → content of all files except the manifest and its signature.
        empty: the empty directories, such as the versions of an ensemble, sorted.
        versions: the version numbers, ascending.
        manifest: the exact bytes of the manifest; None if there is none.
        signature: the exact bytes of the signature; None if there is none.
        has_previous: True if the repository holds a previous model for `rollback`.
        fault: the reason why the model is unusable or cannot be read; the other fields but
            `has_previous` are then empty.
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
    """A stream of bytes to copy, hashed as they are read.

    Args:
        read: returns the given number of bytes, fewer only at the end.
        progress: called with the number of bytes after each read.
        executable: True if the copy must be executable.
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
        """Return the content of the bytes read so far."""
        return FileContent(self._sha256.hexdigest(), self._size)


class Sink(Protocol):
    """The target of a model's files."""

    def directory(self, path: str) -> None: ...

    def file(self, path: str, size: int, mtime_ns: int, source: Source) -> None:
        """Write exactly `size` bytes of `source`; raise an error if there are fewer."""


def take_inventory(repository: Path, name: str) -> Inventory:
    """Read all files of model `name`; a read error becomes the inventory's fault.

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
    """Return the SHA-256 of a model's content in hex, without name, manifest and signature.

    Args:
        contents: path → content of the files.
        empty: the empty directories.
    """
    lines = [
        f"{path}\0{each.size}\0{each.sha256}\n"
        for path, each in sorted(contents.items())
        if path not in ABOUT_CONTENT
    ]
    lines += [f"{path}/\0\n" for path in sorted(empty)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def look_at(repository: Path, name: str) -> ModelTree:
    """Scan model `name` of `repository`.

    Raises:
        ModelConfigError: the repository itself cannot be read.
    """
    try:
        return look(repository, name)
    except OSError as error:
        raise ModelConfigError(
            f"{repository}: the model repository cannot be read: {error.strerror}; it must be a "
            "directory that is there and that this user may read"
        ) from error


def previous(name: str) -> str:
    """Return the directory name of a model's previous content."""
    return f".previous-{name}"


@contextmanager
def source_of(
    tree: ModelTree, path: str, progress: Callable[[int], None] | None = None
) -> Iterator[Source]:
    """Open the file at `path` of `tree` as a `Source`.

    Raises:
        OSError: the file vanished, or cannot be read.
    """
    with opened(tree, path) as descriptor, os.fdopen(descriptor, "rb", closefd=False) as file:
        mode = os.fstat(descriptor).st_mode
        yield Source(file.read, progress, executable=bool(mode & stat.S_IXUSR))


def about_in(tree: ModelTree) -> dict[str, bytes]:
    """Return the existing manifest and signature of `tree` by path.

    A file that is too long is cut, but long enough to be found invalid.

    Raises:
        OSError: a file vanished, or cannot be read.
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
