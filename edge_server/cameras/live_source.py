"""One loop for every live camera: its first frame, its silence, its damage and its capture times.

A reader opens a camera as a `CameraStream`, which waits for an image and decodes it. `LiveSource`
makes frames of that, and raises where they stop: the camera is opened again then, as what waits in
decoders and sockets would come in a burst and look fresh.

A source that was lost is opened again after a delay, or as soon as it is there. Looking whether it
is there costs it nothing. A closed port responds to a connection by a refusal of its host's kernel,
or not at all, so no look reaches the camera's server before it listens. There are 3 to 7 looks a
second, at times drawn by chance."""

from __future__ import annotations

import math
import os
import random
import socket
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from edge_server.cameras.frame import PERIODS, Frame, StallWatch, TimestampMapper
from edge_server.cameras.network import PORTS
from edge_server.errors import SourceError
from edge_server.process.threads import Backoff, start_future

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.cameras.source_uri import SourceUri
    from edge_server.pixels import Image


# A source that is there again is opened before it is due so many times within that time.
_MOST_CALLS_BACK = 3
_CALLS_BACK_WITHIN_S = 10.0

_SHORTEST_S, _LONGEST_S = 0.15, 0.35
# What is not known at once mostly is so soon.
_UNKNOWN_S = 0.02
# A host that is off does not respond at all.
_CONNECT_S = 1.0


class Reopening:
    """Says when a lost source is opened: after delays that double, or as soon as it is there again
    where that can be seen. Not thread-safe, and no call waits.

    A source that comes and goes is opened as often as the delays allow, and little more.

    Args:
        first_s: the first delay.
        longest_s: the longest; after a source has run longer, they start from the first again.
        look: starts to look whether the source is there; None where only opening it shows that.
    """

    def __init__(
        self, first_s: float, longest_s: float, look: Callable[[], Future[bool] | None] | None
    ) -> None:
        self._backoff = Backoff(first_s, longest_s)
        self._look = look
        self._due = 0.0
        self._look_at = math.inf
        self._looking: Future[bool] | None = None
        self._away = False
        self._called_back: deque[float] = deque(maxlen=_MOST_CALLS_BACK)

    def lose(self, now: float, ran_s: float) -> None:
        """The source is lost; it ran for `ran_s`."""
        if ran_s > self._backoff.longest_s:
            self._backoff.reset()
        self._due = now + self._backoff.next_s()
        self._look_at = math.inf if self._look is None else 0.0
        self._looking, self._away = None, False

    def is_due(self, now: float) -> bool:
        return now >= self._due or self._is_back(now)

    def wait_s(self, now: float) -> float:
        """Return the seconds until the source is opened or looked for."""
        return max(0.0, min(self._due, self._look_at) - now)

    def end(self) -> None:
        """Look for the source no more: it is opened, or nobody wants it."""
        self._look_at = math.inf

    def _is_back(self, now: float) -> bool:
        """Return whether the source was away, and may be opened before it is due."""
        if self._look is None or now < self._look_at:
            return False
        is_first, looking = self._looking is None, self._looking or self._look()
        self._looking = looking
        if looking is None or not looking.done():
            soon = is_first and looking is not None  # else there is no thread to look
            self._look_at = now + (_UNKNOWN_S if soon else _until_next_s())
            return False
        self._looking, self._look_at = None, now + _until_next_s()
        was_away, self._away = self._away, not looking.result()
        if self._away or not was_away:
            return False
        often = len(self._called_back) == _MOST_CALLS_BACK
        if often and now - self._called_back[0] < _CALLS_BACK_WITHIN_S:
            return False
        self._called_back.append(now)
        self._backoff.reset()
        return True


def _until_next_s() -> float:
    return random.uniform(_SHORTEST_S, _LONGEST_S)  # noqa: S311 - no secret


def look_for_port(uri: SourceUri) -> Future[bool] | None:
    """Start to connect to the port of a camera, on a thread: looking up a name and connecting
    wait."""

    def connect() -> bool:
        try:
            socket.create_connection((uri.host, uri.port or PORTS[uri.scheme]), _CONNECT_S).close()
        except (OSError, UnicodeError):  # the latter: it is no host name
            return False
        return True

    return start_future(f"look for {uri.host}", connect)


def look_for_device(uri: SourceUri) -> Future[bool]:
    found: Future[bool] = Future()
    # A new device belongs to root until udev has seen it.
    found.set_result(os.access(uri.path, os.R_OK | os.W_OK))
    return found


# A camera has stalled after this, or `PERIODS`; before its rate is known it has longer, which is
# less than a call of its reader may take (`Limits` in camera.py). So has one whose images are all
# damaged: a lost packet damages them up to the next key frame.
_GAP_S = 0.5
_UNKNOWN_GAP_S = 1.8
_DAMAGED_NS = 1_500_000_000


class Picture(NamedTuple):
    """An image of a stream.

    Attributes:
        image: valid until the caller drops it and all views of it.
        stamp_ns: its timestamp, see `TimestampMapper`; None where it has none.
        ntp_ns: the camera's NTP time of it as CLOCK_MONOTONIC; None where the camera gave none.
        size: see `Frame.picture_size`.
        jpeg: see `Frame.jpeg`.
    """

    image: Image
    stamp_ns: int | None = None
    ntp_ns: int | None = None
    size: tuple[int, int] | None = None
    jpeg: bytes | None = None


class StreamEnded(Exception):
    """A recording has come to its end."""


