"""Models in tar and zip archives that nobody vouches for.

Only files and directories come out: no links, no devices, no path that leaves the model, no more
bytes than a model may have, and none that a small archive could hardly hold. `Incoming.take` checks
each path again.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import stat
import tarfile
import zipfile
import zlib
from contextlib import contextmanager
from functools import partial
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from edge_server.errors import ModelConfigError
from edge_server.model_config.files import CONFIG_NAME
from edge_server.repository.manifest import NAME
from edge_server.repository.transfer.entries import BrokenArchive, Entry
from edge_server.repository.tree import MOST_BYTES, MOST_FILES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# Weights hardly shrink, and zeros a thousandfold: a bomb is refused before it is unpacked. Small
# archives of text shrink well.
_MOST_RATIO = 100
_ALWAYS_BYTES = 64 << 20
# tarfile reads a header of any length into memory, and keeps it; those of a model are a block for
# each file, and with a long name three or four.
_LONGEST_READ_BYTES = 4 << 20
_LONGEST_HEADER_BYTES = 256 << 10
_MOST_HEADERS_BYTES = 2048 * MOST_FILES + _LONGEST_HEADER_BYTES
_OPENERS: tuple[tuple[bytes, Callable[..., Any]], ...] = (
    (b"\x1f\x8b", gzip.open),
    (b"\xfd7zXZ", lzma.open),
    (b"BZh", bz2.open),
    (b"", open),
)
_BROKEN = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    OSError,
    ValueError,
)


class _Member(NamedTuple):
    path: str
    size: int
    is_directory: bool
    executable: bool
    source: Any


def archive_entries(path: Path) -> Iterator[Entry]:
    """Yield the directories and files of the model in the archive at `path`, the manifest first.

    The model is what lies beside its config.pbtxt, or beside version directories; directories above
    it are left out. Each entry is to be read before the next.

    Raises:
        ModelConfigError: the archive is damaged, holds anything but one model, or is too large.
    """
    with _naming(path), _opened(path) as (members, read):
        root = _root(path, members)
        for member in sorted(members, key=lambda each: each.path != f"{root}{NAME}"):
            inside = member.path.removeprefix(root)
            if not member.is_directory:
                with read(member) as file:
                    pieces = partial(_read, path, file)
                    yield Entry(inside, pieces, member.size, 0, member.executable)
            elif member.path.startswith(root):
                yield Entry(inside)


def _read(path: Path, file: IO[bytes], size: int) -> bytes:
    with _naming(path):
        return file.read(size)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn what a damaged archive raises into an error that names it."""
    try:
        yield
    except _BROKEN as error:
        raise BrokenArchive(f"{path.name}: is damaged: {error}; fetch it again") from error
    except (RuntimeError, NotImplementedError) as error:
        raise ModelConfigError(f"{path.name}: cannot be unpacked: {error}") from error


@contextmanager
def _opened(path: Path) -> Iterator[tuple[list[_Member], Callable[[_Member], Any]]]:
    """Open the archive; yield its members, checked, and what opens one of them."""
    limit = max(_ALWAYS_BYTES, _MOST_RATIO * path.stat().st_size)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            found = list(_checked(path, limit, map(_of_zip, archive.infolist())))
            yield found, lambda member: archive.open(member.source)
        return
    with path.open("rb") as file:
        first = file.read(8)
    opener = next(each for magic, each in _OPENERS if first.startswith(magic))
    with opener(path, "rb") as plain:
        careful = _Careful(plain)
        tar = tarfile.open(fileobj=cast("IO[bytes]", careful), mode="r:")  # noqa: SIM115 - of `plain`
        found = list(_checked(path, limit, map(_of_tar, tar)))
        careful.reads_headers = False

        def read(member: _Member) -> Any:
            return tar.extractfile(member.source)

        yield found, read


class _Careful:
    """A file that refuses to be read into memory in one piece larger than any header may be, and
    in more pieces than the headers of a model are.

    Attributes:
        reads_headers: set until all of them are read, and counts.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell
        self.reads_headers = True
        self._left = _MOST_HEADERS_BYTES

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= (_LONGEST_HEADER_BYTES if self.reads_headers else _LONGEST_READ_BYTES):
            raise tarfile.ReadError(f"a header of {size} bytes")
        if self.reads_headers:
            self._left -= size
            if self._left < 0:
                raise tarfile.ReadError(f"headers of more than {_MOST_HEADERS_BYTES} bytes")
        return self._file.read(size)


def _of_zip(info: zipfile.ZipInfo) -> _Member:
    mode = info.external_attr >> 16
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise ModelConfigError(f"{info.filename[:200]!r} is neither a file nor a directory")
    runs = bool(mode & stat.S_IXUSR)
    return _Member(info.filename, info.file_size, info.is_dir(), runs, info)


def _of_tar(info: tarfile.TarInfo) -> _Member:
    if not (info.isdir() or info.type in (tarfile.REGTYPE, tarfile.AREGTYPE)):
        raise ModelConfigError(f"{info.name[:200]!r} is neither a file nor a directory")
    runs = bool(info.mode & stat.S_IXUSR)
    # Each member has a copy of the archive's own headers, as many as they are.
    info.pax_headers = {}
    return _Member(info.name, info.size, info.isdir(), runs, info)


def _checked(path: Path, limit: int, members: Iterator[_Member]) -> Iterator[_Member]:
    """Yield the members, with plain paths, as long as they stay within the limits."""
    size = 0
    for count, member in enumerate(members):
        size += member.size
        if count >= MOST_FILES or size > min(limit, MOST_BYTES) or member.size < 0:
            raise ModelConfigError(
                f"{path.name}: more than {MOST_FILES} files, or {size} bytes of "
                f"{path.stat().st_size}; is it a model?"
            )
        plain = member.path.removeprefix("./").rstrip("/")
        parts = plain.split("/")
        if plain.startswith("/") or ".." in parts or "\\" in plain or "\0" in plain:
            raise ModelConfigError(
                f"{path.name}: {member.path[:200]!r} leads out of the model; nothing was taken"
            )
        if plain and plain != ".":
            yield member._replace(path=plain)


def _root(path: Path, members: list[_Member]) -> str:
    """Return the directory of the model in the archive, with a `/`, or "" for the archive itself.

    Raises:
        ModelConfigError: there is none, or files lie outside of it.
    """
    folders = {
        member.path.removesuffix(CONFIG_NAME)
        for member in members
        if member.path == CONFIG_NAME or member.path.endswith(f"/{CONFIG_NAME}")
    }
    for member in members:
        parts = member.path.split("/")
        version = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if (
            not folders
            and version is not None
            and (member.is_directory or len(parts) > version + 1)
        ):
            folders = {"".join(f"{part}/" for part in parts[:version])}
    if not folders:
        raise ModelConfigError(f"{path.name}: holds no model: neither {CONFIG_NAME} nor a version")
    root = min(folders, key=len)
    outside = [m for m in members if not f"{m.path}/".startswith(root) and not m.is_directory]
    if outside:
        raise ModelConfigError(
            f"{path.name}: {outside[0].path[:200]!r} lies outside of {root or 'the model'}; an "
            "archive holds one model"
        )
    return root
