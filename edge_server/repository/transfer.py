"""A model on its way into a repository: received privately, verified, then placed atomically."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import os
import secrets
import shutil
import stat
import tarfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal

from edge_server.errors import InternalError, ModelConfigError, NotFound
from edge_server.process.disk import lock_directory, sync
from edge_server.process.text import shown
from edge_server.repository.content import (
    PIECE_BYTES,
    Content,
    hashed,
    previous,
    readable_tree,
    reading,
    require_unchanged,
    take_inventory,
    usable_tree,
)
from edge_server.repository.manifest import (
    ABOUT_CONTENT,
    MOST_MANIFEST_BYTES,
    NAME,
    SIGNATURE_NAME,
    Manifest,
    ManifestFile,
)
from edge_server.repository.scan import (
    DEEPEST,
    MOST_BYTES,
    MOST_FILES,
    NAME_RULE,
    empty_directories,
    is_left_behind,
    is_model_name,
)
from edge_server.repository.verdicts import last_good_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
    from pathlib import Path
    from typing import BinaryIO

    from edge_server.repository.scan import ModelTree

_BLOCK_BYTES = tarfile.BLOCKSIZE
LONGEST_PATH_BYTES = 1 << 16
BROKEN = "the connection broke, or the other side ended early; try again"
# Prefixes of a directory that is being filled, and of one set aside between two renames.
FILLED = ".incoming-"
_ASIDE = ".outgoing-"
# From linux/fs.h and fcntl.h.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM})


class BrokenArchive(ModelConfigError):
    """An archive is cut off or damaged."""


@dataclass(frozen=True)
class Entry:
    """A directory or a file of a model; `read` returns the next bytes of a file, at most so
    many."""

    path: str
    read: Callable[[int], bytes] | None = None
    size: int = 0
    mtime_ns: int = 0
    executable: bool = False

    @staticmethod
    def of(path: str, data: bytes, mtime_ns: int = 0) -> Entry:
        return Entry(path, io.BytesIO(data).read, len(data), mtime_ns)

    def pieces(self) -> Iterator[bytes]:
        """Return the content of the file, exactly `size` bytes, in pieces."""
        left = self.size
        while self.read is not None and left:
            piece = self.read(min(left, PIECE_BYTES))
            if not piece:
                raise ModelConfigError(
                    f"{self.path}: ends {left} bytes early: it was changed while it was copied, or "
                    "the connection broke; try again"
                )
            left -= len(piece)
            yield piece


def entries_of(
    tree: ModelTree,
    *,
    only: Callable[[str], bool] = lambda _: True,
    progress: Callable[[int], None] | None = None,
) -> Generator[Entry]:
    """Return the entries of `tree`, its manifest and signature first.
    Raises: ModelConfigError: the model is unusable, or not as it was scanned."""
    tree.require_usable()
    first = {NAME: 0, SIGNATURE_NAME: 1}
    for seen in sorted(tree.files, key=lambda file: first.get(file.path, 2)):
        if only(seen.path):
            with reading(tree, seen) as (read, status):
                executable = bool(status.st_mode & stat.S_IXUSR)
                source = read if progress is None else _counted(read, progress)
                yield Entry(seen.path, source, seen.size, seen.mtime_ns, executable)
    for path in tree.directories:
        if only(path):
            yield Entry(path)
    require_unchanged(tree)


def _counted(
    read: Callable[[int], bytes], progress: Callable[[int], None]
) -> Callable[[int], bytes]:
    def counted(most: int) -> bytes:
        piece = read(most)
        progress(len(piece))
        return piece

    return counted


def write_archive(stream: BinaryIO, entries: Iterable[Entry]) -> None:
    """Write `entries` as a tar archive to a stream that need not seek."""
    for entry in entries:
        header = tarfile.TarInfo(entry.path)
        header.size, header.mtime = entry.size, entry.mtime_ns // 10**9
        header.mode = 0o755 if entry.executable or entry.read is None else 0o644
        if entry.read is None:
            header.type = tarfile.DIRTYPE
        stream.write(header.tobuf(tarfile.GNU_FORMAT))
        stream.writelines(entry.pieces())
        stream.write(bytes(-entry.size % _BLOCK_BYTES))
    stream.write(bytes(2 * _BLOCK_BYTES))
    stream.flush()


def read_archive(
    stream: BinaryIO, progress: Callable[[int], None] | None = None
) -> Iterator[Entry]:
    """Return the entries of a tar archive; each is to be read before the next one. No entry has
    more than a block in memory, however long its header claims to be.
    Raises: ModelConfigError: an entry is neither a file nor a directory; BrokenArchive."""

    def read(most: int) -> bytes:
        if not (piece := stream.read(most)):
            raise BrokenArchive(BROKEN)
        if progress is not None:
            progress(len(piece))
        return piece

    long_name = ""
    while (block := _exactly(stream, _BLOCK_BYTES)).strip(b"\0"):
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise BrokenArchive(f"{BROKEN} ({error})") from error
        name, long_name = long_name or header.name, ""
        is_name = header.type == tarfile.GNUTYPE_LONGNAME
        if is_name and 0 <= header.size <= LONGEST_PATH_BYTES:
            long_name = os.fsdecode(_exactly(stream, header.size)).rstrip("\0")
        elif header.isdir():
            yield Entry(name.rstrip("/"))
            continue
        elif header.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and header.size >= 0:
            runs = bool(header.mode & stat.S_IXUSR)
            yield Entry(name, read, header.size, int(header.mtime) * 10**9, runs)
        else:
            raise ModelConfigError(f"{name!r} is neither a file nor a directory")
        _exactly(stream, -header.size % _BLOCK_BYTES)


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise BrokenArchive(BROKEN)
    return data


@contextmanager
def locked(repository: Path) -> Iterator[None]:
    """Hold the lock of `repository` inside the block, so that no other transfer renames there."""
    try:
        descriptor = os.open(repository, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelConfigError(
            f"{repository}: the model repository cannot be opened: {error.strerror}; make the "
            "directory first, or give another one"
        ) from error
    try:
        lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def swap(one: Path, other: Path) -> None:
    """Swap the names of two directories, atomically if the file system can do that. Otherwise
    `other` is missing for a moment; after a crash in that moment `tidy` restores it."""
    if _exchange(one, other):
        return
    aside = other.with_name(f"{_ASIDE}{secrets.token_hex(4)}-{other.name}")
    other.rename(aside)
    one.rename(other)
    aside.rename(one)


def _exchange(one: Path, other: Path) -> bool:
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # an old C library
        return False
    paths = os.fsencode(one), os.fsencode(other)
    if renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(other))


def tidy(repository: Path) -> None:
    """Remove the leftovers of an interrupted push, and restore a name that it moved aside."""
    for path in sorted(repository.iterdir()):
        if path.name.startswith(_ASIDE):
            name = path.name[len(_ASIDE) :].partition("-")[2]
            if name and not os.path.lexists(repository / name):
                path.rename(repository / name)
            elif is_model_name(name) and not os.path.lexists(repository / previous(name)):
                path.rename(repository / previous(name))
            else:
                shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(FILLED) and not _is_at_work(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_at_work(path: Path) -> bool:
    try:
        os.close(lock_directory(path))
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def lock(descriptor: int) -> None:
    """Wait for the lock of the open file or directory, and hold it until the descriptor closes."""
    # A network file system may lack locks; then users must avoid two pushes at the same time.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Turn an OSError inside the block into an error that names the file."""
    try:
        yield
    except OSError as error:
        raise InternalError(
            f"{error.filename or place}: cannot be written: {error.strerror or error}"
        ) from error


