"""RecordingWriter: writes what is in memory and wanted into files, one after another."""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from edge_server.errors import Unavailable
from edge_server.pipeline.recorder.mcap_writer import PART, RECOVERING, McapWriter, recover
from edge_server.process.disk import (
    error_of_place,
    floor_bytes,
    free_bytes,
    lock_directory,
    open_regular,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from edge_server.board.board import Identity
    from edge_server.pipeline.recorder.mcap_writer import Ring
    from edge_server.settings import RecorderSection

log = logging.getLogger(__name__)

# The cause of a file that no event is about.
DRIVE = "drive"
_NAME = re.compile(r"(\d{8})-[0-9a-z]{1,8}-\d{8}T\d{6}Z-([a-z0-9_-]+)\.mcap(?:\.part)?")
_NO_WORD = re.compile(r"[^a-z0-9_-]+")
_LONGEST_CAUSE = 60
# Of what a file has beside its messages: chunk headers, indexes, the summary.
OVERHEAD_BYTES = 1 << 20


class RecordingFiles:
    """The recordings in a directory that is this daemon's alone; for one thread.

    Names have a number that counts the recordings, across restarts too, the boot, the time in UTC
    and the cause: they sort by age whatever the clock shows. Files that are of no event go first
    where space is needed, and the oldest first; files of events are kept longer, up to half of
    `most_bytes`. Other files in the directory are not touched.

    Args:
        directory: is made where it is missing.
        most_bytes: the recordings never take more, the one that is being written included.
        reserve_bytes: free space that they leave on the disk; see `floor_bytes`.

    Raises:
        SettingsError, Unavailable: the directory cannot be made or written to, or is another
            daemon's.
    """

    def __init__(
        self,
        directory: Path,
        boot_id: str,
        *,
        most_bytes: int,
        reserve_bytes: int,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        self.directory = directory
        self.most_bytes = most_bytes
        self._boot = boot_id.replace("-", "")[:8]
        self._free = free
        self._sizes: dict[Path, int] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = lock_directory(directory)
            self._floor_bytes = floor_bytes(directory, reserve_bytes)
            for path in directory.iterdir():
                if path.name.endswith(RECOVERING):
                    path.unlink()
                elif _NAME.fullmatch(path.name):
                    self._sizes[path] = path.stat().st_size
        except BlockingIOError as error:
            raise error_of_place(
                error,
                f"recorder.directory: {directory}: another daemon records there; give this one "
                "a directory of its own",
            ) from error
        except OSError as error:
            raise error_of_place(
                error,
                f"recorder.directory: {directory}: {error.strerror}; give a directory that this "
                "user may write to",
            ) from error
        self._next = 1 + max((_number_of(path) for path in self._sizes), default=0)

    def close(self) -> None:
        os.close(self._lock)

    def listed(self) -> list[tuple[str, int]]:
        """Return the names of the whole recordings and their sizes in bytes, the newest first; safe
        from any thread.

        Raises:
            OSError: the directory cannot be read.
        """
        found = []
        for path in sorted(self.directory.iterdir(), reverse=True):
            if _NAME.fullmatch(path.name) and not path.name.endswith(PART):
                with suppress(OSError):  # deleted since
                    found.append((path.name, path.stat().st_size))
        return found

    def open(self, name: str) -> BinaryIO:
        """Open a whole recording; safe from any thread.

        Raises:
            OSError: there is none of that name, or it cannot be read.
        """
        if not _NAME.fullmatch(name) or name.endswith(PART):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return os.fdopen(open_regular(self.directory / name), "rb")

    @property
    def used_bytes(self) -> int:
        """Of all whole recordings, and of those that a crash left."""
        return sum(self._sizes.values())

    def new_path(self, cause: str, epoch_s: float) -> Path:
        """Return the path of a new recording."""
        number, self._next = self._next, self._next + 1
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(epoch_s))
        return self.directory / f"{number:08}-{self._boot}-{moment}-{as_cause(cause)}.mcap"

    def add(self, path: Path) -> None:
        """Count a recording that was just completed, or left."""
        with suppress(OSError):
            self._sizes[path] = path.stat().st_size

    def pin(self, path: Path, cause: str) -> None:
        """Keep a recording as one of an event; does nothing where it is one, or is gone."""
        if path not in self._sizes or _cause_of(path) != DRIVE:
            return
        pinned = path.with_name(with_cause(path.name, cause))
        with suppress(OSError):
            path.rename(pinned)
            self._sizes[pinned] = self._sizes.pop(path)

    def make_room(self, writing_bytes: int, more_bytes: int, keep: Path | None = None) -> str:
        """Delete recordings until `more_bytes` fit; return why they do not fit, or "".

        Raises:
            OSError: the disk does not report its free space.
        """

        def lacks() -> str:
            if self._free(self.directory) < self._floor_bytes + more_bytes:
                return f"the disk has less than {self._floor_bytes >> 20} MiB free"
            if self.used_bytes + writing_bytes + more_bytes > self.most_bytes:
                return "the files of events take all of recorder.max_bytes"
            return ""

        if not lacks():
            return ""
        # Somebody may have moved recordings to another machine.
        self._sizes = {path: size for path, size in self._sizes.items() if path.exists()}
        for path in self._deletable():
            if not lacks():
                return ""
            if path != keep:
                path.unlink(missing_ok=True)
                del self._sizes[path]
                log.debug("recorder: %s deleted, to make room", path.name)
        return lacks()

    def try_writing(self) -> None:
        """Write a block, and remove it.

        Raises:
            OSError: the disk is full, or failed.
        """
        path = self.directory / ".try"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, bytes(4096))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            path.unlink()

    def recover(self) -> None:
        """Make whole recordings of those that a crash left; a fault of the disk leaves them, and so
        does a disk without room for a second one of its size."""
        for part in sorted(path for path in self._sizes if path.name.endswith(PART)):
            try:
                if reason := self.make_room(0, self._sizes[part] + OVERHEAD_BYTES, keep=part):
                    log.error("recorder: %s: not recovered now: %s", part.name, reason)
                    continue
                whole = recover(part)
            except OSError as error:
                log.error("recorder: %s: cannot be recovered: %s", part.name, error.strerror)  # noqa: TRY400 -- the text says it all
                continue
            del self._sizes[part]
            if whole is not None:
                self.add(whole)
                log.info("recorder: %s: recovered, %d bytes", whole.name, self._sizes[whole])

    def _deletable(self) -> list[Path]:
        """Return the recordings that may go, in their order: those of no event, then those of
        events beyond half of the space."""
        by_age = sorted(self._sizes, key=_number_of)
        unpinned = [path for path in by_age if _cause_of(path) == DRIVE]
        left = self.most_bytes // 2
        beyond: list[Path] = []
        for path in reversed(by_age):
            if _cause_of(path) != DRIVE:
                left -= self._sizes[path]
                if left < 0:
                    beyond.insert(0, path)
        return unpinned + beyond


