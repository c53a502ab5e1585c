"""Decides for each frame of a camera whether it is used, and what is wrong with the source: its
pictures, or that its frames do not continue each other in size, rate and capture times."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from edge_server.cameras.health import PictureHealth
from edge_server.cameras.status import UNUSABLE, PictureFault
from edge_server.errors import SourceError
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
# The rate is that of the last frames, so that the bursts of a network even out.
_RATE_FRAMES = 30
# A rate is known from this many intervals on.
_FEWEST_INTERVALS = 5
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


class StreamChange(NamedTuple):
    """What changed from one frame to the next.

    Attributes:
        text: what, from what, and to what.
        backwards: the frame was captured before its predecessor, and comes too late.
    """

    text: str
    backwards: bool = False


class Continuity:
    """Compares each frame of one opened source with the frames before it; not thread-safe."""

    def __init__(self) -> None:
        self._arrivals: deque[float] = deque(maxlen=_RATE_FRAMES + 1)
        self._usual_period_s: float | None = None
        self._settling = False
        self._rate_changed = float("-inf")
        self._form: tuple[str, int, int] | None = None
        self._capture_ns = 0
        self._age_ns = 0
        self._changes: deque[float] = deque(maxlen=MOST_CHANGES)

    @property
    def period_s(self) -> float | None:
        """The mean interval of the last frames; None before it is known."""
        if len(self._arrivals) <= _FEWEST_INTERVALS:
            return None
        return (self._arrivals[-1] - self._arrivals[0]) / (len(self._arrivals) - 1)

    @property
    def last_arrival(self) -> float | None:
        """`time.monotonic()` of the last frame; None before the first."""
        return self._arrivals[-1] if self._arrivals else None

    def arrive(self, now: float) -> str:
        """Note that a frame arrives at `now`; return how the rate has changed, "" if it has not."""
        self._arrivals.append(now)
        period_s, usual_s = self.period_s, self._usual_period_s
        if len(self._arrivals) <= _RATE_FRAMES or not period_s:
            return ""
        if now - self._rate_changed < _RATE_CHANGES_AFTER_S:
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
            self._arrivals.clear()
            self._arrivals.append(now)
            return ""
        self._usual_period_s = period_s
        self._rate_changed = now
        return f"the rate went from {1 / usual_s:.3g} to {1 / period_s:.3g} frames/s"

    def compare(self, frame: Frame, now: float) -> StreamChange | None:
        """Return what distinguishes `frame`, which arrived at `now`, from its predecessor; None
        where it is nothing."""
        form = frame.image.pixel_format.value, *frame.size
        age_ns = round(now * 1e9) - frame.capture_mono_ns
        before, self._form = self._form, form
        last_ns, self._capture_ns = self._capture_ns, max(self._capture_ns, frame.capture_mono_ns)
        last_age_ns, self._age_ns = self._age_ns, age_ns
        if before is None:
            return None
        if frame.capture_mono_ns < last_ns:
            by_ms = (last_ns - frame.capture_mono_ns) // 1_000_000
            return self._changed(
                now, StreamChange(f"the capture time ran back by {by_ms} ms", True)
            )
        if form != before:
            text = f"the image went from {_spelt(before)} to {_spelt(form)}"
            return self._changed(now, StreamChange(text))
        if abs(age_ns - last_age_ns) > _JUMP_NS:
            by_ms = (last_age_ns - age_ns) // 1_000_000
            return self._changed(now, StreamChange(f"the capture time jumped by {by_ms} ms"))
        return None

    def changes_too_often(self, now: float) -> bool:
        """Whether the source changed `MOST_CHANGES` times within `CHANGES_WITHIN_S`."""
        full = len(self._changes) == MOST_CHANGES
        return full and now - self._changes[0] < CHANGES_WITHIN_S

    def _changed(self, now: float, change: StreamChange) -> StreamChange:
        self._changes.append(now)
        return change


def is_whole(image: Image) -> bool:
    """Whether the planes of `image` have the shapes of its format, so that it can be read."""
    first, *chroma = image.planes
    if not first.size:
        return False
    height, width = first.shape[:2]
    shapes = [plane.shape for plane in chroma]
    match image.pixel_format:
        case PixelFormat.BGR:
            return first.shape == (height, width, 3) and not chroma
        case PixelFormat.GREY:
            return first.shape in ((height, width), (height, width, 1)) and not chroma
        case PixelFormat.YUY2:
            return first.shape == (height, width, 2) and not width % 2 and not chroma
        case PixelFormat.NV12:
            halves = [(height // 2, width)]
        case PixelFormat.I420:
            halves = [(height // 2, width // 2)] * 2
    return first.ndim == 2 and not height % 2 and not width % 2 and shapes == halves


def _spelt(form: tuple[str, int, int]) -> str:
    pixel_format, width, height = form
    return f"{width} x {height} {pixel_format}"
