"""A live camera read by GStreamer: deadlines, faults, capture times; see `GstreamerSource`."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Literal

from edge_server.cameras.frame import Frame
from edge_server.cameras.gstreamer_faults import fault_of
from edge_server.cameras.gstreamer_timestamps import TimestampMapper
from edge_server.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.cameras.gstreamer_faults import BusMessage, CameraPlace
    from edge_server.cameras.gstreamer_frames import PulledFrame
    from edge_server.cameras.gstreamer_player import Player

log = logging.getLogger(__name__)

# The longest wait in GStreamer before its messages are read.
_PULL_S = 0.1
_FIRST_FRAME_S = 8.0
# A camera is stalled after this, or after so many periods of its rate, whichever is longer. Its
# frames would come in a burst afterwards and look fresh, so it is opened again.
_GAP_S = 0.5
_GAP_PERIODS = 3
# How long images may come that cannot be decoded, or are damaged: a lost packet damages them up to
# the next key frame, which cameras send every second or two.
_CORRUPT_S = 3.0
# A driver stamps a frame at the end of its exposure and transfer; Argus after its own queue.
_LATE_PERIODS = {"v4l2": 1, "csi": 3}


class GstreamerSource:
    """Reads a camera through a pipeline; a FrameSource.

    The first frame is read by the constructor, so that a camera that cannot be opened raises there.
    Damaged frames are counted and not delivered.

    Attributes:
        size_changes: number of times that the camera changed the size or the format of its images.

    Args:
        player: runs the pipeline; closed by `close`, and by the constructor where it raises.
        place: names the camera in errors.
        clock: the meaning of the pipeline's timestamps, see `TimestampMapper`.
        monotonic_ns: CLOCK_MONOTONIC.
        epoch_ns: Unix time.

    Raises:
        SourceError: no frame came.
    """

    def __init__(
        self,
        player: Player,
        place: CameraPlace,
        clock: Literal["sensor", "rtp", "arrival"],
        *,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        epoch_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._corrupt = 0
        self.size_changes = 0
        self._player = player
        self._place = place
        self._stamps = TimestampMapper(clock)
        self._monotonic_ns = monotonic_ns
        self._epoch_ns = epoch_ns
        self._arrived = 0
        self._count = 0
        self._form: tuple[object, int, int] | None = None
        self._period_s = 0.0
        self._closed = False
        self._ended = False
        self._opened_ns = self._last_arrival_ns = self._last_good_ns = monotonic_ns()
        try:
            self._first = self._next()
        except BaseException:
            self.close()
            raise
        if self._first is None:
            self.close()
            raise place.error("the pipeline ends without a frame", "unavailable")

    @property
    def corrupt(self) -> int:
        """Number of damaged frames, and of parts of the stream that could not be decoded."""
        return self._corrupt + self._player.damaged

    def read(self) -> Frame | None:
        first, self._first = self._first, None
        return self._next() if first is None else first

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._player.close()

    def _next(self) -> Frame | None:
        if self._closed:
            raise self._place.error("the camera is closed", "lost")
        while not self._ended:
            self._read_messages()
            pulled = self._player.pull(_PULL_S)
            now_ns = self._monotonic_ns()
            if pulled is None:
                self._check_deadline(now_ns)
                continue
            frame = self._delivered(pulled, now_ns)
            if frame is not None:
                return frame
        return None

    def _read_messages(self) -> None:
        for message in self._messages():
            running = self._count > 0
            if message.kind == "end" and not self._player.live:
                # The sink reports its end once its last frame has been pulled.
                self._ended = True
            elif message.kind == "warning":
                self._corrupt += message.is_corruption
                log.debug("%s: %s (%s)", self._place.label, message.text, message.debug)
            elif message.kind != "status" or message.code == 0 or message.code >= 400:
                log.debug("%s: %s (%s)", self._place.label, message.text, message.debug)
                raise fault_of(self._place, message, running=running)

    def _messages(self) -> list[BusMessage]:
        try:
            messages = list(self._player.messages())
        except SourceError as error:
            raise self._place.error(str(error), error.reason) from error
        # The response of an HTTP server says more than the error that it leads to.
        return sorted(messages, key=lambda message: message.kind != "status")

    def _check_deadline(self, now_ns: int) -> None:
        """Raise where images have not come for too long, or come and cannot be used."""
        if self._player.arrived > self._arrived:
            self._arrived = self._player.arrived
            self._last_arrival_ns = now_ns
        if self._form is None and not self._player.damaged:
            if now_ns - self._opened_ns > _FIRST_FRAME_S * 1e9:
                raise self._place.error(
                    f"no frame within {_FIRST_FRAME_S:g} s, though the camera was opened; "
                    "restart the camera, or look at it with another player",
                    "unavailable",
                )
            return
        waited_s = (now_ns - self._last_arrival_ns) / 1e9
        if self._form and waited_s > max(_GAP_S, _GAP_PERIODS * self._period_s):
            raise self._place.error(
                f"no frame for {waited_s:.1f} s; the camera is opened again", "stalled"
            )
        if now_ns - self._last_good_ns > _CORRUPT_S * 1e9:
            raise self._place.error(
                f"images came for {_CORRUPT_S:g} s, all of them damaged; check cable and network "
                "for lost packets, and the camera's bit rate",
                "corrupt",
            )

    def _delivered(self, pulled: PulledFrame, now_ns: int) -> Frame | None:
        """Return the frame; None where it is damaged."""
        gap_s = (now_ns - self._last_arrival_ns) / 1e9
        self._last_arrival_ns = now_ns
        self._arrived = self._player.arrived
        self._note_form(pulled, gap_s)
        capture = self._stamps.map(now_ns, pulled.stamp_ns, pulled.ntp_ns)
        if pulled.corrupt:
            self._corrupt += 1
            self._check_deadline(now_ns)
            return None
        self._last_good_ns = now_ns
        self._count += 1
        late_periods = _LATE_PERIODS.get(self._place.scheme, 0) if capture.clock == "sensor" else 0
        return Frame(
            self._count - 1,
            pulled.image,
            capture.mono_ns,
            self._epoch_ns() - (now_ns - capture.mono_ns),
            capture.clock,
            int(late_periods * self._period_s * 1e9),
        )

    def _note_form(self, pulled: PulledFrame, gap_s: float) -> None:
        image = pulled.image
        form = (image.pixel_format, image.width, image.height)
        if form != self._form:
            if self._form is not None:
                self.size_changes += 1
                log.warning(
                    "%s: the camera changed to %d x %d %s",
                    self._place.label,
                    image.width,
                    image.height,
                    image.pixel_format.value,
                )
            else:
                self._last_good_ns = self._last_arrival_ns
            self._form = form
        if pulled.period_ns:
            self._period_s = pulled.period_ns / 1e9
        elif self._count:
            # Of cameras that do not state a rate: the mean gap of about ten frames.
            self._period_s += (gap_s - self._period_s) / min(self._count, 10)
