"""Decides for each frame of a camera whether it is used, and what is wrong with the source."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from edge_server.cameras.continuity import CHANGES_WITHIN_S, MOST_CHANGES, Continuity, is_whole
from edge_server.cameras.health import PictureHealth
from edge_server.cameras.status import UNUSABLE, PictureFault
from edge_server.errors import SourceError
from edge_server.pixels import PixelFormat

if TYPE_CHECKING:
    from edge_server.cameras.frame import Frame

# A fault that a single frame shows is the camera's state for this long.
_FAULT_LASTS_S = 2.0
# Formats of sensors that no decoder gives: their frames were never compressed. NV12 may be either.
_RAW = (PixelFormat.YUY2, PixelFormat.GREY)
# So many frames that are not whole within that time, and the source is opened again.
MOST_CORRUPT = 10


class FrameVerdict(NamedTuple):
    """What follows from one frame.

    Attributes:
        use: the frame may be delivered.
        fault: what is wrong with the camera's frames at present; None where it is nothing.
        reopen: why the source has to be opened again; None where it goes on.
        note: what else is worth a line in the log, and a count under the reason `changed`.
    """

    use: bool = True
    fault: PictureFault | None = None
    reopen: SourceError | None = None
    note: str = ""


class FrameInspection:
    """Inspects the frames of one camera in their order; not thread-safe.

    Frames that are not whole, and frames that were captured before their predecessor, are not used.

    Attributes:
        corrupt: number of frames that were not whole, or that the source's decoder found damaged.

    Args:
        live: the source is a camera. A recording may consist of different images, or of one.
        gap_s: after a longer silence, and three periods, the source has to be opened again, once
            its period is known: its frames are a backlog that a decoder may stamp as fresh. Frames
            with the driver's own time are exempt: their age is true.
    """

    def __init__(self, *, live: bool, gap_s: float) -> None:
        self.corrupt = 0
        self._live = live
        self._gap_s = gap_s
        self._continuity = Continuity()
        self._health = PictureHealth()
        self._source_corrupt = 0
        self._passing: PictureFault | None = None
        self._passing_until = 0.0
        self._corrupt_at: deque[float] = deque(maxlen=MOST_CORRUPT)

    def restart(self) -> None:
        """Forget the previous frames, as the source is opened again; what the camera usually shows
        is remembered."""
        self._continuity = Continuity()
        self._health.restart()
        self._source_corrupt = 0

    @property
    def period_s(self) -> float | None:
        """The mean interval of the last frames; None before it is known."""
        return self._continuity.period_s

    @property
    def last_arrival(self) -> float | None:
        """`time.monotonic()` of the last frame since `restart`; None before it."""
        return self._continuity.last_arrival

    def inspect(self, frame: Frame, now: float, source_corrupt: int = 0) -> FrameVerdict:
        """Inspect `frame`, which arrived at `now`.

        Args:
            frame: the next one.
            now: `time.monotonic()`.
            source_corrupt: number of images since `restart` that the source found damaged and kept.
        """
        if source_corrupt > self._source_corrupt:
            self.corrupt += source_corrupt - self._source_corrupt
            self._source_corrupt = source_corrupt
            self._note(PictureFault("corrupt", "the decoder finds damaged images"), now)
        last, period_s = self.last_arrival, self.period_s
        rate = self._continuity.arrive(now)
        if self._live and last is not None and period_s is not None and frame.clock != "sensor":
            gap_s = now - last
            if gap_s > max(self._gap_s, 3 * period_s):
                text = f"it was silent for {gap_s:.1f} s; what came meanwhile is too old"
                return FrameVerdict(use=False, reopen=SourceError(text, reason="stalled"))
        if not is_whole(frame.image):
            return self._corrupt(now)
        use = True
        if self._live:
            change = self._continuity.compare(frame, now)
            if change is not None:
                self._note(PictureFault("changed", change.text), now)
                use = not change.backwards
                if self._continuity.changes_too_often(now):
                    text = f"it changed {MOST_CHANGES} times within {CHANGES_WITHIN_S:g} s, "
                    error = SourceError(text + f"the last time {change.text}", reason="changed")
                    return FrameVerdict(use=False, fault=self._passing, reopen=error)
        image = frame.image
        raw = frame.clock == "sensor" and image.pixel_format in _RAW
        fault = self._health.inspect(image, now, raw=raw, still=not self._live)
        if now < self._passing_until and (fault is None or fault.reason not in UNUSABLE):
            fault = self._passing
        return FrameVerdict(use, fault, note=rate if self._live else "")

    def _corrupt(self, now: float) -> FrameVerdict:
        self.corrupt += 1
        self._note(PictureFault("corrupt", "frames arrive incomplete"), now)
        full = len(self._corrupt_at) == MOST_CORRUPT
        often = full and now - self._corrupt_at[0] < _FAULT_LASTS_S
        self._corrupt_at.append(now)
        if often:
            self._corrupt_at.clear()
            text = f"more than {MOST_CORRUPT} incomplete frames within {_FAULT_LASTS_S:g} s"
            return FrameVerdict(use=False, reopen=SourceError(text, reason="corrupt"))
        return FrameVerdict(use=False, fault=self._passing)

    def _note(self, fault: PictureFault, now: float) -> None:
        self._passing, self._passing_until = fault, now + _FAULT_LASTS_S