class CameraStream(Protocol):
    """A camera that is open; used by one thread.

    Attributes:
        seen: number of images that came, whether they can be decoded or not.
    """

    seen: int

    @property
    def damaged(self) -> int:
        """Number of images that were dropped, and are not told by `retrieve`."""
        ...

    @property
    def period_s(self) -> float:
        """The period of the images, as the camera states it; 0 where it does not."""
        ...

    def grab(self, timeout_s: float) -> bool:
        """Wait for an image, the newest where several have come; return whether there is one.

        Returns within `timeout_s`, or as soon after it as a library allows; perhaps sooner.

        Raises:
            SourceError: the camera is lost, or says why it gives nothing.
            StreamEnded: there is none any more.
        """
        ...

    def retrieve(self) -> Picture:
        """Return the image that was grabbed.

        Raises:
            ValueError: it is damaged; the text says how.
            SourceError: no image of this camera can be used.
        """
        ...

    def close(self) -> None:
        """Release the camera; called once. Images that were retrieved stay valid."""
        ...


class LiveSource:
    """Reads a stream; a FrameSource.

    The first frame is read by the constructor, so that a camera that gives none raises there.
    Damaged images are counted and not delivered.

    Args:
        stream: closed by `close`, and by the constructor where it raises.
        uri: of the camera, which errors name, those of the stream too.
        clock: the meaning of the stream's timestamps, see `TimestampMapper`.
        first_frame_s: how long the first frame may take.
        late_periods: a timestamp of the driver may be late by so many periods.

    Raises:
        SourceError: no frame came.
    """

    def __init__(
        self,
        stream: CameraStream,
        uri: SourceUri,
        clock: Literal["sensor", "rtp", "arrival"],
        *,
        first_frame_s: float = 4.0,
        late_periods: int = 0,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        epoch_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.stream = stream
        self._uri = uri
        self._first_frame_s = first_frame_s
        self._late_periods = late_periods
        self._clock_ns = monotonic_ns
        self._epoch_ns = epoch_ns
        self._stamps = TimestampMapper(clock)
        self._is_exempt = clock == "sensor"  # the driver's time tells the age of a backlog
        self._watch = StallWatch()
        self._count = 0
        self._damaged = 0
        self._damage = "no decoder takes them"
        self._closed = False
        try:
            self._first = self._next()
        except BaseException:
            self.close()
            raise
        if self._first is None:
            self.close()
            raise uri.fault("the pipeline ends without a frame")

    @property
    def corrupt(self) -> int:
        return self._damaged + self.stream.damaged

    def read(self) -> Frame | None:
        first, self._first = self._first, None
        return self._next() if first is None else first

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.stream.close()

    def _next(self) -> Frame | None:
        try:
            return self._wait()
        except SourceError as error:
            raise self._uri.fault(str(error), error.reason) from error

    def _wait(self) -> Frame | None:
        if self._closed:
            raise SourceError("the camera is closed")
        stream = self.stream
        # A caller that comes late is no silence of the camera.
        now_ns = began_ns = heard_ns = self._clock_ns()
        seen, before = stream.seen, (stream.seen, self.corrupt)
        while True:
            silent_ns = round(1e9 * self._silence_s())
            left_ns = heard_ns + silent_ns - now_ns
            if (stream.seen, self.corrupt) != before:
                unusable_ns = began_ns + max(silent_ns, _DAMAGED_NS) - now_ns
                if unusable_ns <= 0:
                    raise self._all_damaged((now_ns - began_ns) / 1e9)
                left_ns = min(left_ns, unusable_ns)
            if left_ns <= 0:
                raise self._silence((now_ns - heard_ns) / 1e9)
            try:
                grabbed = stream.grab(left_ns / 1e9)
            except StreamEnded:
                return None
            now_ns = self._clock_ns()
            if self._count and not self._is_exempt and now_ns - heard_ns >= silent_ns:
                continue  # what comes after a silence is a backlog
            if grabbed or stream.seen > seen:
                seen, heard_ns = stream.seen, now_ns
            if grabbed:
                self._watch.arrive(now_ns / 1e9)
                try:
                    return self._frame(stream.retrieve(), now_ns)
                except ValueError as error:
                    self._damaged += 1
                    self._damage = str(error)

    def _silence_s(self) -> float:
        if not self._count:
            return self._first_frame_s
        # A camera may state any rate.
        stated_s = min(self.stream.period_s, _UNKNOWN_GAP_S / PERIODS)
        return self._watch.limit_s(_GAP_S, _UNKNOWN_GAP_S, stated_s)

    def _frame(self, picture: Picture, now_ns: int) -> Frame:
        capture = self._stamps.map(now_ns, picture.stamp_ns, picture.ntp_ns)
        late_ns = 0
        if self._late_periods and capture.clock == "sensor":
            period_s = self.stream.period_s or self._watch.period_s or 0.0
            late_ns = int(1e9 * self._late_periods * period_s)
        self._count += 1
        return Frame(
            self._count - 1,
            picture.image,
            capture.mono_ns,
            self._epoch_ns() - (self._clock_ns() - capture.mono_ns),
            capture.clock,
            late_ns,
            picture_size=picture.size,
            jpeg=picture.jpeg,
        )

    def _silence(self, waited_s: float) -> SourceError:
        if self._count:
            text = f"no frame for {waited_s:.1f} s; the camera is opened again"
            return SourceError(text, reason="stalled")
        return SourceError(
            f"no frame within {self._first_frame_s:g} s, though the camera was opened; restart the "
            "camera, or look at it with another player",
            reason="unavailable",
        )

    def _all_damaged(self, waited_s: float) -> SourceError:
        return SourceError(
            f"images came for {waited_s:.1f} s, all of them damaged ({self._damage}); check cable "
            "and network for lost packets, and the camera's bit rate",
            reason="corrupt",
        )
