"""Recorder: keeps the last seconds in memory, and writes them around events, or all the time."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_server.errors import Unavailable
from edge_server.pipeline.recorder.mcap_writer import McapWriter
from edge_server.pipeline.recorder.messages import Arrival, FrameMessages
from edge_server.pipeline.recorder.recording_files import DRIVE, with_cause
from edge_server.pipeline.recorder.ring import Ring
from edge_server.process.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from edge_server.board.identity import Identity
    from edge_server.cameras.calibration import Calibration
    from edge_server.cameras.frame import Frame
    from edge_server.lanes.types import LaneFrame
    from edge_server.pipeline.event_log import EventLog
    from edge_server.pipeline.recorder.recording_files import RecordingFiles
    from edge_server.settings import RecorderSection

log = logging.getLogger(__name__)

# Frames of all cameras that wait to be encoded. Each may hold a buffer of its camera's driver.
_MOST_WAITING = 4
_LOOK_S = 0.2
# A disk that hangs for so long costs no frame, as far as the memory goes.
_DISK_SLACK_S = 5.0
_SYNC_S = 1.0
_RETRY_S = 5.0
# Of what a file has beside its messages: chunk headers, indexes, the summary.
_OVERHEAD_BYTES = 1 << 20
_ANSWER_S = 5.0
# Frames from before an end may still be with the encoder.
_LATE_NS = 500_000_000


class _Reply:
    """The name of the file that a caller waits for, or why there is none."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.name = ""
        self.fault = ""


@dataclass
class _Trigger:
    """What shall be written: from `start_ns` to `until_ns`, `time.monotonic_ns()`.

    Attributes:
        cause: part of the file's name; likewise `about` of its metadata.
        reply: to the caller; None for an event.
    """

    start_ns: int
    until_ns: int
    cause: str
    about: dict[str, str]
    reply: _Reply | None = None


