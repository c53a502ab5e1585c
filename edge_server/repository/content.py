"""Reads, hashes and copies a model's files, through descriptors, while others may write them."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import tempfile
import threading
import time
import weakref
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from edge_server.errors import ModelConfigError, ModelLoadError
from edge_server.model_config.files import cannot_be_read
from edge_server.process.disk import make_locked_directory, orphans, stays, sync
from edge_server.process.text import shown
from edge_server.repository.manifest import (
    ABOUT_CONTENT,
    MOST_MANIFEST_BYTES,
    NAME,
    SIGNATURE_NAME,
    Manifest,
    ManifestFile,
    read_about,
)
from edge_server.repository.scan import (
    SeenFile,
    empty_directories,
    files_in,
    is_left_behind,
    is_model_name,
    opened,
    scan_model,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from edge_server.model_config.files import ModelFiles
    from edge_server.repository.scan import Fingerprint, ModelTree

PIECE_BYTES = 1 << 20
_MOST_BYTES = {NAME: MOST_MANIFEST_BYTES, SIGNATURE_NAME: 64 << 10}

# File systems stamp times with the kernel's tick of at most 10 ms, so a second change in the same
# tick leaves no trace.
_TICK_NS = 20_000_000

# The errors of a scanned file that is gone, or is a link or a pipe now.
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE, errno.ENXIO}
# Attempts to copy a model whose files change during the copy.
_ATTEMPTS = 3
_USUAL = Path("/var/tmp")  # noqa: S108 - only for a directory that `mkdtemp` makes there


class TornModel(ModelLoadError):
    """A model changed while it was read; the next scan may find it complete."""


@dataclass(frozen=True)
class Content:
    files: dict[str, ManifestFile] = field(default_factory=dict)
    empty: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """The SHA-256 of the content in hex, without the name, the manifest and the signature."""
        return _sha256(
            "", {p: f for p, f in self.files.items() if p not in ABOUT_CONTENT}, self.empty
        )

    def key(self, name: str) -> str:
        """Return the SHA-256 in hex of name and content, manifest and signature included."""
        return _sha256(f"{name}\0", self.files, self.empty)

    @property
    def fingerprint(self) -> Fingerprint:
        return frozenset(
            {(p, file.size, 0, int(file.sha256[:16], 16), 0) for p, file in self.files.items()}
            | {(path, 0, 0, 0, 0) for path in self.empty}
        )


def content_of(tree: ModelTree, only: Callable[[str], bool] = lambda _: True) -> Content:
    """Read and hash the files of `tree`, but those for whose path `only` returns False."""
    files = {seen.path: read_file(tree, seen) for seen in tree.files if only(seen.path)}
    return Content(files, empty_directories(filter(only, tree.directories), files))


def read_file(tree: ModelTree, seen: SeenFile, copy: BinaryIO | None = None) -> ManifestFile:
    """Read and hash one file of `tree`; write it to `copy` if given, with its executable bit."""
    with reading(tree, seen) as (read, status):
        pieces = iter(lambda: read(PIECE_BYTES), b"")
        if copy is None:
            return hashed(pieces)
        # A further change must get a later timestamp than the last one.
        age_ns = time.time_ns() - status.st_ctime_ns
        if 0 <= age_ns < _TICK_NS:
            time.sleep((_TICK_NS - age_ns) / 1e9)
        file = hashed(pieces, copy.write)
    os.fchmod(copy.fileno(), 0o555 if status.st_mode & stat.S_IXUSR else 0o444)
    return file


def hashed(
    pieces: Iterable[bytes], write: Callable[[bytes], object] = lambda _: None
) -> ManifestFile:
    """Return the content of a file that comes in `pieces`, and pass each piece on to `write`."""
    sha256, size = hashlib.sha256(), 0
    for piece in pieces:
        sha256.update(piece)
        size += len(piece)
        write(piece)
    return ManifestFile(sha256.hexdigest(), size)


@contextmanager
def reading(
    tree: ModelTree, seen: SeenFile
) -> Iterator[tuple[Callable[[int], bytes], os.stat_result]]:
    """Open one file of `tree`; yield the function that reads its next bytes, and its status. Raises
    TornModel where it differs from the scanned one, or changed before the end of the block;
    ModelConfigError where it cannot be read."""
    left = seen.size

    def read(most: int) -> bytes:
        nonlocal left
        try:
            piece = os.read(file, most)
        except OSError as error:
            raise cannot_be_read(tree.directory / seen.path, error) from error
        left -= len(piece)
        if left < 0:  # a file that keeps growing would fill the disk
            raise torn(tree, seen.path)
        return piece

    with ExitStack() as stack:
        try:
            file = stack.enter_context(opened(tree, seen.path))
        except OSError as error:
            # No errno: `opened` raises so for a file that is no longer regular.
            if error.errno is None or error.errno in _GONE:
                raise torn(tree, seen.path) from error
            raise cannot_be_read(tree.directory / seen.path, error) from error
        status = os.fstat(file)
        if SeenFile.of(seen.path, status) != seen:
            raise torn(tree, seen.path)
        yield read, status
        if left or SeenFile.of(seen.path, os.fstat(file)) != seen:
            raise torn(tree, seen.path)


def require_unchanged(tree: ModelTree) -> None:
    """Raise TornModel if the model is no longer as `tree` says."""
    try:
        now = scan_model(tree.repository, tree.name, follow_links=tree.follows_links)
    except OSError as error:
        raise torn(tree) from error
    if now != tree:
        raise torn(tree)


def torn(tree: ModelTree, path: str = "") -> TornModel:
    """Return the error for a change of `tree`, or of its file at `path`, during the read."""
    where = tree.directory / path
    return TornModel(f"{where}: changed while it was copied; push it in one go, or leave it alone")


def copy_model(tree: ModelTree, directory: Path) -> Content:
    """Copy `tree` to the new directory `directory`, consistent and as its manifest says: each file
    is checked before and after it is read, and the whole tree is scanned once more after the last.
    The copy is not durable yet: see `seal`. Raises: TornModel, ModelConfigError, OSError."""
    tree.require_usable()
    for seen in tree.files:
        if seen.size > _MOST_BYTES.get(seen.path, seen.size):
            raise ModelConfigError(
                f"{tree.directory / seen.path}: {seen.size} bytes, more than "
                f"{_MOST_BYTES[seen.path]}; push the model again"
            )
    directory.mkdir()
    for path in tree.directories:
        (directory / path).mkdir()
    files = {}
    for seen in tree.files:
        with (directory / seen.path).open("xb") as copy:
            files[seen.path] = read_file(tree, seen, copy)
    require_unchanged(tree)
    content = Content(files, tree.empty_directories)
    data, _ = manifest_and_signature(directory)
    if data is not None:
        manifest = Manifest.parse(data)
        if missing := manifest.missing(tree):
            raise ModelConfigError(f"{tree.directory / NAME}: {missing}; push the model again")
        if changed := manifest.changed(files):
            raise ModelConfigError(
                f"{tree.directory / changed}: content is not what {NAME} says: torn, or damaged on "
                "the way; push it again"
            )
    return content


def manifest_and_signature(directory: Path) -> tuple[bytes | None, bytes | None]:
    """Return those in `directory`; None if missing."""
    return _bytes(directory / NAME), _bytes(directory / SIGNATURE_NAME)


def seal(directory: Path) -> None:
    """Make the copy in `directory` read-only and durable, except for its own directory entry."""
    for folder, _, files in os.walk(directory, topdown=False):
        for name in files:
            sync(Path(folder, name))
        Path(folder).chmod(0o555)
        sync(Path(folder))


def remove(directory: Path) -> None:
    """Remove a copy, sealed or not, as far as the file system allows."""
    with suppress(OSError):
        for folder, _, _ in os.walk(directory):
            Path(folder).chmod(0o700)
    shutil.rmtree(directory, ignore_errors=True)


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _sha256(start: str, files: Mapping[str, ManifestFile], empty: tuple[str, ...]) -> str:
    # No name has a NUL and no path ends with a slash, so two different lists never encode equal.
    lines = [f"{path}\0{file.size}\0{file.sha256}\n" for path, file in sorted(files.items())]
    lines += [f"{path}/\0\n" for path in sorted(empty)]
    return hashlib.sha256((start + "".join(lines)).encode()).hexdigest()


class PrivateDirectory:
    """A directory that no other process changes, locked, in `TMPDIR` or else in /var/tmp, as /tmp
    is in memory on many systems. It is created at first use and removed at close; the next process
    removes that of a killed one. Because it is locked, systemd-tmpfiles does not remove it."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._root: Path | None = None
        self._lock = -1

    def path(self) -> Path:
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
    """Copies each model at the time of its load, for repositories that are not watched. No
    repository file stays open or mapped, because truncating a mapped file would kill the process,
    and no file can change after its check against the manifest. Links are followed. Thread-safe."""

    def __init__(self, directory: PrivateDirectory) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._copies = weakref.WeakValueDictionary[Path, _Copy]()

    def copy(self, directory: Path) -> ModelFiles:
        """Return the files of a copy of the model in `directory`; reuse an unchanged copy.
        Raises: ModelConfigError: the model cannot be read or copied, differs from its manifest, or
            keeps changing."""
        with self._lock:
            copy = self._copies.get(directory)
        if copy is None or copy.tree != _scanned(directory):
            copy = self._made(directory)
            with self._lock:
                self._copies[directory] = copy
        files = files_in(copy.directory)
        return replace(files, fingerprint=copy.fingerprint, holder=copy, shown=directory)

    def _made(self, directory: Path) -> _Copy:
        for _ in range(_ATTEMPTS - 1):
            with suppress(TornModel):
                return _Copy(_scanned(directory), self._directory)
        return _Copy(_scanned(directory), self._directory)


