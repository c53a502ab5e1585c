"""A camera: its capture thread keeps only the newest frame and reopens a lost source."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

from edge_server.cameras.source import NO_OPTIONS, SourceKind, SourceOptions, is_live, open_source
from edge_server.errors import SourceError
from edge_server.process.backoff import Backoff
from edge_server.process.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.cameras.frame import Frame, FrameSource

log = logging.getLogger(__name__)

# The longest interval between two heartbeats of the capture thread while the thread waits to reopen
# a source.
LONGEST_WAIT_S = 1.0


class CameraState(Enum):
    """The state of a camera."""

    STARTING = "starting"  # no frame yet
    LIVE = "live"
    LOST = "lost"  # the camera reopens the source until frames arrive
    ENDED = "ended"  # a recording has reached its end
    STOPPED = "stopped"


class Camera:
    """Captures one source on its own thread and delivers only the newest frame.

    Each frame is delivered at most once. The camera reopens a broken source after delays that
    double; frame ids continue across a reopen.

    Attributes:
        state: see `CameraState`.
        failure: why no frames arrive; None while frames arrive.
        captured: number of frames that the source has delivered, dropped ones included.
        dropped: number of frames that a newer frame replaced before delivery, or that came after
            `stop`.
        reconnects: number of times that frames resumed after the source was lost.

    Args:
        name: the camera's name in topics and logs, and the thread's name.
        source_uri: see `open_source`.
        options: see `SourceOptions`.
        kinds: the schemes that `source_uri` may have; `SOURCE_KINDS` by default.
        retry_first_s: delay before the first attempt to reopen a broken source.
        retry_longest_s: upper bound of the delays; after a source has run longer than this, the
            delays start from the first again.
    """

    def __init__(
        self,
        name: str,
        source_uri: str,
        *,
        options: SourceOptions = NO_OPTIONS,
        kinds: Mapping[str, SourceKind] | None = None,
        retry_first_s: float = 0.2,
        retry_longest_s: float = 5.0,
    ) -> None:
        self.name = name
        self.source_uri = source_uri
        self.state = CameraState.STARTING
        self.failure: str | None = None
        self.captured = 0
        self.dropped = 0
        self.reconnects = 0
        self.worker = Worker(f"camera-{name}", self._tick, on_end=self._on_end)
        self._options = options
        self._kinds = kinds
        self._source: FrameSource | None = None
        self._newest: Frame | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._backoff = Backoff(retry_first_s, retry_longest_s)
        self._retry_at = 0.0
        self._opened_at = 0.0
        self._last_mono_ns: int | None = None

    def open(self) -> None:
        """Open the source now, on the caller's thread, so that a bad source raises before `start`.

        An absent live camera raises nothing: the capture thread keeps trying to open the source. If
        the source is already open, the call does nothing.

        Raises:
            SourceError: a recording cannot be opened, or the URI is wrong.
        """
        if self._source is not None:
            return
        live = is_live(self.source_uri, self._kinds)
        try:
            self._open_source()
        except SourceError as error:
            if not live:
                raise
            self._lose(error)

    def start(self) -> None:
        """Start the capture thread; the thread opens the source unless `open` already has."""
        self.worker.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop the capture, release the source and wake the callers of `next_frame`.

        A thread that hangs in its driver keeps the source until the process ends.
        """
        self.worker.stop(timeout_s)
        if not self.worker.alive:
            self._on_end()
        self._close()

    def next_frame(self, timeout_s: float) -> Frame | None:
        """Return the newest frame, each frame at most once; wait up to `timeout_s` for a newer
        frame.

        Returns:
            None when no frame arrived within `timeout_s`, and at once when the camera has ended or
            stopped.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._newest or self._closed, timeout_s)
            frame, self._newest = self._newest, None
            return frame

    def wait_for_frame(self, timeout_s: float) -> bool:
        """Return whether a frame waits for `next_frame`; wait up to `timeout_s` for one."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest or self._closed, timeout_s)
            return self._newest is not None

    @property
    def ended(self) -> bool:
        """The source has ended and its last frame has been delivered."""
        return self.state is CameraState.ENDED and self._newest is None

    def last_frame_age_s(self, now: float) -> float | None:
        """Return the seconds from the last capture to `now` (`time.monotonic()`); None before the
        first frame."""
        if self._last_mono_ns is None:
            return None
        return now - self._last_mono_ns / 1e9

    def _tick(self, now: float) -> bool:
        if self._source is None and now < self._retry_at:
            self.worker.wait(min(self._retry_at - now, LONGEST_WAIT_S))
            return True
        try:
            source = self._open_source() if self._source is None else self._source
            frame = source.read()
        except SourceError as error:
            self._lose(error)
            return True
        if frame is None:
            self.state = CameraState.ENDED
            log.info("camera %s: ended after %d frames", self.name, self.captured)
            return False
        self._deliver(frame)
        return True

    def _open_source(self) -> FrameSource:
        self._source = open_source(self.source_uri, self._kinds, self._options)
        self._opened_at = time.monotonic()
        return self._source

    def _deliver(self, frame: Frame) -> None:
        # Frame ids continue across a reopen.
        frame = replace(frame, id=self.captured)
        if self.state is not CameraState.LIVE:
            image = frame.image
            form = image.pixel_format.value
            log.info("camera %s: live, %d x %d %s", self.name, image.width, image.height, form)
            self.reconnects += self.captured > 0
            self.failure = None
            self.state = CameraState.LIVE
        self.captured += 1
        self._last_mono_ns = frame.capture_mono_ns
        with self._changed:
            if self._closed or self._newest is not None:
                self.dropped += 1
            if not self._closed:
                self._newest = frame
            self._changed.notify()

    def _close(self) -> None:
        """Wake the callers of `next_frame`; a waiting frame can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _lose(self, error: SourceError) -> None:
        now = time.monotonic()
        if self._source is not None and now - self._opened_at > self._backoff.longest_s:
            self._backoff.reset()
        self._release()
        self._retry_at = now + self._backoff.next_s()
        self.state = CameraState.LOST
        # The state changes, and is logged, only when the reason changes.
        if str(error) != self.failure:
            self.failure = str(error)
            log.warning("camera %s: lost, trying to open it again: %s", self.name, error)

    def _on_end(self) -> None:
        self._release()
        if self.worker.failure is not None:
            # Callers of `next_frame` keep waiting: the supervisor decides how to react to a dead
            # thread.
            self.failure = f"the capture thread died: {self.worker.failure!r}"
            self.state = CameraState.LOST
            return
        if self.state is not CameraState.ENDED:
            self.state = CameraState.STOPPED
        self._close()

    def _release(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()
