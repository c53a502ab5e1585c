"""Reads and hashes a model's files once, through descriptors, while other processes may write."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from edge_server.errors import ModelConfigError, ModelLoadError
from edge_server.model_config.files import cannot_be_read
from edge_server.repository import manifest
from edge_server.repository.manifest import ManifestFile
from edge_server.repository.tree import SeenFile, opened

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.repository.tree import ModelTree

_PIECE_BYTES = 1 << 20

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
        empty: the empty directories, such as the versions of an ensemble.
    """

    files: Mapping[str, ManifestFile]
    empty: tuple[str, ...]

    @staticmethod
    def of(tree: ModelTree, files: Mapping[str, ManifestFile]) -> Content:
        return Content(files, tree.empty_directories)

    @property
    def digest(self) -> str:
        """The SHA-256 of the content in hex, without the name, the manifest and the signature."""
        beside = {manifest.NAME, manifest.SIGNATURE_NAME}
        return _sha256("", {p: f for p, f in self.files.items() if p not in beside}, self.empty)

    def key(self, name: str) -> str:
        """Return the SHA-256 in hex of name and content, manifest and signature included."""
        return _sha256(f"{name}\0", self.files, self.empty)


def content_of(tree: ModelTree) -> Content:
    """Read and hash all files of `tree`.

    Raises:
        TornModel, ModelConfigError: see `read_file`.
    """
    return Content.of(tree, {seen.path: read_file(tree, seen) for seen in tree.files})


def read_file(tree: ModelTree, seen: SeenFile, copy: BinaryIO | None = None) -> ManifestFile:
    """Read and hash one file of `tree`, and write it to `copy` if given, with its executable bit.

    Raises:
        TornModel: the file differs from the scanned one, or changed while it was read.
        ModelConfigError: the file cannot be read.
        OSError: `copy` cannot be written.
    """
    sha256 = hashlib.sha256()
    with ExitStack() as stack:
        file = _reach(tree, seen.path, stack)
        status = os.fstat(file)
        if SeenFile.of(seen.path, status) != seen:
            raise torn(tree, seen.path)
        _outwait(status.st_ctime_ns)
        left = seen.size
        while piece := _piece(tree, seen.path, file):
            left -= len(piece)
            if left < 0:  # a file that keeps growing would fill the disk
                raise torn(tree, seen.path)
            sha256.update(piece)
            if copy is not None:
                copy.write(piece)
        if left or SeenFile.of(seen.path, os.fstat(file)) != seen:
            raise torn(tree, seen.path)
    if copy is not None:
        os.fchmod(copy.fileno(), 0o555 if status.st_mode & stat.S_IXUSR else 0o444)
    return ManifestFile(sha256.hexdigest(), seen.size)


def torn(tree: ModelTree, path: str = "") -> TornModel:
    """Return the error for a change of `tree`, or of its file at `path`, during the read."""
    where = tree.directory / path
    return TornModel(f"{where}: changed while it was copied; push it in one go, or leave it alone")


def _reach(tree: ModelTree, path: str, stack: ExitStack) -> int:
    try:
        return stack.enter_context(opened(tree, path))
    except OSError as error:
        # No errno: `opened` raises so for a file that is no longer regular.
        if error.errno is None or error.errno in _GONE:
            raise torn(tree, path) from error
        raise _unreadable(tree, path, error) from error


def _piece(tree: ModelTree, path: str, file: int) -> bytes:
    try:
        return os.read(file, _PIECE_BYTES)
    except OSError as error:
        raise _unreadable(tree, path, error) from error


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
