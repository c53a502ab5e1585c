"""A camera: its capture thread keeps only the newest frame and reopens a lost source."""

from __future__ import annotations

import logging
import time
from enum import Enum
from typing import TYPE_CHECKING

from edge_server.cameras.frame import Frame
from edge_server.cameras.source import SourceKind, is_live, open_source
from edge_server.errors import SourceError
from edge_server.process.backoff import Backoff
from edge_server.process.mailbox import Mailbox
from edge_server.process.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from edge_server.cameras.frame import FrameSource

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

    A frame that a newer frame replaces before delivery counts in `dropped`. The camera reopens a
    broken source after delays that double; frame ids continue across a reopen.

    Args:
        name: the camera's name in topics and logs, and the thread's name.
        source_uri: see `open_source`.
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
        kinds: Mapping[str, SourceKind] | None = None,
        retry_first_s: float = 0.2,
        retry_longest_s: float = 5.0,
    ) -> None:
        self.name = name
        self.source_uri = source_uri
        self.worker = Worker(f"camera-{name}", self._tick, on_end=self._on_end)
        self._kinds = kinds
        self._source: FrameSource | None = None
        self._mailbox: Mailbox[Frame] = Mailbox()
        self._backoff = Backoff(retry_first_s, retry_longest_s)
        self._retry_at = 0.0
        self._opened_at = 0.0
        self._state = CameraState.STARTING
        self._failure: str | None = None
        self._captured = 0
        self._reconnects = 0
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
        self._mailbox.close()

    def next_frame(self, timeout_s: float) -> Frame | None:
        """Return the newest frame, each frame at most once; wait up to `timeout_s` for a newer
        frame.

        Returns:
            None when no frame arrived within `timeout_s`, and at once when the camera has ended or
            stopped.
        """
        return self._mailbox.take(timeout_s)

    @property
    def state(self) -> CameraState:
        return self._state

    @property
    def failure(self) -> str | None:
        """The reason why no frames arrive, as text; None while frames arrive."""
        return self._failure

    @property
    def ended(self) -> bool:
        """The source has ended and its last frame has been delivered."""
        return self._state is CameraState.ENDED and self._mailbox.drained

    @property
    def captured(self) -> int:
        """Number of frames that the source has delivered, dropped ones included."""
        return self._captured

    @property
    def dropped(self) -> int:
        """Number of frames that a newer frame replaced before delivery."""
        return self._mailbox.dropped

    @property
    def reconnects(self) -> int:
        """Number of times that frames resumed after the source was lost."""
        return self._reconnects

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
            image = source.read()
        except SourceError as error:
            self._lose(error)
            return True
        if image is None:
            self._state = CameraState.ENDED
            log.info("camera %s: ended after %d frames", self.name, self._captured)
            return False
        self._hand_on(image)
        return True

    def _open_source(self) -> FrameSource:
        self._source = open_source(self.source_uri, self._kinds)
        self._opened_at = time.monotonic()
        return self._source

    def _hand_on(self, image: NDArray[np.uint8]) -> None:
        frame = Frame(self._captured, image, time.monotonic_ns(), time.time_ns())
        if self._state is not CameraState.LIVE:
            self._come_alive(image)
        self._captured += 1
        self._last_mono_ns = frame.capture_mono_ns
        self._mailbox.put(frame)

    def _come_alive(self, image: NDArray[np.uint8]) -> None:
        height_px, width_px = image.shape[:2]
        log.info("camera %s: live, %d x %d", self.name, width_px, height_px)
        self._reconnects += self._captured > 0
        self._failure = None
        self._state = CameraState.LIVE

    def _lose(self, error: SourceError) -> None:
        now = time.monotonic()
        if self._source is not None and now - self._opened_at > self._backoff.longest_s:
            self._backoff.reset()
        self._release()
        self._retry_at = now + self._backoff.next_s()
        self._state = CameraState.LOST
        # The state changes, and is logged, only when the reason changes.
        if str(error) != self._failure:
            self._failure = str(error)
            log.warning("camera %s: lost, trying to open it again: %s", self.name, error)

    def _on_end(self) -> None:
        self._release()
        if self.worker.failure is not None:
            # Callers of `next_frame` keep waiting: the supervisor decides how to react to a dead
            # thread.
            self._failure = f"the capture thread died: {self.worker.failure!r}"
            self._state = CameraState.LOST
            return
        if self._state is not CameraState.ENDED:
            self._state = CameraState.STOPPED
        self._mailbox.close()

    def _release(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()
