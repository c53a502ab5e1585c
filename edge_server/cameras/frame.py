"""Frames, the sources that produce them, and the pace of recordings."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from edge_server.pixels import Image, PixelFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    import numpy as np
    from numpy.typing import NDArray

# Below 1 Hz, a recording cannot be distinguished from a stalled camera.
SLOWEST_FPS = 1.0
FASTEST_FPS = 1000.0

# 8K video has a little less. A JPEG of a few kilobytes may unpack to gigabytes.
LARGEST_PX = 2**25
# The same for videos that FFmpeg decodes. For H.264 and H.265 it keeps up to 17 pictures: 0.7 GB of
# this size.
LARGEST_VIDEO_PX = 2**24

# Suffixes of image files, alone or in a folder.
IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png"})

# A delay by the disk or the scheduler up to this long is caught up. After a longer delay, playback
# continues from its current frame, as a camera never sends a burst of late frames.
CATCH_UP_S = 0.25


# The source of a frame's capture time: a camera's clock (`sensor`: the driver stamps frames with
# CLOCK_MONOTONIC; `rtp`: the pace of the RTP timestamps; `ntp`: the camera's NTP time), or the
# moment at which the frame arrived here. `recording` is a recording's own clock, whose time passes
# from frame to frame alone: lock-step, in which every frame is taken, and no frame is ever late.
CaptureClock = Literal["arrival", "sensor", "rtp", "ntp", "recording"]


class PictureTooLarge(ValueError):
    """A picture has more than `LARGEST_PX`, or that of a video more than `LARGEST_VIDEO_PX`."""


def check_size(width: int, height: int, most_px: int = LARGEST_PX) -> None:
    """Raise PictureTooLarge for a picture that no camera sends, before memory is taken for it."""
    if width * height > most_px:
        raise PictureTooLarge(
            f"its images are {width} x {height}, more than {most_px >> 20} megapixels; set a "
            "lower resolution in the camera"
        )


class UsefulSize:
    """The smallest picture of a camera that loses nothing for its model; safe from any thread.

    A decoder that can make its pictures smaller for less work makes none below this size. The
    camera's model sets it, and may be replaced while the camera is read.

    Attributes:
        size: width and height in px; None where the model needs whole pictures, or is not known.
    """

    def __init__(self) -> None:
        self.size: tuple[int, int] | None = None

    def divisor(self, width: int, height: int, divisors: Sequence[int]) -> int:
        """Return the largest of `divisors` of a picture of that size in px; 1 where none fits."""
        if self.size is None:
            return 1
        across, down = self.size
        fitting = [d for d in divisors if width // d >= across and height // d >= down]
        return max(fitting, default=1)


class SharedInputs(Protocol):
    """The inputs of several models, made of one image; see `FrameInputs`."""

    def of(self, taker: Any, image: Image) -> tuple[Any, Any]: ...


@dataclass(frozen=True, eq=False)
class Frame:
    """One captured image and its capture time.

    Attributes:
        id: counts every frame that the source delivers, from 0, dropped ones included.
        capture_mono_ns: CLOCK_MONOTONIC of the capture, as `clock` knows it; never later than the
            arrival.
        capture_epoch_ns: Unix time of the same moment.
        clock: how the capture time is known.
        uncertainty_ns: the capture may have been earlier by this much; 0 where that is not known,
            as for `arrival`.
        picture_size: width and height in px of the camera's picture, where the decoder has made
            `image` smaller; None where `image` has its size.
        arrived_mono_ns: CLOCK_MONOTONIC when the camera's reader handed it over; 0 before.
        jpeg: the picture as the camera sent it, `image` was decoded from it; None where the camera
            sends no JPEGs, or another library decodes them.
        inputs: what several networks take of it; None where there is but one.
    """

    id: int
    image: Image
    capture_mono_ns: int
    capture_epoch_ns: int
    clock: CaptureClock = "arrival"
    uncertainty_ns: int = 0
    picture_size: tuple[int, int] | None = None
    jpeg: bytes | None = None
    arrived_mono_ns: int = 0
    inputs: SharedInputs | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in px of the camera's picture, in which lanes have their coordinates."""
        if self.picture_size is not None:
            return self.picture_size
        height, width = self.image.planes[0].shape[:2]
        return width, height

    def age_ns(self, now_mono_ns: int) -> int:
        """Return the time since the capture, in ns; 0 on a recording's own clock."""
        return 0 if self.clock == "recording" else now_mono_ns - self.capture_mono_ns

    @staticmethod
    def arrived(number: int, image: Image) -> Frame:
        """Return the frame of an image that arrives now."""
        return Frame(number, image, time.monotonic_ns(), time.time_ns())