class _Copy:
    """A copy of a model's directory, removed when this object is no longer referenced."""

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


def _scanned(directory: Path) -> ModelTree:
    try:
        return scan_model(directory.parent, directory.name, follow_links=True)
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


@dataclass(frozen=True)
class Inventory:
    """The complete inventory of one model of a repository; the manifest and its signature are
    content, too. With a `fault` (why it is unusable) all but `has_previous` is empty."""

    name: str
    content: Content = field(default_factory=Content)
    manifest: bytes | None = None
    signature: bytes | None = None
    has_previous: bool = False
    fault: str = ""

    @property
    def versions(self) -> list[int]:
        paths = (*(path for path in self.content.files if "/" in path), *self.content.empty)
        first = {path.partition("/")[0] for path in paths}
        return sorted(int(each) for each in first if each.isdecimal() and each[0] != "0")


def take_inventory(repository: Path, name: str) -> Inventory:
    """Read all files of model `name`; a read error becomes the inventory's fault."""
    tree = readable_tree(repository, name)
    has_previous = (repository / previous(name)).is_dir()
    if tree.fault:
        return Inventory(name, has_previous=has_previous, fault=tree.fault)
    try:
        content = content_of(tree)
        manifest, signature = (read_about(tree, path) for path in (NAME, SIGNATURE_NAME))
    except ModelConfigError as error:
        return Inventory(name, has_previous=has_previous, fault=str(error))
    return Inventory(name, content, manifest, signature, has_previous)


def model_names(repository: Path) -> list[str]:
    """Return the names of the models, sorted, including unusable ones; `take_inventory` reports
    their faults.
    """
    try:
        return sorted(
            shown(entry.name)
            for entry in repository.iterdir()
            if not (is_left_behind(entry.name) or entry.name.startswith("_"))
            and (entry.is_dir() or entry.is_symlink())
        )
    except OSError as error:
        raise ModelConfigError(
            f"{repository}: the model repository cannot be read: {error.strerror}"
        ) from error


def usable_tree(repository: Path, name: str) -> ModelTree:
    """Scan model `name`.
    Raises: ModelConfigError: the model does not exist or is unusable."""
    if not is_model_name(name) or not os.path.lexists(repository / name):
        raise ModelConfigError(f"{repository}: there is no model '{name}'")
    tree = readable_tree(repository, name)
    tree.require_usable()
    return tree


def readable_tree(repository: Path, name: str) -> ModelTree:
    try:
        return scan_model(repository, name)
    except OSError as error:
        raise ModelConfigError(
            f"{repository}: the model repository cannot be read: {error.strerror}; it must be a "
            "directory that is there and that this user may read"
        ) from error


def previous(name: str) -> str:
    return f".previous-{name}"
