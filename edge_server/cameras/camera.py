"""A camera: keeps only the newest frame of its source, and reopens a source that fails."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

from edge_server.cameras.frame import UsefulSize
from edge_server.cameras.inspection import FrameInspection, spelt
from edge_server.cameras.live_source import Reopening
from edge_server.cameras.source import SourceKind, find_kind, open_source
from edge_server.cameras.source_uri import NO_OPTIONS, SourceOptions
from edge_server.cameras.status import CameraState, CameraStatus
from edge_server.errors import SourceError, SourceUriError
from edge_server.process.text import masked
from edge_server.process.threads import AwakeTime, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from edge_server.cameras.frame import Frame, FrameSource, StallWatch
    from edge_server.pixels import PixelFormat

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
    returns costs this thread and the source, and nothing else. The functions that are given are
    called on the thread.

    Attributes:
        call: the call in progress; None between calls.
        leaving: the source is no longer read, and is closed as soon as its call returns.
        done: the source is closed, and the thread ends.
        corrupt: number of images that the source found damaged since it was opened.

    Args:
        name: of the thread.
        open_source: not called where `source` is given, which is open already.
        on_frame: called with each frame.
        on_end: called before the source is closed, unless the reader was left: with the error, or
            None at the end of a recording.
        on_done: called when the source is closed.
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
        self.corrupt = 0
        self._open_source = open_source
        self._on_frame = on_frame
        self._on_end = on_end
        self._on_done = on_done
        self._source = source
        self._clock = clock
        self._worker = Worker(name, self._tick, deadline_s=_NO_DEADLINE_S, on_end=self._end)

    def start(self) -> None:
        """Start the thread; raise SourceError where the system refuses one."""
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
        frame = error = None
        try:
            if self._source is None:
                self.call = DriverCall("open", self._clock())
                self._source = self._open_source()
            if not self.leaving:
                self.call = DriverCall("read", self._clock())
                frame = self._source.read()
                self.call = None
                self.corrupt = self._source.corrupt
            if frame is not None:
                self._on_frame(self, frame)
                return not self.leaving
        except Exception as caught:  # noqa: BLE001 - a fault of a driver or a frame costs its source only
            error = caught
        if not self.leaving:
            self.leaving = True
            self._on_end(self, error)
        return False

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
    """

    first_frame: float = 10.0
    silent: float = 0.3
    silent_at_first: float = 1.0
    read: float = 2.0
    close: float = 2.0

    def call(self, call: DriverCall, reader_since: float, watch: StallWatch) -> float:
        """Return how long `call` may last, of a reader that began at `reader_since` (monotonic, in
        seconds) and whose frames `watch` has seen."""
        if call.name == "close":
            return self.close
        if call.name == "open":
            return self.first_frame
        if watch.last is None:
            # Opening took its part of the time.
            return max(self.read, self.first_frame - (call.since - reader_since))
        return max(self.read, 6 * (watch.period_s or 0.0))


LIVE = Limits()
# A disk may be busy for seconds.
RECORDED = Limits(silent=1.0, silent_at_first=3.0, read=10.0, close=10.0)

# The longest interval between two checks of the deadlines.
LONGEST_WAIT_S = 0.25
# Each keeps a thread, its source, and a picture that is being decoded.
MOST_ABANDONED = 2

# Reason, and text.
_STARTING = "starting", "no frame yet"
# The library that reads the source is not loaded yet, for which no limit holds: it is no fault of
# the camera, and a new process would load it from the beginning.
_LOADING = "loading_gstreamer"


def _reboot(text: str) -> tuple[str, str]:
    """Return the reason and the text of a camera that `text` is wrong with, and a restart of its
    driver did not help."""
    return "reboot_needed", f"{text}; nvargus-daemon was restarted, which did not help: reboot"