class FrameSource(Protocol):
    """Delivers frames in order, at the source's own pace, to one thread."""

    @property
    def corrupt(self) -> int:
        """Number of images that were damaged, delivered or not; 0 where the source cannot tell."""
        ...

    def read(self) -> Frame | None:
        """Return the next frame; its id counts from 0. None at the end of a recording.

        Blocks until the frame is due: a recording is played at its frame rate. A live source raises
        where frames stop, as soon as it can tell; the image stays valid until the caller drops it.

        Raises:
            SourceError: the source failed; its reason says how.
        """
        ...

    def close(self) -> None:
        """Release the device or file; a second call does nothing."""
        ...


class Pace:
    """Paces its caller at `fps` calls a second, without drift.

    The first `wait` returns at once; each later one is due one period after the previous one was
    due, however late the caller came. A caller more than `CATCH_UP_S` late starts a new schedule.

    Args:
        fps: frames per second; 0 never waits.
        lockstep: never waits either: the next frame is due one period after the one before on the
            recording's own clock, which begins now.
    """

    def __init__(
        self,
        fps: float = 0.0,
        *,
        lockstep: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.period_ns = round(1e9 / fps) if fps else 0
        self.lockstep = lockstep
        self._clock = clock
        self._sleep = sleep
        self._due_ns: int | None = None

    def wait(self, period_ns: int | None = None) -> int:
        """Block until the next frame is due, after another period where one is given; return when
        it was due."""
        period_ns = self.period_ns if period_ns is None else period_ns
        now_ns = self._clock()
        due_ns = now_ns if self._due_ns is None else self._due_ns + period_ns
        if self.lockstep:
            self._due_ns = due_ns
            return due_ns
        if now_ns - due_ns > CATCH_UP_S * 1e9:
            due_ns = now_ns
        while (left_ns := due_ns - now_ns) > 0:
            self._sleep(left_ns / 1e9)
            now_ns = self._clock()
        self._due_ns = due_ns
        return due_ns


# The rate is that of so many intervals, so that the bursts of a network even out, and is known from
# so many on.
RATE_INTERVALS = 30
_FEWEST_INTERVALS = 5
# A source is silent for too long after so many periods.
PERIODS = 3


class StallWatch:
    """Measures the rate of frames; says how long their source may be silent. Not thread-safe.

    Attributes:
        last: when the last frame arrived, monotonic, in seconds; None before the first.
        period_s: the mean of the last intervals; None before it is known.
        is_full: it is the mean of `RATE_INTERVALS`.
    """

    def __init__(self) -> None:
        self.last: float | None = None
        self.period_s: float | None = None
        self.is_full = False
        self._arrivals: deque[float] = deque(maxlen=RATE_INTERVALS + 1)

    def arrive(self, now: float) -> None:
        self.last = now
        self._arrivals.append(now)
        if (intervals := len(self._arrivals) - 1) >= _FEWEST_INTERVALS:
            self.period_s = (now - self._arrivals[0]) / intervals
            self.is_full = intervals == RATE_INTERVALS

    def measure_anew(self) -> None:
        """Let the period be that of the frames from the last one on."""
        self.period_s, self.is_full = None, False
        while len(self._arrivals) > 1:
            self._arrivals.popleft()

    def limit_s(self, shortest_s: float, unknown_s: float, stated_s: float = 0.0) -> float:
        """Return how long the source may be silent: three periods, and `shortest_s` at least;
        `unknown_s` before the period is known, for which `stated_s` stands where it is not 0."""
        period_s = self.period_s or stated_s
        return max(PERIODS * period_s, shortest_s) if period_s else unknown_s


class Recording:
    """Plays images as they become due; a FrameSource.

    The first image is decoded by the constructor, so that a bad recording raises there.

    Args:
        images: each (H, W, 3) uint8 BGR; may raise SourceError.
        fps: frames per second.
        lockstep: see `Pace`.
    """

    def __init__(
        self,
        images: Generator[NDArray[np.uint8], None, None],
        fps: float,
        *,
        lockstep: bool = False,
    ) -> None:
        self.corrupt = 0
        self.pace = Pace(fps, lockstep=lockstep)
        self._images = images
        self._first = next(images, None)
        self._count = 0

    def read(self) -> Frame | None:
        # Made before it is due, an image would take processors from the frame before it.
        due_ns = self.pace.wait()
        first, self._first = self._first, None
        image = next(self._images, None) if first is None else first
        if image is None:
            return None
        self._count += 1
        mono_ns, epoch_ns = time.monotonic_ns(), time.time_ns()
        clock: CaptureClock = "arrival"
        if self.pace.lockstep:  # it was captured when it was due on its own clock
            mono_ns, epoch_ns, clock = due_ns, epoch_ns + due_ns - mono_ns, "recording"
        bgr = Image(PixelFormat.BGR, (image,))
        return Frame(self._count - 1, bgr, mono_ns, epoch_ns, clock)

    def close(self) -> None:
        self._images.close()


_S = 1_000_000_000
# The smallest transit of the last minute is taken as the transit of an undelayed frame: the
# camera's clock drifts by about a millisecond in that time (20 ppm).
_WINDOW_NS = 60 * _S
_BUCKET_NS = 5 * _S
# No frame is older: a stalled source is opened again long before.
_OLDEST_NS = 10 * _S
# What an honest timestamp may be ahead of the arrival, as clocks differ.
_AHEAD_NS = _S // 2


class CaptureTime(NamedTuple):
    """When a frame was captured: CLOCK_MONOTONIC, never later than the arrival."""

    mono_ns: int
    clock: CaptureClock


class TimestampMapper:
    """Maps the timestamps of one opened camera to CLOCK_MONOTONIC.

    CaptureTime times of consecutive frames never run backwards. A timestamp that jumps or runs
    backwards is counted, its frame gets the arrival time, and later timestamps count from there.

    Args:
        clock: `sensor` for timestamps that are CLOCK_MONOTONIC; `rtp` for timestamps that only have
            the camera's pace, from any beginning; `arrival` ignores timestamps.
    """

    def __init__(self, clock: Literal["sensor", "rtp", "arrival"]) -> None:
        self.faults = 0
        self._clock = clock
        self._last_stamp_ns: int | None = None
        self._last_ns = 0
        self._ntp_offset_ns: int | None = None
        # The smallest transit of each bucket: its beginning, and nanoseconds.
        self._transits: deque[tuple[int, int]] = deque()

    def map(self, arrival_ns: int, stamp_ns: int | None, ntp_ns: int | None = None) -> CaptureTime:
        """Return the capture time of a frame that arrived at `arrival_ns`.

        Args:
            arrival_ns: CLOCK_MONOTONIC.
            stamp_ns: the frame's timestamp; None where it has none.
            ntp_ns: the camera's NTP time of this frame as CLOCK_MONOTONIC; None where it gave none.
        """
        if self._clock == "arrival" or stamp_ns is None:
            return self._captured(arrival_ns, arrival_ns, "arrival")
        last, self._last_stamp_ns = self._last_stamp_ns, stamp_ns
        if (last is not None and stamp_ns <= last) or self._jumped(arrival_ns, stamp_ns):
            self.faults += 1
            self._transits.clear()
            self._ntp_offset_ns = None
            if self._clock == "rtp":
                self._transits.append((arrival_ns, arrival_ns - stamp_ns))
            return self._captured(arrival_ns, arrival_ns, "arrival")
        if self._clock == "sensor":
            return self._captured(stamp_ns, arrival_ns, "sensor")
        capture_ns = stamp_ns + self._smallest_transit(arrival_ns, arrival_ns - stamp_ns)
        if ntp_ns is not None:
            # A camera without time server is off by hours; its NTP time is of no use then.
            plausible = arrival_ns - _OLDEST_NS <= ntp_ns <= arrival_ns + _AHEAD_NS
            self._ntp_offset_ns = ntp_ns - stamp_ns if plausible else None
        if self._ntp_offset_ns is not None:
            return self._captured(stamp_ns + self._ntp_offset_ns, arrival_ns, "ntp")
        return self._captured(capture_ns, arrival_ns, "rtp")

    def _jumped(self, arrival_ns: int, stamp_ns: int) -> bool:
        if self._clock == "sensor":
            transit_ns = arrival_ns - stamp_ns
        elif self._transits:
            transit_ns = arrival_ns - stamp_ns - min(least for _, least in self._transits)
        else:
            return False
        return not -_AHEAD_NS <= transit_ns <= _OLDEST_NS

    def _smallest_transit(self, arrival_ns: int, transit_ns: int) -> int:
        transits = self._transits
        if not transits or arrival_ns - transits[-1][0] >= _BUCKET_NS:
            transits.append((arrival_ns, transit_ns))
        elif transit_ns < transits[-1][1]:
            transits[-1] = (transits[-1][0], transit_ns)
        while arrival_ns - transits[0][0] > _WINDOW_NS:
            transits.popleft()
        return min(least for _, least in transits)

    def _captured(self, capture_ns: int, arrival_ns: int, clock: CaptureClock) -> CaptureTime:
        self._last_ns = max(self._last_ns, min(capture_ns, arrival_ns))
        return CaptureTime(self._last_ns, clock)