@dataclass(frozen=True)
class Delivery:
    """The result of a transfer.
    Attributes: placed_ns: just before the rename, `time.monotonic_ns()`; 0 if unchanged.
        note: a remark for the user; usually empty."""

    name: str
    outcome: Literal["new", "replaced", "unchanged"]
    content: Content
    placed_ns: int = 0
    note: str = ""


def receive(repository: Path, entries: Iterator[Entry], name: str = "") -> Delivery:
    """Place the model that `entries` bring into `repository`, if it is as its manifest says.

    The manifest comes first and names the model. What it lists and does not come is copied from the
    model that is there. The same content changes nothing, so that a second push does not lose the
    previous model. If the process ends at any time, the model's name refers to the complete old or
    the complete new directory; the next transfer removes leftovers, which have a dot name.

    Args: name: the model; if given, `entries` may lack a manifest, and must be complete.

    Raises: ModelConfigError: the model is not as its manifest says, or larger than a model may be;
        or something other than a directory has its name.
    """
    first = next(entries, None)
    manifest = None
    if first is not None and first.path == NAME:
        if first.size > MOST_MANIFEST_BYTES:
            raise ModelConfigError(f"{NAME}: more than {MOST_MANIFEST_BYTES >> 20} MiB")
        data = b"".join(first.pieces())
        manifest = Manifest.parse(data)
        first = Entry.of(NAME, data, first.mtime_ns)
    if manifest is None and not name:
        raise ModelConfigError(f"what came is no model: it does not begin with {NAME}")
    incoming = Incoming(repository, name or (manifest.model if manifest else ""))
    try:
        for entry in chain([first] if first else [], entries):
            incoming.add(entry)
        if manifest is not None:
            if not name:
                incoming.complete(manifest)
            incoming.require(manifest)
        return incoming.place()
    finally:
        incoming.close()