class Camera:
    """Captures one source and delivers only its newest frame, each at most once.

    The frames of a recording on its own clock are in lock-step: each waits until it is taken, so
    that none is dropped.

    A reader's thread opens and reads the source; the camera's own worker watches over it. Where
    frames stop, the state says so within `Limits`, and the source is opened again, see `Reopening`;
    frame ids continue. A reader that hangs in a driver is abandoned and replaced. While
    `MOST_ABANDONED` of them hang, the camera is out of service until one of them returns.

    Attributes:
        captured: number of frames that the source has delivered, dropped ones included.
        dropped: number of frames among them that nobody received: a newer frame replaced them, they
            were not whole, or came too late.
        reconnects: number of times that frames resumed after the source was opened again.
        faults: number of times that each reason of `status` began.
        newest: the frame that waits for `next_frame`; None while none does.
        lockstep: its frames are those of a recording on its own clock.
        useful: the smallest size that is of use to the camera's model, which sets it.
        failed_openings: number of attempts to open the source, one after another, that gave no
            frame. One that found nothing to read it with does not count.
        needs_reboot: see `need_reboot`; until a frame comes.

    Args:
        name: the camera's name in topics and logs, and the thread's name.
        source_uri: see `open_source`.
        options: see `SourceOptions`.
        kinds: the schemes that `source_uri` may have; `SOURCE_KINDS` by default.
        retry_first_s, retry_longest_s: see `Reopening`.
        reader: makes the reader of a source.
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
        clock: Callable[[], float] = time.monotonic,
        reader: Callable[..., Reader] = Reader,
    ) -> None:
        self.name = name
        self.source_uri = source_uri
        self.captured = 0
        self.dropped = 0
        self.reconnects = 0
        self.failed_openings = 0
        self.needs_reboot = False
        self.faults: Counter[str] = Counter()
        self.worker = Worker(f"camera-{name}", self._tick, on_end=self._on_end)
        self.useful = UsefulSize()
        self._options = replace(options, useful=self.useful)
        self._kinds = kinds
        self._clock = clock
        self.status = self._status_now(CameraState.STARTING, *_STARTING)
        self._new_reader = reader
        self._kind: SourceKind | None = None
        self._uri_error: SourceUriError | None = None
        look = None
        try:
            uri, self._kind = find_kind(source_uri, kinds)
        except SourceUriError as error:
            self._uri_error = error
        else:
            look = self._kind.look and partial(self._kind.look, uri)
        self._reopening = Reopening(retry_first_s, retry_longest_s, look)
        self._limits = LIVE if self.is_live else RECORDED
        self._inspection = FrameInspection(live=self.is_live)
        self._wake = threading.Event()
        # Held by whoever writes what follows, and the status.
        self._changed = threading.Condition()
        self.newest: Frame | None = None
        self._closed = False
        self._source: FrameSource | None = None  # opened by `open`, for the first reader
        self._reader: Reader | None = None
        self._reader_since = 0.0
        self._awake = AwakeTime(LONGEST_WAIT_S)
        self._abandoned: list[Reader] = []
        self._resuming = False  # the source was lost after a frame
        self.lockstep = False
        self._last_mono_ns: int | None = None
        self._form: tuple[PixelFormat, tuple[int, int]] | None = None  # of live frames

    def load_library(self) -> Future[object] | None:
        """Start to load the library that reads the source, see `SourceKind.library`. Return the
        load while the source waits for it; where it failed, opening the source says why."""
        loading = None if self._kind is None else self._kind.library(self._options)
        return None if loading is None or loading.done() else loading

    def open(self, wait_s: float = 2.0) -> None:
        """Open the source now, so that a bad source raises before `start`.

        A live camera may be absent now: its library and its reader get `wait_s` for the first frame
        or to find a mistake in the URI, and continue later. A further call opens nothing.

        Raises:
            SourceError: a recording cannot be opened.
            SourceUriError: the URI is wrong.
        """
        if self._uri_error is not None:
            raise self._uri_error
        if not self.is_live:
            if self._source is None and self._reader is None:
                self._source = self._open_source()
            return
        until = time.monotonic() + wait_s
        if (library := self.load_library()) is not None:
            wait([library], wait_s)
        with self._changed:
            if self._reader is None and self.state is CameraState.STARTING:
                self.supervise(self._clock())
            left_s = max(0.0, until - time.monotonic())
            self._changed.wait_for(lambda: self.state is not CameraState.STARTING, left_s)
        if self._uri_error is not None:
            raise self._uri_error

    def start(self) -> None:
        """Start to watch over the source; a reader opens it unless `open` already has."""
        self.worker.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop the capture, release the source and wake the callers of `next_frame`.

        A reader that hangs in its driver keeps the source until the process ends.
        """
        until = time.monotonic() + timeout_s
        self.worker.ask_to_stop()
        self._wake.set()
        self.worker.stop(timeout_s)
        if not self.worker.alive:
            self._on_end()
        reader = self._reader
        if reader is not None:
            reader.stop(max(0.0, until - time.monotonic()))
            self._abandoned.append(reader)

    def next_frame(self, timeout_s: float) -> Frame | None:
        """Return the newest frame, each at most once; wait up to `timeout_s` for a newer one. None
        where none came, and at once when the camera has ended or stopped."""
        with self._changed:
            if timeout_s > 0:
                self.wait_for_frame(timeout_s)
            frame, self.newest = self.newest, None
            if frame is not None and frame.clock == "recording":
                self._changed.notify_all()  # its reader waits for that
            return frame

    def wait_for_frame(self, timeout_s: float) -> bool:
        """Return whether a frame waits for `next_frame`; wait up to `timeout_s` for one."""
        with self._changed:
            until = time.monotonic() + timeout_s
            while self.newest is None and not self._closed:
                if (left_s := until - time.monotonic()) <= 0:
                    break
                self._changed.wait(left_s)
            return self.newest is not None

    @property
    def state(self) -> CameraState:
        """See `CameraStatus`."""
        return self.status.state

    @property
    def is_live(self) -> bool:
        """The source is a device; False where the URI is wrong, which `open` reports."""
        return self._kind is not None and self._kind.live

    @property
    def corrupt(self) -> int:
        """Number of frames that were not whole, or that the source's decoder found damaged."""
        return self._inspection.corrupt

    @property
    def hanging(self) -> int:
        """Number of its abandoned readers whose calls have not returned; after `stop`, also of
        the last one."""
        return sum(not reader.done for reader in tuple(self._abandoned))

    @property
    def needs_restart(self) -> bool:
        """The camera is out of service, and only a new process gets its driver back."""
        is_device = self._kind is not None and self._kind.device
        return is_device and self.hanging >= MOST_ABANDONED

    def need_reboot(self) -> None:
        """Say, until a frame comes, that only a reboot helps."""
        with self._changed:
            if not self.needs_reboot:
                self.needs_reboot = True
                self._set(CameraState.LOST, *_reboot(self.status.text))

    @property
    def ended(self) -> bool:
        """The source has ended and its last frame has been delivered."""
        return self.state is CameraState.ENDED and self.newest is None

    def last_frame_age_s(self, now: float) -> float | None:
        """Return the seconds from the last capture to `now`; None before the first frame."""
        if self._last_mono_ns is None:
            return None
        return now - self._last_mono_ns / 1e9

    def supervise(self, now: float) -> float:
        """Compare the reader with its deadlines, and start one where none reads.

        Returns:
            The seconds until the next deadline; 0 where there is something to do at once.
        """
        with self._changed:
            self._awake.look(now)
            if self._reader is not None and self._reader.done:
                self._reader = None
            reader = self._reader
            if reader is None:
                if self.hanging >= MOST_ABANDONED:
                    return LONGEST_WAIT_S
                if not self._reopening.is_due(now):
                    return self._reopening.wait_s(now)
                if self.load_library() is not None:
                    self._set(CameraState.STARTING, _LOADING, "loading GStreamer")
                    return LONGEST_WAIT_S
                if self.status.reason == _LOADING:
                    self._set(CameraState.STARTING, *_STARTING)
                self._start_reader(now)
                return LONGEST_WAIT_S
            call = reader.call
            if call is not None:
                limit_s = self._limits.call(call, self._reader_since, self._inspection.watch)
                if self._awake.since(call.since) > limit_s:
                    self._abandon(reader, call, now)
                    return 0.0
            return LONGEST_WAIT_S if reader.leaving else self._check_silence()

    def _tick(self, now: float) -> bool:
        del now
        due_s = min(self.supervise(self._clock()), LONGEST_WAIT_S)
        if self.state is CameraState.ENDED:
            return False
        self._wake.wait(due_s)
        self._wake.clear()
        return True

    def _open_source(self) -> FrameSource:
        return open_source(self.source_uri, self._kinds, self._options)

    # The reader calls the next two on its own thread.

    def _on_frame(self, reader: Reader, frame: Frame) -> None:
        with self._changed:
            self.lockstep = frame.clock == "recording"
            while self.lockstep and self.newest and not (self._closed or reader.leaving):
                self._changed.wait(LONGEST_WAIT_S)
            # Frame ids continue across a reopen.
            frame = replace(frame, id=self.captured, arrived_mono_ns=time.monotonic_ns())
            self.captured += 1
            if reader is not self._reader or reader.leaving or self._closed:
                self.dropped += 1
                return
            now = self._clock()
            # The same frames in lock-step show the same faults.
            seen = frame.capture_mono_ns / 1e9 if self.lockstep else now
            use, fault, reopen, note = self._inspection.inspect(frame, seen, reader.corrupt)
            if note:
                self.faults["changed"] += 1
                log.warning("camera %s: %s", self.name, note)
            if reopen is not None:
                reader.leave()
                self._lose(reopen, now)
            elif fault is not None and (use or self.status.arriving):
                frozen = fault.code == "frozen"
                self._set(CameraState.FROZEN if frozen else CameraState.DEGRADED, *fault)
            elif use:
                form = frame.image.pixel_format, frame.size
                if self.status.state is not CameraState.LIVE or form != self._form:
                    self._form = form
                    self._set(CameraState.LIVE, "", spelt(*form))
            if not use:
                self.dropped += 1
                return
            self.reconnects += self._resuming
            self._resuming = self.needs_reboot = False
            self.failed_openings = 0
            self._last_mono_ns = frame.arrived_mono_ns if self.lockstep else frame.capture_mono_ns
            self.dropped += self.newest is not None
            self.newest = frame
            self._changed.notify_all()

    def _on_source_end(self, reader: Reader, error: Exception | None) -> None:
        with self._changed:
            if reader is not self._reader or self._closed:
                return
            if isinstance(error, SourceUriError):
                self._uri_error = error
            if error is None and not self.is_live:
                self._set(CameraState.ENDED, "ended", f"it ended after {self.captured} frames")
                if not self.source_uri.startswith("synthetic:"):
                    log.info(
                        "camera %s: a recording is played once; with loop=true in its URI "
                        "(file:///srv/clip.mp4?loop=true) it is played again and again",
                        self.name,
                    )
                self._closed = True
            else:
                error = error or SourceError("the camera closed the stream", reason="lost")
                self._lose(error, self._clock())
            self._changed.notify_all()
        self._wake.set()

    # The callers of the next ones hold the lock.

    def _start_reader(self, now: float) -> Reader:
        self._reopening.end()
        self._inspection.restart()
        self._reader_since = now
        self._reader = self._new_reader(
            f"read-{self.name}",
            self._open_source,
            self._on_frame,
            self._on_source_end,
            self._wake.set,
            source=self._source,
            clock=self._clock,
        )
        self._source = None
        try:
            self._reader.start()
        except SourceError as error:
            self._lose(error, now)
        return self._reader

    def _check_silence(self) -> float:
        """Notice that frames have stopped; return the seconds until it would be so."""
        watch = self._inspection.watch
        if watch.last is None or self.lockstep:  # a read that hangs is found by its own limit
            return LONGEST_WAIT_S
        limit_s = watch.limit_s(self._limits.silent, self._limits.silent_at_first)
        left_s = limit_s - self._awake.since(watch.last)
        if left_s < 0 and self.status.arriving:
            text = f"no frame for more than {limit_s:.2g} s"
            self._set(CameraState.STALLED, "stalled", text)
        return min(left_s, LONGEST_WAIT_S) if left_s >= 0 else LONGEST_WAIT_S

    def _abandon(self, reader: Reader, call: DriverCall, now: float) -> None:
        what = f"the driver has not returned from {call.name} for {now - call.since:.1f} s"
        first = call.name == "read" and self._inspection.watch.last is None
        reason = "no_frames" if first else "stuck"
        reader.leave()
        self._reader = None
        self._abandoned = [*(each for each in self._abandoned if not each.done), reader]
        if self.hanging >= MOST_ABANDONED:
            reason = "out_of_service"
            what += (
                f"; {MOST_ABANDONED} readers hang, and the camera is opened again once one "
                "returns; if none does, restart the camera, then edge-server"
            )
        self._lose(SourceError(what, reason=reason), now)

    def _lose(self, error: Exception, now: float) -> None:
        """Plan the next attempt to open the source, and say why it is needed."""
        self._reopening.lose(now, now - self._reader_since)
        self._resuming = self.captured > 0
        reason, text = "lost", f"the reader failed: {error!r}"
        if isinstance(error, SourceError):
            reason, text = error.reason, str(error)
        elif reason != self.status.reason:
            log.error("camera %s: the reader failed", self.name, exc_info=error)
        if self._inspection.watch.last is None:
            self.failed_openings += reason != "no_decoder"
        if self.needs_reboot:
            reason, text = _reboot(text)
        stalled = reason == "stalled" and self.captured
        self._set(CameraState.STALLED if stalled else CameraState.LOST, reason, text)

    def _set(self, state: CameraState, reason: str = "", text: str = "") -> None:
        """Change the state; each change of it or its reason is counted and logged once."""
        text = masked(text)  # it is published
        before = self.status
        if (state, reason) == (before.state, before.reason):
            if text != before.text:
                self.status = replace(before, text=text)
            return
        self.status = self._status_now(state, reason, text)
        is_fault = bool(reason) and state not in (CameraState.STARTING, CameraState.ENDED)
        self.faults[reason] += is_fault
        word = f"{state.value}, {reason}" if is_fault and reason != state.value else state.value
        level = logging.WARNING if is_fault else logging.INFO
        log.log(level, "camera %s: %s", self.name, f"{word}: {text}" if text else word)
        self._changed.notify_all()

    def _status_now(self, state: CameraState, reason: str, text: str) -> CameraStatus:
        return CameraStatus(state, reason, text, round(self._clock() * 1e9), time.time_ns())

    def _on_end(self) -> None:
        """End the reader as well; the worker calls it when it ends, `stop` where it never ran."""
        with self._changed:
            if self._reader is not None:
                self._reader.leave()
            if self.worker.failure is not None:
                # Callers of `next_frame` keep waiting: the supervisor decides how to react.
                return
            if self.state is not CameraState.ENDED:
                self._set(CameraState.STOPPED)
            self._closed = True
            self._reopening.end()
            source, self._source = self._source, None
            self._changed.notify_all()
        if source is not None:
            source.close()