class Recorder:
    """Records what the pipelines of the cameras give; a listener of theirs.

    A call returns at once: pictures are encoded on one thread and written by another. Where the
    encoder is late, the newest frame is dropped and counted. A disk that is full or broken stops
    the recording alone, and the log says so; it goes on once the disk takes something again.

    Attributes:
        dropped: number of frames that the encoder had no time for.
        lost: number of frames and events that no longer were in memory when the disk was ready; the
            open chunk of a file that the disk broke off is not counted.
        failure: why nothing is written now; "" while the disk takes what there is.
        written_bytes: of the completed files.
        workers: the encoder's and the writer's.

    Args:
        section: mode, times and what is recorded.
        files: where; closed at the end.
        identity: of this device.
        events: of this device.
        calibration: returns that of a camera, by its name.
        clock_ns: as `time.monotonic_ns`.
    """

    def __init__(
        self,
        section: RecorderSection,
        files: RecordingFiles,
        identity: Identity,
        events: EventLog,
        calibration: Callable[[str], Calibration | None],
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.dropped = 0
        self.lost = 0
        self.failure = ""
        self.written_bytes = 0
        self._section = section
        self._files = files
        self._identity = identity
        self._events = events
        self._clock_ns = clock_ns
        self._frame_messages = FrameMessages(
            identity, section.jpeg_quality, section.width, calibration
        )
        self._ring = Ring(section.before_s + _DISK_SLACK_S, section.memory_bytes)
        self._arrived = threading.Condition()
        self._waiting: deque[Arrival] = deque()
        encoder = Worker("recorder-encode", self.encode, on_end=self._encode_rest)
        self._writer = Worker("recorder", self._tick, on_end=self.end)
        self.workers = (encoder, self._writer)
        self._requests: deque[_Trigger] = deque()
        self._wake = threading.Event()
        # The following are the writer's alone.
        self._event_id = events.newest
        self._file: McapWriter | None = None
        self._file_began_ns = 0
        self._file_cause = DRIVE
        self._previous: Path | None = None  # the file before, with the end of its time
        self._previous_until_ns = 0
        self._written = 0  # number of the entry that was written last
        self._wanted: _Trigger | None = None
        self._replies: list[_Reply] = []
        self._sync_at_ns = 0
        self._retry_at_ns = 0
        self._recovered = False
        events.when_visible(self._wake.set)

    def __call__(self, lane_frame: LaneFrame, frame: Frame | None) -> None:
        """Take a frame; a Listener."""
        if self._section.cameras and lane_frame.camera not in self._section.cameras:
            return
        with self._arrived:
            if len(self._waiting) >= _MOST_WAITING:
                self.dropped += 1
                return
            self._waiting.append(Arrival(lane_frame, frame, time.time_ns(), self._clock_ns()))
            self._arrived.notify()

    def start(self) -> None:
        for worker in self.workers:
            worker.start()
        log.info(
            "recorder: %s, in %s, at most %d MiB",
            self._section.mode,
            self._files.directory,
            self._section.max_bytes >> 20,
        )

    def stop(self, timeout_s: float = 5.0) -> None:
        """Complete the file; frames that come later are not recorded."""
        for worker in self.workers:
            worker.stop(timeout_s)

    def request(
        self, cause: str, before_s: float | None = None, after_s: float | None = None
    ) -> str:
        """Record the seconds around this moment; return the name of the file, which is complete
        `after_s` later.

        Args:
            cause: part of the name.
            before_s, after_s: as the settings have them where None.

        Raises:
            Unavailable: the disk takes nothing now, or the recorder stops.
        """
        now_ns = self._clock_ns()
        before = self._section.before_s if before_s is None else before_s
        after = self._section.after_s if after_s is None else after_s
        reply = _Reply()
        start_ns, until_ns = now_ns - round(before * 1e9), now_ns + round(after * 1e9)
        about = {"requested": cause}
        self._requests.append(_Trigger(start_ns, until_ns, f"request-{cause}", about, reply))
        self._wake.set()
        if not reply.done.wait(_ANSWER_S):
            raise Unavailable("recorder: no camera gives a frame, or the disk does not respond")
        if reply.fault:
            raise Unavailable(f"recorder: {reply.fault}")
        return reply.name

    # On the encoder's thread.

    def encode(self, now: float) -> None:
        """Make the messages of one frame, or wait briefly for one."""
        del now
        with self._arrived:
            if not self._arrived.wait_for(lambda: bool(self._waiting), _LOOK_S):
                return
            arrival = self._waiting.popleft()
        self._ring.append(arrival.mono_ns, self._frame_messages.of(arrival))

    def _encode_rest(self) -> None:
        while self._waiting:
            self.encode(0.0)

    # On the writer's thread.

    def _tick(self, now: float) -> None:
        del now
        self._wake.wait(_LOOK_S)
        self._wake.clear()
        with self._writer.allowing(math.inf):  # a disk that hangs costs recordings alone
            if not self._recovered:
                self._recovered = True
                self._files.recover()
            self.write()

    def write(self) -> None:
        """Write what is new and wanted."""
        for trigger in (*self._new_events(), *self._new_requests()):
            self._want(trigger)
            if trigger.reply is not None:
                self._replies.append(trigger.reply)
        self._write_now()
        self._answer()

    def _new_events(self) -> list[_Trigger]:
        triggers = []
        for event in self._events.after(self._event_id):
            self._event_id = event.id
            message = self._frame_messages.of_event(event, time.time_ns())
            self._ring.append(self._clock_ns(), [message])
            if event.kind in self._section.events and event.phase != "end":
                triggers.append(
                    _Trigger(
                        event.mono_ns - round(self._section.before_s * 1e9),
                        event.mono_ns + round(self._section.after_s * 1e9),
                        f"event-{event.kind}-{event.id}",
                        {"event_id": str(event.id), "event_cause": event.cause},
                    )
                )
        return triggers

    def _new_requests(self) -> list[_Trigger]:
        requests = []
        while self._requests:
            requests.append(self._requests.popleft())
        return requests

    def _want(self, trigger: _Trigger) -> None:
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
                entry.size_bytes + 2 * _OVERHEAD_BYTES,
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
            log.info("recorder: written again")
            self.failure = ""
            self._files.recover()

    def _try_disk(self, now_ns: int) -> None:
        """End a failure although there is nothing to write: nobody shall take it for a present one.

        Raises:
            OSError: the disk still takes nothing.
        """
        reason = self._files.make_room(0, 2 * _OVERHEAD_BYTES)
        if reason:
            self._fail(reason, now_ns)
            return
        self._files.try_writing()
        log.info("recorder: the disk takes recordings again")
        self.failure = ""

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

    def end(self) -> None:
        """Complete the file, and answer who waits; the writer's last work."""
        self._write_now()
        try:
            self._finish(self._clock_ns())
        except OSError as error:
            log.error("recorder: the last file is not complete: %s", error.strerror)  # noqa: TRY400 -- the text says it all
        waiting = [request.reply for request in self._new_requests()]
        for reply in (*self._replies, *waiting):
            if reply is not None:
                reply.fault = "it stops"
                reply.done.set()
        self._files.close()
