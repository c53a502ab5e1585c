"""Decides for each frame of a camera whether it is used, and what is wrong with the source: its
pictures, or that its frames do not continue each other in size, rate and capture times."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from edge_server.cameras.frame import StallWatch
from edge_server.cameras.health import PictureHealth
from edge_server.cameras.status import UNUSABLE
from edge_server.errors import Reason, SourceError
from edge_server.pixels import PixelFormat

if TYPE_CHECKING:
    from edge_server.cameras.frame import Frame
    from edge_server.pixels import Image

# A fault that a single frame shows is the camera's state for this long.
_FAULT_LASTS_S = 2.0
# Formats of sensors that no decoder gives: their frames were never compressed. NV12 may be either.
_RAW = (PixelFormat.YUY2, PixelFormat.GREY)
# So many frames that are not whole within that time, and the source is opened again.
MOST_CORRUPT = 10
# A camera that the processor cannot follow loses frames; half as many or twice as many is a change.
_RATE_RATIO = 1.8
# A camera that sends in bursts would have another rate many times a second.
_RATE_CHANGES_AFTER_S = 5.0
# The time of the capture jumps where the age of frames changes by more from one to the next.
_JUMP_NS = 500_000_000
# A source that changes this often within the time is opened again.
MOST_CHANGES = 3
CHANGES_WITHIN_S = 10.0


class FrameVerdict(NamedTuple):
    """What follows from one frame.

    Attributes:
        use: the frame may be delivered.
        fault: what is wrong with the camera's frames at present.
        reopen: why the source has to be opened again.
        note: what else is worth a line in the log, and a count under the reason `changed`.
    """

    use: bool = True
    fault: Reason | None = None
    reopen: SourceError | None = None
    note: str = ""


class FrameInspection:
    """Inspects the frames of one camera in their order; not thread-safe.

    Frames that are not whole, and frames that were captured before their predecessor, are not used.

    Attributes:
        corrupt: number of frames that were not whole, or that the source's decoder found damaged.
        watch: the arrivals since `restart`.

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
        self._health = PictureHealth()
        self._passing: Reason | None = None
        self._passing_until = 0.0
        self._corrupt_at: deque[float] = deque(maxlen=MOST_CORRUPT)
        self._whole: object = None  # the shapes of the last frame's planes
        self.restart()

    def restart(self) -> None:
        """Forget the previous frames, as the source is opened again; what the camera usually shows
        is remembered."""
        self.watch = StallWatch()
        self._health.restart()
        self._source_corrupt = 0
        self._usual_period_s: float | None = None
        self._settling = False
        self._rate_changed = float("-inf")
        self._form: tuple[PixelFormat, tuple[int, int]] | None = None
        self._capture_ns = self._age_ns = 0
        self._changes: deque[float] = deque(maxlen=MOST_CHANGES)

    def inspect(self, frame: Frame, now: float, source_corrupt: int = 0) -> FrameVerdict:
        """Inspect the next frame, which arrived at `now` (`time.monotonic()`); since `restart` its
        source has found `source_corrupt` images damaged, and kept them."""
        if source_corrupt > self._source_corrupt:
            self.corrupt += source_corrupt - self._source_corrupt
            self._source_corrupt = source_corrupt
            self._note("corrupt", "the decoder finds damaged images", now)
        watch, backlog, rate = self.watch, False, ""
        silent_s = now - (watch.last or now)
        if self._live and silent_s > self._gap_s and frame.clock != "sensor":
            backlog = silent_s > watch.limit_s(self._gap_s, float("inf"))
        watch.arrive(now)
        if self._live and watch.is_full:
            rate = self._rate_change(now)
        if backlog:
            text = f"it was silent for {silent_s:.1f} s; what came meanwhile is too old"
            return FrameVerdict(use=False, reopen=SourceError(text, reason="stalled"))
        image = frame.image
        planes = image.pixel_format, [plane.shape for plane in image.planes]
        if planes != self._whole and not is_whole(image):
            return self._torn(now)
        self._whole = planes
        use = True
        if self._live:
            use = frame.capture_mono_ns >= self._capture_ns
            if change := self._change(frame, now):
                self._note("changed", change, now)
                often = len(self._changes) == MOST_CHANGES
                if often and now - self._changes[0] < CHANGES_WITHIN_S:
                    text = f"it changed {MOST_CHANGES} times within {CHANGES_WITHIN_S:g} s, "
                    error = SourceError(f"{text}the last time {change}", reason="changed")
                    return FrameVerdict(use=False, fault=self._passing, reopen=error)
        raw = frame.clock == "sensor" and image.pixel_format in _RAW
        fault = self._health.inspect(image, now, raw=raw, still=not self._live)
        if now < self._passing_until and (fault is None or fault.code not in UNUSABLE):
            fault = self._passing
        return FrameVerdict(use, fault, note=rate)

    def _rate_change(self, now: float) -> str:
        """Return how the rate has changed, "" if it has not."""
        period_s, usual_s = self.watch.period_s, self._usual_period_s
        if not period_s or now - self._rate_changed < _RATE_CHANGES_AFTER_S:
            return ""
        if usual_s is None:
            self._usual_period_s = period_s
            return ""
        settling, self._settling = self._settling, False
        if 1 / _RATE_RATIO < period_s / usual_s < _RATE_RATIO:
            return ""
        if not settling:
            # Some of these frames came at the former rate; the next ones show the new one.
            self._settling = True
            self.watch.measure_anew()
            return ""
        self._usual_period_s = period_s
        self._rate_changed = now
        return f"the rate went from {1 / usual_s:.3g} to {1 / period_s:.3g} frames/s"

    def _change(self, frame: Frame, now: float) -> str:
        """Return what distinguishes `frame` from its predecessor, "" if nothing does."""
        capture_ns, form = frame.capture_mono_ns, (frame.image.pixel_format, frame.size)
        age_ns = round(now * 1e9) - capture_ns
        before, self._form = self._form, form
        younger_ns, self._age_ns = self._age_ns - age_ns, age_ns
        back_ns = self._capture_ns - capture_ns
        self._capture_ns = max(self._capture_ns, capture_ns)
        if before is None or (back_ns <= 0 and form == before and abs(younger_ns) <= _JUMP_NS):
            return ""
        self._changes.append(now)
        if back_ns > 0:
            return f"the capture time ran back by {back_ns // 1_000_000} ms"
        if form != before:
            return f"the image went from {spelt(*before)} to {spelt(*form)}"
        return f"the capture time jumped by {younger_ns // 1_000_000} ms"

    def _torn(self, now: float) -> FrameVerdict:
        self.corrupt += 1
        self._note("corrupt", "frames arrive incomplete", now)
        full = len(self._corrupt_at) == MOST_CORRUPT
        often = full and now - self._corrupt_at[0] < _FAULT_LASTS_S
        self._corrupt_at.append(now)
        if often:
            self._corrupt_at.clear()
            text = f"more than {MOST_CORRUPT} incomplete frames within {_FAULT_LASTS_S:g} s"
            return FrameVerdict(use=False, reopen=SourceError(text, reason="corrupt"))
        return FrameVerdict(use=False, fault=self._passing)

    def _note(self, reason: str, text: str, now: float) -> None:
        self._passing, self._passing_until = Reason(reason, text), now + _FAULT_LASTS_S


def is_whole(image: Image) -> bool:
    """Whether the planes of `image` have the shapes of its format, so that it can be read."""
    first, pixel_format = image.planes[0], image.pixel_format
    height, width = first.shape[:2]
    if not first.size or (pixel_format.has_chroma and width % 2):
        return False
    if pixel_format.is_subsampled and height % 2:
        return False
    shapes = tuple(plane.shape for plane in image.planes)
    luma_alone = pixel_format is PixelFormat.GREY and shapes == ((height, width),)
    return luma_alone or shapes == pixel_format.shapes(width, height)


def spelt(pixel_format: PixelFormat, size: tuple[int, int]) -> str:
    """Return what people read of the form of a camera's images; `size` is in px."""
    return f"{size[0]} x {size[1]} {pixel_format.value}"
