"""Reads, hashes and copies a model's files, through descriptors, while others may write them."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from edge_server.errors import ModelConfigError, ModelLoadError
from edge_server.model_config.files import cannot_be_read
from edge_server.process.disk import sync
from edge_server.repository.manifest import (
    ABOUT_CONTENT,
    MOST_BYTES,
    NAME,
    SIGNATURE_NAME,
    Manifest,
    ManifestFile,
)
from edge_server.repository.tree import SeenFile, empty_directories, look, opened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from edge_server.repository.tree import Fingerprint, ModelTree

PIECE_BYTES = 1 << 20
_MOST_BYTES = {NAME: MOST_BYTES, SIGNATURE_NAME: 64 << 10}

# File systems stamp times with the kernel's tick of at most 10 ms, so a second change in the same
# tick leaves no trace.
_TICK_NS = 20_000_000

# The errors of a scanned file that is gone, or is a link or a pipe now.
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE, errno.ENXIO}


class TornModel(ModelLoadError):
    """A model changed while it was read; the next scan may find it complete."""


@dataclass(frozen=True)
class Content:
    """The content of a model.

    Attributes:
        files: path relative to the model's directory → size and SHA-256.
        empty: the empty directories, such as the versions of an ensemble, sorted.
    """

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
        """The fingerprint by content, equal for two copies with equal files."""
        return frozenset(
            {(p, file.size, 0, int(file.sha256[:16], 16), 0) for p, file in self.files.items()}
            | {(path, 0, 0, 0, 0) for path in self.empty}
        )


def content_of(tree: ModelTree, only: Callable[[str], bool] = lambda _: True) -> Content:
    """Read and hash the files of `tree`, but those for whose path `only` returns False.

    Raises:
        TornModel, ModelConfigError: see `reading`.
    """
    files = {seen.path: read_file(tree, seen) for seen in tree.files if only(seen.path)}
    return Content(files, empty_directories(filter(only, tree.directories), files))


def read_file(tree: ModelTree, seen: SeenFile, copy: BinaryIO | None = None) -> ManifestFile:
    """Read and hash one file of `tree`, and write it to `copy` if given, with its executable bit.

    Raises:
        TornModel, ModelConfigError: see `reading`.
        OSError: `copy` cannot be written.
    """
    with reading(tree, seen) as (read, status):
        pieces = iter(lambda: read(PIECE_BYTES), b"")
        if copy is None:
            return hashed(pieces)
        _outwait(status.st_ctime_ns)
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
    """Open one file of `tree`; yield the function that reads its next bytes, and its status.

    Raises:
        TornModel: the file differs from the scanned one, or changed before the end of the block.
        ModelConfigError: the file cannot be read.
    """
    left = seen.size

    def read(most: int) -> bytes:
        nonlocal left
        try:
            piece = os.read(file, most)
        except OSError as error:
            raise _unreadable(tree, seen.path, error) from error
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
            raise _unreadable(tree, seen.path, error) from error
        status = os.fstat(file)
        if SeenFile.of(seen.path, status) != seen:
            raise torn(tree, seen.path)
        yield read, status
        if left or SeenFile.of(seen.path, os.fstat(file)) != seen:
            raise torn(tree, seen.path)


def require_unchanged(tree: ModelTree) -> None:
    """Scan the model again.

    Raises:
        TornModel: the scan differs from `tree`.
    """
    try:
        now = look(tree.repository, tree.name, follow_links=tree.follows_links)
    except OSError as error:
        raise torn(tree) from error
    if now != tree:
        raise torn(tree)


def torn(tree: ModelTree, path: str = "") -> TornModel:
    """Return the error for a change of `tree`, or of its file at `path`, during the read."""
    where = tree.directory / path
    return TornModel(f"{where}: changed while it was copied; push it in one go, or leave it alone")


def copy_model(tree: ModelTree, directory: Path) -> Content:
    """Copy `tree` to the new directory `directory`, consistent and as its manifest says.

    The copy equals `tree` at one moment: each file is checked before and after it is read, and the
    whole tree is scanned once more after the last file. The copy is not durable yet: see `seal`.

    Raises:
        TornModel: the model changed during the copy.
        ModelConfigError: the model cannot be read, or differs from its manifest.
        OSError: the copy cannot be written.
    """
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
    """Return the bytes of the manifest and of the signature in `directory`, None if missing."""
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


def _unreadable(tree: ModelTree, path: str, error: OSError) -> ModelConfigError:
    return cannot_be_read(tree.directory / path, error)


def _outwait(changed_ns: int) -> None:
    """Wait until a further change gets a later timestamp than `changed_ns`."""
    age_ns = time.time_ns() - changed_ns
    if 0 <= age_ns < _TICK_NS:
        time.sleep((_TICK_NS - age_ns) / 1e9)


def _sha256(start: str, files: Mapping[str, ManifestFile], empty: tuple[str, ...]) -> str:
    # No name has a NUL and no path ends with a slash, so two different lists never encode equal.
    lines = [f"{path}\0{file.size}\0{file.sha256}\n" for path, file in sorted(files.items())]
    lines += [f"{path}/\0\n" for path in sorted(empty)]
    return hashlib.sha256((start + "".join(lines)).encode()).hexdigest()
