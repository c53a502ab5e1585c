"""RecordingWriter: writes what is in memory and wanted into files, one after another."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_server.pipeline.recorder.mcap_writer import McapWriter
from edge_server.pipeline.recorder.recording_files import DRIVE, OVERHEAD_BYTES, with_cause

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from edge_server.board.identity import Identity
    from edge_server.pipeline.recorder.messages import Ring
    from edge_server.pipeline.recorder.recording_files import RecordingFiles
    from edge_server.settings import RecorderSection

log = logging.getLogger(__name__)

_SYNC_S = 1.0
_RETRY_S = 5.0
# Frames from before an end may still be with the encoder.
_LATE_NS = 500_000_000


class Reply:
    """The name of the file that a caller waits for, or why there is none."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.name = ""
        self.fault = ""


@dataclass
class Trigger:
    """What shall be written: from `start_ns` to `until_ns`, `time.monotonic_ns()`.

    Attributes:
        cause: part of the file's name; likewise `about` of its metadata.
        reply: to the caller; None for an event.
    """

    start_ns: int
    until_ns: int
    cause: str
    about: dict[str, str]
    reply: Reply | None = None


class RecordingWriter:
    """Writes the entries of a ring that triggers want, or in mode `continuous` all; for one thread.

    A disk that is full or broken stops the recording alone, and the log says so; it goes on once
    the disk takes something again.

    Attributes:
        lost: number of frames and events that no longer were in memory when the disk was ready; the
            open chunk of a file that the disk broke off is not counted.
        failure: why nothing is written now; "" while the disk takes what there is.
        written_bytes: of the completed files.

    Args:
        section: mode and times.
        files: where.
        identity: of this device.
        ring: what there is to write.
        clock_ns: as `time.monotonic_ns`.
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
        self._replies: list[Reply] = []
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
                reply.fault = fault
            else:
                reply.name = with_cause(self._file.path.name, self._file_cause)
            reply.done.set()
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
                self._try_disk(now_ns)
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
        if self.failure and self._file is None:
            self._try_disk(now_ns)
        elif self.failure:
            self._go_on("written again")

    def _try_disk(self, now_ns: int) -> None:
        """End a failure although there is nothing to write: nobody shall take it for a present one.

        Raises:
            OSError: the disk still takes nothing.
        """
        reason = self._files.make_room(0, 2 * OVERHEAD_BYTES)
        if reason:
            self._fail(reason, now_ns)
            return
        self._files.try_writing()
        self._go_on("the disk takes recordings again")

    def _go_on(self, text: str) -> None:
        """Note that the failure is over, and make whole what it left."""
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
        file, self._file = self._file, None
        if file is not None:
            try:
                self._files.add(file.finish(with_cause(file.path.name, self._file_cause)))
            except OSError:
                file.abandon()
                self._files.add(file.part)
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
                reply.fault = "it stops"
                reply.done.set()
