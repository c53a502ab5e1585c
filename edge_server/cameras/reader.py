"""A reader: one thread that opens a source, reads it and closes it; and `Limits`, how long a camera
waits for it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from edge_server.errors import SourceError
from edge_server.process.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.cameras.frame import Frame, FrameSource

log = logging.getLogger(__name__)

# A reader that hangs is found by its camera, which abandons it.
_NO_DEADLINE_S = float("inf")


class DriverCall(NamedTuple):
    """A call of a source that has not returned yet; `since` is monotonic, in seconds."""

    name: Literal["open", "read", "close"]
    since: float


class Reader:
    """Opens a source and reads it on a thread of its own until it fails, ends or is left.

    The same thread closes the source, always. No method waits for the thread: a call that never
    returns costs this thread and the source, and nothing else.

    Attributes:
        call: the call in progress; None between calls.
        leaving: the source is no longer read, and is closed as soon as its call returns.
        done: the source is closed, and the thread ends.

    Args:
        name: of the thread.
        open_source: opens the source; not called where `source` is given.
        on_frame: called with each frame, on the reader's thread.
        on_end: called on the reader's thread before the source is closed, once, unless the reader
            was left: with the error, or None at the end of a recording.
        on_done: called on the reader's thread when the source is closed.
        source: is open already.
        clock: returns monotonic time in seconds.
    """

    def __init__(
        self,
        name: str,
        open_source: Callable[[], FrameSource],
        on_frame: Callable[[Reader, Frame], None],
        on_end: Callable[[Reader, Exception | None], None],
        on_done: Callable[[], None],
        *,
        source: FrameSource | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.call: DriverCall | None = None
        self.leaving = False
        self.done = False
        self._open_source = open_source
        self._on_frame = on_frame
        self._on_end = on_end
        self._on_done = on_done
        self._source = source
        self._clock = clock
        self._worker = Worker(name, self._tick, deadline_s=_NO_DEADLINE_S, on_end=self._end)

    @property
    def corrupt(self) -> int:
        """Number of images that the source found damaged since it was opened."""
        return 0 if self._source is None else self._source.corrupt

    def start(self) -> None:
        """Start the thread.

        Raises:
            SourceError: the system refuses a thread.
        """
        self.call = DriverCall("read" if self._source else "open", self._clock())
        try:
            self._worker.start()
        except RuntimeError as error:
            self._end()
            raise SourceError(f"no thread to read it: {error}", reason="unavailable") from error

    def leave(self) -> None:
        """Read no more, and close the source as soon as its call returns; returns at once."""
        self.leaving = True
        self._worker.ask_to_stop()

    def stop(self, timeout_s: float) -> None:
        """Leave the source, and wait up to `timeout_s` until it is closed."""
        self.leave()
        self._worker.stop(timeout_s)

    def _tick(self, now: float) -> bool:
        del now
        try:
            frame = self._read()
            if frame is not None:
                self._on_frame(self, frame)
                return not self.leaving
        except Exception as error:  # noqa: BLE001 - a fault of a driver or a frame costs its source only
            self._give_up(error)
        else:
            self._give_up(None)
        return False

    def _read(self) -> Frame | None:
        if self._source is None:
            self.call = DriverCall("open", self._clock())
            self._source = self._open_source()
            if self.leaving:
                return None
        self.call = DriverCall("read", self._clock())
        frame = self._source.read()
        self.call = None
        return frame

    def _give_up(self, error: Exception | None) -> None:
        if not self.leaving:
            self.leaving = True
            self._on_end(self, error)

    def _end(self) -> None:
        try:
            if self._source is not None:
                self.call = DriverCall("close", self._clock())
                self._source.close()
        except Exception as error:  # noqa: BLE001 - the source is gone either way
            log.warning("%s: the source failed to close: %s", self._worker.name, error)
        finally:
            self.call = None
            self.done = True
            self._on_done()


@dataclass(frozen=True)
class Limits:
    """How long a camera waits for its source, in seconds.

    Attributes:
        first_frame: opening and the first frame together.
        silent: without a frame until the camera has stalled, or three periods if they are longer.
        silent_at_first: the same before the period is known.
        read: a call that reads a later frame, or six periods if they are longer.
        close: a call that closes the source.
        gap: see `FrameInspection`.
    """

    first_frame: float = 10.0
    silent: float = 0.3
    silent_at_first: float = 1.0
    read: float = 2.0
    close: float = 2.0
    gap: float = 0.5

    def silence(self, period_s: float | None) -> float:
        """Return how long no frame may come; `period_s` is None before it is known."""
        return self.silent_at_first if period_s is None else max(3 * period_s, self.silent)

    def call(
        self, call: DriverCall, reader_since: float, *, first: bool, period_s: float | None
    ) -> float:
        """Return how long `call` may last.

        Args:
            call: of a reader that began at `reader_since`.
            reader_since: monotonic, in seconds.
            first: no frame has come yet.
            period_s: of the frames; None before it is known.
        """
        if call.name == "close":
            return self.close
        if call.name == "open":
            return self.first_frame
        if first:
            # Opening took its part of the time.
            return max(self.read, self.first_frame - (call.since - reader_since))
        return max(self.read, 6 * (period_s or 0.0))


LIVE = Limits()
# A disk may be busy for seconds.
RECORDED = Limits(silent=1.0, silent_at_first=3.0, read=10.0, close=10.0)
