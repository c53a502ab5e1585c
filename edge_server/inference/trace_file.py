"""Trace files in Triton's JSON form, and the thread that writes them."""

from __future__ import annotations

import errno
import logging
import os
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from edge_server.inference.tracing import TraceQueue
from edge_server.process.disk import error_of_place

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_server.inference.tracing import Sampler, TracedRequest

log = logging.getLogger(__name__)

# Limit of all files together; no person clears the disk of an appliance.
MOST_BYTES = 64 * 1024 * 1024
# The disk space of the smallest file.
_BLOCK_BYTES = 4096
# The limit of traces that wait to be written: requests beyond it are dropped and counted.
MOST_WAITING = 10_000
_GATHER_S = 0.1

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_HEAD, _BETWEEN, _TAIL = b"[\n", b",\n", b"\n]\n"


class TraceFile:
    """Appends traces to `path`, or to `path.0`, `path.1`, … where a limited number share a file.

    Each file is a whole JSON array after every write, so that any end of the process costs only
    the unwritten traces. Files of an earlier run stay until the first trace for the same file.
    They all count towards the limit. Not thread-safe.

    Raises: Unavailable: `path` is not writable; the text names the path and the remedy.
    """

    def __init__(self, path: str, most_bytes: int = MOST_BYTES) -> None:
        # As clients are told; the working directory may change later.
        self.name = path
        self.path = Path(path).absolute()
        self.full = False
        self._most_bytes = most_bytes
        # The numbered file of each sampler, and its number of traces.
        self._parts: WeakKeyDictionary[Sampler, tuple[Path, int]] = WeakKeyDictionary()
        self._next_part = 0
        self._begun: set[Path] = set()
        self._failed = False
        try:
            self._check_writable()
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
            self.full = not self._append(path, elements)
        except OSError as error:
            if not self._failed:
                self._failed = True
                log.warning("trace %s: traces are lost: %s", path, error.strerror)
            return False
        if self.full:
            log.warning(
                "trace %s: no more traces: its files have %d MiB; move them away and start anew",
                self.path,
                self._most_bytes >> 20,
            )
        return not self.full

    def _check_writable(self) -> None:
        was_there = os.path.lexists(self.path)
        with _opened(self.path):
            if not was_there:
                # An empty file is not valid JSON; the first trace creates the file.
                self.path.unlink()

    def _find(self) -> dict[Path, int]:
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
        path, traces = self._parts.get(sampler, (self.path, sampler.rule.log_frequency))
        if traces == sampler.rule.log_frequency:
            path, traces = self.path.with_name(f"{self.path.name}.{self._next_part}"), 0
            self._next_part += 1
        self._parts[sampler] = (path, traces + 1)
        return path

    def _append(self, path: Path, elements: bytes) -> bool:
        """False, or an OSError: nothing was written, and the file's old content is whole."""
        with _opened(path) as descriptor:
            size = os.fstat(descriptor).st_size
            goes_on = path in self._begun and size == self._sizes[path] > 0
            at = size - len(_TAIL) if goes_on else 0
            data = (_BETWEEN if goes_on else _HEAD) + elements + _TAIL
            more_bytes = _on_disk(at + len(data)) - _on_disk(self._sizes.get(path, 0))
            if self._used_bytes + more_bytes > self._most_bytes:
                if not size:
                    path.unlink()
                return False
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
            return True

    def _count(self, path: Path, size: int) -> None:
        self._used_bytes += _on_disk(size) - _on_disk(self._sizes.get(path, 0))
        self._sizes[path] = size


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
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


class TraceWriter(TraceQueue["TracedRequest"]):
    """Takes finished traced requests from any thread and writes them in their order."""

    def __init__(self, file: TraceFile) -> None:
        super().__init__("trace", _GATHER_S)
        self._file = file
        self._written = 0

    @property
    def file_name(self) -> str:
        return self._file.name

    @property
    def full(self) -> bool:
        """Whether writing has ended: the writer is stopped or the trace files are full."""
        return self._closed or self._file.full

    def stop(self, timeout_s: float = 1.0) -> None:
        super().stop(timeout_s)
        if self._written or self.dropped:
            log.info(
                "trace %s: %d requests written, %d dropped",
                self._file.path,
                self._written,
                self.dropped,
            )

    def put(self, request: TracedRequest) -> None:
        if not self._enqueue(request, len(request), MOST_WAITING):
            with self._news:
                self.dropped += 1

    def write(self, now: float) -> None:
        del now
        self.end()

    def end(self) -> None:
        while (request := self._next()) is not None:
            sampler = request.sampler
            written = sampler is not None and self._file.write(sampler, request.written())
            with self._news:
                self._written += written
                self.dropped += not written
