"""Recorder: keeps the last seconds in memory, and writes them around events, or all the time."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import TYPE_CHECKING

from edge_server.errors import Unavailable
from edge_server.pipeline.perception import NetworkFrame
from edge_server.pipeline.recorder.mcap_writer import Arrival, FrameMessages, Ring
from edge_server.pipeline.recorder.recording_writer import RecordingWriter, Trigger
from edge_server.process.threads import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.board.board import Identity
    from edge_server.cameras.calibration import Calibration
    from edge_server.cameras.frame import Frame
    from edge_server.lanes.types import LaneFrame
    from edge_server.pipeline.event_log import EventLog
    from edge_server.pipeline.recorder.recording_writer import RecordingFiles
    from edge_server.settings import RecorderSection

log = logging.getLogger(__name__)

# Frames of all cameras that wait to be encoded. Each may hold a buffer of its camera's driver.
_MOST_WAITING = 4
# Likewise what networks have found in them, which holds none.
_MOST_RESULTS = 16
_LOOK_S = 0.2
# A disk that hangs for so long costs no frame, as far as the memory goes.
_DISK_SLACK_S = 5.0
_ANSWER_S = 5.0


class Recorder:
    """Records what the pipelines of the cameras give, and their networks; a listener of theirs.

    A call returns at once: pictures are encoded on one thread and written by another, see
    `RecordingWriter`. Where the encoder is late, the newest frame is dropped and counted.

    Attributes:
        files: that there are.
        dropped: number of frames, and results of networks, that the encoder had no time for.
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
        self.files = files
        self._section = section
        self._events = events
        self._clock_ns = clock_ns
        self._frame_messages = FrameMessages(
            identity, section.jpeg_quality, section.width, calibration
        )
        self._ring = Ring(section.before_s + _DISK_SLACK_S, section.memory_bytes)
        self._arrived = threading.Condition()
        self._waiting: deque[Arrival] = deque()
        self._requests: deque[Trigger] = deque()
        self._wake = threading.Event()
        # The following are the second worker's alone.
        self._new_writer = partial(RecordingWriter, section, files, identity, self._ring, clock_ns)
        self._event_id = events.newest
        self._recovered = False
        self._writer = self._new_writer()
        self.workers = (self._new_encoder(), self._new_write_worker())
        events.when_visible(self._wake.set)

    @property
    def lost(self) -> int:
        """Number of frames and events that were gone from memory when the disk was ready."""
        return self._writer.lost

    @property
    def failure(self) -> str:
        """Why nothing is written now; "" while the disk takes what there is."""
        return self._writer.failure

    @property
    def written_bytes(self) -> int:
        """Of the completed files."""
        return self._writer.written_bytes

    def __call__(self, lane_frame: LaneFrame, frame: Frame | None = None) -> None:
        """Take a frame, or what a network has found in one; a Listener, and a NetworkListener."""
        if self._section.cameras and lane_frame.camera not in self._section.cameras:
            return
        of_network = isinstance(lane_frame, NetworkFrame)
        with self._arrived:
            kinds = [isinstance(each.lane_frame, NetworkFrame) for each in self._waiting]
            if kinds.count(of_network) >= (_MOST_RESULTS if of_network else _MOST_WAITING):
                self.dropped += 1
                return
            self._waiting.append(Arrival(lane_frame, frame, time.time_ns(), self._clock_ns()))
            self._arrived.notify()

    def holds(self, _: str) -> bool:
        """Whether the next frame might be dropped."""
        return len(self._waiting) >= _MOST_WAITING

    def start(self) -> None:
        for worker in self.workers:
            worker.start()
        log.info(
            "recorder: %s, in %s, at most %d MiB",
            self._section.mode,
            self.files.directory,
            self._section.max_bytes >> 20,
        )

    def reopen(self) -> None:
        """Record on, where a thread hangs or has died, with others; what the writer was writing is
        a file that ends there."""
        encoder, writer = self.workers
        encoder.ask_to_stop()
        encoder = self._new_encoder()
        encoder.start()
        self.workers = (encoder, writer)
        # It does not count as stuck, so that there are never two at one file.
        if not writer.alive:
            self._writer, writer = self._new_writer(), self._new_write_worker()
            self.workers = (encoder, writer)
            writer.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Complete the file; frames that come later are not recorded."""
        for worker in self.workers:
            worker.stop(timeout_s)
        if not self.workers[1].alive:
            self.files.close()

    def _new_encoder(self) -> Worker:
        return Worker("recorder-encode", self.encode, on_end=self._encode_rest)

    def _new_write_worker(self) -> Worker:
        return Worker("recorder", self._tick, on_end=self._complete)

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
        reply: Future[str] = Future()
        start_ns, until_ns = now_ns - round(before * 1e9), now_ns + round(after * 1e9)
        about = {"requested": cause}
        self._requests.append(Trigger(start_ns, until_ns, f"request-{cause}", about, reply))
        self._wake.set()
        try:
            return reply.result(_ANSWER_S)
        except FutureTimeoutError:
            raise Unavailable(
                "recorder: no camera gives a frame, or the disk does not respond"
            ) from None

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
        with self.workers[1].allowing(math.inf):  # a disk that hangs costs recordings alone
            if not self._recovered:
                self._recovered = True
                self.files.recover()
            self.write()

    def write(self) -> None:
        """Write what is new and wanted."""
        self._writer.write([*self._new_events(), *self._new_requests()])

    def _new_events(self) -> list[Trigger]:
        triggers = []
        for event in self._events.after(self._event_id):
            self._event_id = event.id
            message = self._frame_messages.of_event(event, time.time_ns())
            self._ring.append(self._clock_ns(), [message])
            if event.kind in self._section.events and event.phase != "end":
                triggers.append(
                    Trigger(
                        event.mono_ns - round(self._section.before_s * 1e9),
                        event.mono_ns + round(self._section.after_s * 1e9),
                        f"event-{event.kind}-{event.id}",
                        {
                            "event_id": str(event.id),
                            "event_log": event.log,
                            "event_cause": event.cause,
                        },
                    )
                )
        return triggers

    def _new_requests(self) -> list[Trigger]:
        requests = []
        while self._requests:
            requests.append(self._requests.popleft())
        return requests

    def end(self) -> None:
        """Do what `stop` does, without threads."""
        self._complete()
        self.files.close()

    def _complete(self) -> None:
        """Complete the file, and answer who waits; the writer's last work."""
        self._writer.end(self._new_requests())