def as_cause(text: str) -> str:
    """Return `text` as a name may have it."""
    return _NO_WORD.sub("-", text.lower()).strip("-")[:_LONGEST_CAUSE] or "unknown"


def with_cause(name: str, cause: str) -> str:
    """Return the name of a recording with another cause."""
    number, boot, moment, _ = name.split("-", 3)
    return f"{number}-{boot}-{moment}-{as_cause(cause)}.mcap"


def _number_of(path: Path) -> int:
    return int(path.name[:8])


def _cause_of(path: Path) -> str:
    found = _NAME.fullmatch(path.name)
    return "" if found is None else found[2]


_SYNC_S = 1.0
_RETRY_S = 5.0
# Frames from before an end may still be with the encoder.
_LATE_NS = 500_000_000


@dataclass
class Trigger:
    """What shall be written: from `start_ns` to `until_ns`, `time.monotonic_ns()`.

    Attributes:
        cause: part of the file's name; likewise `about` of its metadata.
        reply: to the caller, with the file's name; None for an event.
    """

    start_ns: int
    until_ns: int
    cause: str
    about: dict[str, str]
    reply: Future[str] | None = None


class RecordingWriter:
    """Writes the entries of a ring that triggers want, or in mode `continuous` all; for one thread.

    A disk that is full or broken stops the recording alone, and the log says so; it goes on once
    the disk takes something again.

    Attributes:
        lost: number of frames and events that no longer were in memory when the disk was ready; the
            open chunk of a file that the disk broke off is not counted.
        failure: why nothing is written now; "" while the disk takes what there is.
    """

    def __init__(
        self,
        section: RecorderSection,
        files: RecordingFiles,
        identity: Identity,
        ring: Ring,
        clock_ns: Callable[[], int],
    ) -> None:
        self.lost = 0
        self.failure = ""
        self.written_bytes = 0
        self._section = section
        self._files = files
        self._identity = identity
        self._ring = ring
        self._clock_ns = clock_ns
        self._file: McapWriter | None = None
        self._file_began_ns = 0
        self._file_cause = DRIVE
        self._previous: Path | None = None  # the file before, with the end of its time
        self._previous_until_ns = 0
        self._written = 0  # number of the entry that was written last
        self._wanted: Trigger | None = None
        self._replies: list[Future[str]] = []
        self._sync_at_ns = 0
        self._retry_at_ns = 0

    def write(self, triggers: Sequence[Trigger]) -> None:
        """Write what is new and wanted, by `triggers` too, and answer their callers."""
        for trigger in triggers:
            self._want(trigger)
            if trigger.reply is not None:
                self._replies.append(trigger.reply)
        self._write_now()
        self._answer()

    def _want(self, trigger: Trigger) -> None:
        """Have `trigger` written, with what is written already."""
        wanted = self._wanted
        if wanted is None:
            self._wanted = trigger
        else:
            wanted.until_ns = max(wanted.until_ns, trigger.until_ns)
        if self._file is None and self._section.mode == "events":
            self._written = max(self._written, self._ring.before(trigger.start_ns))
        elif self._file_cause == DRIVE:
            self._file_cause = trigger.cause
        if self._previous is not None and trigger.start_ns < self._previous_until_ns:
            self._files.pin(self._previous, trigger.cause)
            self._previous = None

    def _answer(self) -> None:
        """Answer the requests once their file has begun, or cannot."""
        fault = self.failure or ("" if self._wanted is not None else "no camera gave a frame")
        if self._file is None and not fault:
            return
        for reply in self._replies:
            if self._file is None:
                reply.set_exception(Unavailable(f"recorder: {fault}"))
            else:
                reply.set_result(with_cause(self._file.path.name, self._file_cause))
        self._replies.clear()

    def _write_now(self) -> None:
        now_ns = self._clock_ns()
        try:
            self._write_entries(now_ns)
            if self._wanted is not None and now_ns >= self._wanted.until_ns + _LATE_NS:
                self._wanted = None
                if self._section.mode == "events":
                    self._finish(now_ns)
            if self._file is not None and now_ns >= self._sync_at_ns:
                self._sync_at_ns = now_ns + round(_SYNC_S * 1e9)
                self._file.sync()
        except OSError as error:
            self._fail(f"the disk: {error.strerror or error}", now_ns)

    def _write_entries(self, now_ns: int) -> None:
        """Write what is in memory and was not written, into as many files as it takes.

        Raises:
            OSError: the disk is full, or failed.
        """
        if self._section.mode == "events" and self._wanted is None:
            if self.failure and now_ns >= self._retry_at_ns:
                self._go_on(now_ns)
            return
        if self._file is None and now_ns < self._retry_at_ns:
            return
        for entry in self._ring.after(self._written):
            if self._section.mode == "events" and (
                self._wanted is None or entry.mono_ns > self._wanted.until_ns
            ):
                break
            reason = self._files.make_room(
                0 if self._file is None else self._file.size,
                entry.size_bytes + 2 * OVERHEAD_BYTES,
            )
            if reason:
                self._fail(reason, now_ns)
                return
            if self._file is not None and self._is_full(entry.mono_ns):
                self._finish(entry.mono_ns)
            if self._file is None:
                self._begin(entry.mono_ns)
            assert self._file is not None  # noqa: S101  # for the type checker: it has begun
            self.lost += entry.number - self._written - 1
            for message in entry.messages:
                self._file.write(message)
            self._written = entry.number
        if self.failure:
            self._go_on(now_ns)

    def _go_on(self, now_ns: int) -> None:
        """End a failure where the disk takes something again, and make whole what it left.

        Raises:
            OSError: the disk still takes nothing.
        """
        text = "written again"
        if self._file is None:  # there is nothing to write
            if reason := self._files.make_room(0, 2 * OVERHEAD_BYTES):
                self._fail(reason, now_ns)
                return
            self._files.try_writing()
            text = "the disk takes recordings again"
        log.info("recorder: %s", text)
        self.failure = ""
        self._files.recover()

    def _is_full(self, mono_ns: int) -> bool:
        assert self._file is not None  # noqa: S101  # for the type checker: the caller has seen it
        # A quarter, so that there is something to delete.
        return (
            mono_ns - self._file_began_ns >= self._section.file_s * 1e9
            or self._file.size > self._files.most_bytes // 4
        )

    def _begin(self, mono_ns: int) -> None:
        wanted = self._wanted
        if wanted is not None and mono_ns > wanted.until_ns:
            wanted = None
        self._file_cause = DRIVE if wanted is None else wanted.cause
        self._file_began_ns = mono_ns
        about = {
            "device": self._identity.device,
            "version": self._identity.version,
            "boot_id": self._identity.boot_id,
            "cause": self._file_cause,
            **({} if wanted is None else wanted.about),
        }
        path = self._files.new_path(self._file_cause, time.time())
        self._file = McapWriter(path, about)

    def _finish(self, mono_ns: int) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            path = file.finish(with_cause(file.path.name, self._file_cause))
        except OSError:
            file.abandon()
            self._files.add(file.part)
            raise
        self._files.add(path)
        self.written_bytes += file.size
        self._previous, self._previous_until_ns = path, mono_ns
        seconds = (mono_ns - self._file_began_ns) / 1e9
        log.info("recorder: %s: %.1f s, %.1f MB", path.name, seconds, file.size / 1e6)

    def _fail(self, reason: str, now_ns: int) -> None:
        """Record nothing for a while; the log says so once."""
        self._retry_at_ns = now_ns + round(_RETRY_S * 1e9)
        with suppress(OSError):
            self._finish(now_ns)
        if reason != self.failure:
            log.error("recorder: nothing is recorded: %s; lanes go on", reason)
        self.failure = reason

    def end(self, unanswered: Sequence[Trigger]) -> None:
        """Complete the file, and answer who waits, those of `unanswered` too."""
        self._write_now()
        try:
            self._finish(self._clock_ns())
        except OSError as error:
            log.error("recorder: the last file is not complete: %s", error.strerror)  # noqa: TRY400 -- the text says it all
        waiting = [request.reply for request in unanswered]
        for reply in (*self._replies, *waiting):
            if reply is not None:
                reply.set_exception(Unavailable("recorder: it stops"))
