"""A model on its way: its directories and files one after another, also as a tar archive."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_server.errors import ModelConfigError
from edge_server.repository.content import PIECE_BYTES, reading, require_unchanged
from edge_server.repository.manifest import NAME, SIGNATURE_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
    from typing import BinaryIO

    from edge_server.repository.tree import ModelTree

_BLOCK_BYTES = tarfile.BLOCKSIZE
_LONGEST_PATH_BYTES = 1 << 16
BROKEN = "the connection broke, or the other side ended early; try again"


class BrokenArchive(ModelConfigError):
    """An archive is cut off or damaged."""


@dataclass(frozen=True)
class Entry:
    """A directory or a file of a model.

    Attributes:
        path: the path relative to the model's directory.
        read: returns the next bytes of the file, at most so many; None for a directory.
        size: the size of the file in bytes.
        mtime_ns: its modification time.
        executable: True if the file may be executed.
    """

    path: str
    read: Callable[[int], bytes] | None = None
    size: int = 0
    mtime_ns: int = 0
    executable: bool = False

    @staticmethod
    def of(path: str, data: bytes, mtime_ns: int = 0) -> Entry:
        """Return the file with content `data` at `path`."""
        return Entry(path, io.BytesIO(data).read, len(data), mtime_ns)

    def pieces(self) -> Iterator[bytes]:
        """Return the content of the file, exactly `size` bytes, in pieces.

        Raises:
            ModelConfigError: the content ends early.
        """
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

    Args:
        tree: the scanned model.
        only: returns False for a path that is left out.
        progress: called with the number of bytes after each read.

    Raises:
        ModelConfigError: the model is unusable or cannot be read, or has changed since the scan.
    """
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
    """Write `entries` as a tar archive to a stream that need not seek.

    Raises:
        ModelConfigError: an entry ends early.
        OSError: the stream cannot be written.
    """
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
    """Return the entries of a tar archive; each is to be read before the next one.

    No entry has more than a block in memory, however long its header claims to be.

    Raises:
        BrokenArchive: the archive is cut off or damaged.
        ModelConfigError: the archive has an entry that is neither a file nor a directory.
    """

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
        if is_name and 0 <= header.size <= _LONGEST_PATH_BYTES:
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