class Incoming:
    """A model's directory that is filled under a dot name, which no scan reads."""

    def __init__(self, repository: Path, name: str) -> None:
        _require_name(name)
        self._repository = repository
        self._name = name
        self._directories = {""}
        self._files: dict[str, ManifestFile] = {}
        self._bytes = 0
        self._root = repository / f"{FILLED}{name}-{secrets.token_hex(4)}"
        with locked(repository), writing(repository):
            tidy(repository)
            self._root.mkdir()
            # Marks the directory as in use for as long as this process lives.
            self._lock = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            lock(self._lock)

    @property
    def content(self) -> Content:
        empty = empty_directories(self._directories - {""}, self._files)
        return Content(dict(self._files), empty)

    def add(self, entry: Entry) -> None:
        """Write a directory or a file; return once the data of a file is durable."""
        parts = entry.path.split("/")
        if len(parts) > DEEPEST:
            raise ModelConfigError(
                f"{entry.path[:200]}: more than {DEEPEST} directories deep; flatten it"
            )
        if any(not part or is_left_behind(part) or "\0" in part for part in parts):
            raise ModelConfigError(f"{entry.path!r} may be no file of a model")
        self._bytes += entry.size
        folders = parts if entry.read is None else parts[:-1]
        self._directories |= {"/".join(folders[:end]) for end in range(1, len(folders) + 1)}
        count = len(self._files) + len(self._directories)
        if count > MOST_FILES or self._bytes > MOST_BYTES:
            raise ModelConfigError(
                f"model '{self._name}': more than {MOST_FILES} files or "
                f"{MOST_BYTES >> 30} GiB; is it a model?"
            )
        with writing(self._root):
            (self._root / "/".join(folders)).mkdir(parents=True, exist_ok=True)
        if entry.read is not None:
            self._files[entry.path] = self._write(self._root / entry.path, entry)

    def complete(self, manifest: Manifest) -> None:
        """Copy from the model that is there what `manifest` lists and has not come."""
        lacking = {*manifest.files, *(manifest.empty_directories or ())}
        lacking -= self._files.keys() | self._directories
        if lacking and os.path.lexists(self._repository / self._name):
            tree = readable_tree(self._repository, self._name)
            for entry in entries_of(tree, only=lacking.__contains__):
                self.add(entry)

    def require(self, manifest: Manifest) -> None:
        """Raises: ModelConfigError: what has come is not as `manifest` says."""
        content = self.content
        if fault := manifest.unfit(self._name, content.files, content.empty):
            raise ModelConfigError(f"model '{self._name}': {shown(fault)}; push it again")

    def place(self) -> Delivery:
        """Give the directory the model's name; keep the replaced model as the previous one."""
        content = self.content
        with writing(self._root):
            for path in sorted(self._directories, reverse=True):
                sync(self._root / path)
        with locked(self._repository), writing(self._repository):
            placed_ns = time.monotonic_ns()
            target = self._repository / self._name
            if not os.path.lexists(target):
                self._root.rename(target)
                sync(self._repository)
                return Delivery(self._name, "new", content, placed_ns)
            if target.is_symlink() or not target.is_dir():
                raise ModelConfigError(f"{target}: is no directory; remove it, or rename it")
            there = take_inventory(self._repository, self._name).content
            if (
                content.files.items() <= there.files.items()
                and there.files.keys() - content.files.keys() <= ABOUT_CONTENT
                and content.empty == there.empty
            ):
                return Delivery(self._name, "unchanged", content)
            before = self._repository / previous(self._name)
            swap(self._root, target)
            if os.path.lexists(before):
                swap(self._root, before)
            else:
                self._root.rename(before)
            sync(self._repository)
        return Delivery(self._name, "replaced", content, placed_ns)

    def close(self) -> None:
        """Remove the directory if it was not placed, or the older previous model after a swap."""
        shutil.rmtree(self._root, ignore_errors=True)
        os.close(self._lock)

    def _write(self, path: Path, entry: Entry) -> ManifestFile:
        # The umask applies, as to every file of this user.
        mode = 0o777 if entry.executable else 0o666
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with writing(path), os.fdopen(os.open(path, flags, mode), "wb") as file:
            content = hashed(entry.pieces(), file.write)
            file.flush()
            os.utime(file.fileno(), ns=(entry.mtime_ns, entry.mtime_ns))
            os.fsync(file.fileno())
        return content


def roll_back(repository: Path, name: str) -> int:
    """Swap model `name` with its previous model; a second call undoes the swap.
    Returns: The time just before the swap, `time.monotonic_ns()`.
    Raises: NotFound: there is none. ModelConfigError: no such name or repository."""
    _require_name(name)
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


def to_last_good(repository: Path, name: str, store: Path | None) -> int:
    """Place the last known good copy of `name` from the daemon that watches this repository.
    Returns: The time just before the placement, `time.monotonic_ns()`; 0 if the content was there.
    Raises: NotFound: no daemon, or no good copy. ModelConfigError: the copy is damaged."""
    copy, digest = last_good_copy(repository, name, store)
    tree = usable_tree(copy.parent, copy.name)
    incoming = Incoming(repository, name)
    try:
        for entry in entries_of(tree):
            incoming.add(entry)
        if incoming.content.digest != digest:
            raise ModelConfigError(
                f"{copy}: is damaged: its content is not {digest[:12]}, which was last found "
                "good; push the model again"
            )
        return incoming.place().placed_ns
    finally:
        incoming.close()


def _require_name(name: str) -> None:
    if not is_model_name(name):
        raise ModelConfigError(f"'{shown(name)[:200]}' is no model: {NAME_RULE}; rename it")
