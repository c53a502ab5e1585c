"""Trace files in Triton's JSON form."""

from __future__ import annotations

import errno
import logging
import os
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from edge_server.process.disk import error_of_place

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_server.inference.tracing.sampling import Sampler

log = logging.getLogger(__name__)

# Limit of all files together; no person clears the disk of an appliance.
MOST_BYTES = 64 * 1024 * 1024
# The disk space of the smallest file.
_BLOCK_BYTES = 4096

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_HEAD, _BETWEEN, _TAIL = b"[\n", b",\n", b"\n]\n"


class TraceFile:
    """Appends traces to `path`, or to `path.0`, `path.1`, … where a limited number share a file.

    Each file is a whole JSON array after every write, so that any end of the process costs only
    the unwritten traces. Files of an earlier run stay until the first trace for the same file.
    They all count towards the limit. Not thread-safe.

    Args:
        path: the file; its directory must exist.
        most_bytes: limit of all files together.

    Raises:
        Unavailable: `path` is not writable; the text names the path and the remedy.
    """

    def __init__(self, path: str, most_bytes: int = MOST_BYTES) -> None:
        self.path = Path(path).absolute()
        self.full = False
        self._most_bytes = most_bytes
        self._parts: WeakKeyDictionary[Sampler, _Part] = WeakKeyDictionary()
        self._next_part = 0
        self._begun: set[Path] = set()
        self._failed = False
        try:
            self._prove()
            self._sizes = self._find()
        except OSError as error:
            what = "is a link" if error.errno == errno.ELOOP else error.strerror
            raise error_of_place(
                error,
                f"trace.file: {path}: {what}; give a path in a directory that this user may write "
                "to (--trace-config triton,file=FILE)",
            ) from error
        self._used_bytes = sum(map(_on_disk, self._sizes.values()))

    def write(self, sampler: Sampler, elements: bytes) -> bool:
        """Append the elements of one traced request; True where they were written.

        Where the disk or the space for traces is full, the log reports that once.
        """
        if self.full:
            return False
        path = self._path_for(sampler)
        try:
            self._append(path, elements)
        except _Full:
            self.full = True
            log.warning(
                "trace %s: no more traces: its files have %d MiB; move them away and start anew",
                self.path,
                self._most_bytes >> 20,
            )
        except OSError as error:
            if not self._failed:
                self._failed = True
                log.warning("trace %s: traces are lost: %s", path, error.strerror)
        else:
            return True
        return False

    def _prove(self) -> None:
        """Raises: OSError: `path` is not writable."""
        was_there = os.path.lexists(self.path)
        with _opened(self.path):
            if not was_there:
                # An empty file is not valid JSON; the first trace creates the file.
                self.path.unlink()

    def _find(self) -> dict[Path, int]:
        """The files of earlier runs and their sizes."""
        name = self.path.name
        found = {}
        with os.scandir(self.path.parent) as entries:
            for entry in entries:
                number = entry.name.removeprefix(f"{name}.")
                if entry.name == name or (number != entry.name and number.isdecimal()):
                    found[self.path.with_name(entry.name)] = entry.stat(
                        follow_symlinks=False
                    ).st_size
        return found

    def _path_for(self, sampler: Sampler) -> Path:
        if not sampler.rule.log_frequency:
            return self.path
        part = self._parts.get(sampler)
        if part is None or part.traces == sampler.rule.log_frequency:
            path = self.path.with_name(f"{self.path.name}.{self._next_part}")
            part = self._parts[sampler] = _Part(path)
            self._next_part += 1
        part.traces += 1
        return part.path

    def _append(self, path: Path, elements: bytes) -> None:
        """Raises: OSError, _Full: nothing was written, and the file's old content is whole."""
        with _opened(path) as descriptor:
            size = os.fstat(descriptor).st_size
            goes_on = path in self._begun and size == self._sizes[path] > 0
            at = size - len(_TAIL) if goes_on else 0
            data = (_BETWEEN if goes_on else _HEAD) + elements + _TAIL
            more_bytes = _on_disk(at + len(data)) - _on_disk(self._sizes.get(path, 0))
            if self._used_bytes + more_bytes > self._most_bytes:
                if not size:
                    path.unlink()
                raise _Full
            if not goes_on:
                os.ftruncate(descriptor, 0)
                self._begun.add(path)
                self._count(path, 0)
            try:
                _write_all(descriptor, data, at)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(descriptor, at)
                    if goes_on:
                        _write_all(descriptor, _TAIL, at)
                    else:
                        path.unlink()
                raise
            self._count(path, at + len(data))

    def _count(self, path: Path, size: int) -> None:
        self._used_bytes += _on_disk(size) - _on_disk(self._sizes.get(path, 0))
        self._sizes[path] = size


class _Full(Exception):
    """The limit of trace bytes is reached."""


class _Part:
    """One numbered file, and its number of traces."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.traces = 0


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Raises: OSError: the file cannot be opened, or is no regular file."""
    descriptor = os.open(path, _FLAGS, 0o640)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no plain file")
        yield descriptor
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes, at: int) -> None:
    written = os.pwrite(descriptor, data, at)
    if written < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _on_disk(size: int) -> int:
    """Bytes in whole blocks."""
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
