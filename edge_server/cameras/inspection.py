"""Decides for each frame of a camera whether it is used, and what is wrong with the source: its
frames do not continue each other in size, rate and capture times, or its pictures do not show the
world: frozen, black, white, covered, blurred.

The thresholds come from 658 real road pictures of 15 cameras and two clips, and from faults made of
them; `benchmarks/camera_health.py` measures both. What pictures alone cannot show:

- a lens that is blurred from the first picture on looks like another lens;
- a partly covered lens in the dark looks like an unlit road, and a dark stream that is compressed
  like a frozen one: neither is judged there;
- see `FrozenDetector` for a stream that froze while the vehicle stood.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edge_server.cameras.frame import StallWatch
from edge_server.cameras.status import UNUSABLE
from edge_server.errors import Reason, SourceError
from edge_server.pixels import ColourRange, PixelFormat

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.cameras.frame import Frame
    from edge_server.pixels import Image


# About so many samples across the picture. A cell is the mean of 4 x 4 of them, so that a sensor's
# noise goes down to a quarter; a tile is 3 x 2 cells, 60 x 40 px of 1280 x 720.
_SAMPLES_ACROSS = 256
_CELL = 4
_TILE_ROWS, _TILE_COLUMNS = 3, 2
_BLACK, _WHITE = 16.0, 235.0
FROZEN_AFTER_S = 1.0
# Of a raw camera; the noise of a sensor differs in each frame (reliability of cameras, C3).
IDENTICAL_FRAMES = 10
# A tile moves where its cells change by more levels in the mean: noise of 2 levels never does that,
# driving in 0.22 of the textured tiles at least (two clips, 25 frames/s, H.264).
_MOVING_CHANGE = 1.5
_MOVING_SHARE = 0.15
_MOVING_SHARE_OF_HALF = 0.1
# The mean change is 1.0 at least while driving, 0.3 in the last 0.2 s of braking, and up to 0.14 in
# a stream that encodes the same picture again and again, key frames aside; in a dim picture less in
# proportion.
_STILL_CHANGE = 0.25
# A vehicle that brakes moves less and less within the last second. These are the parts of it that
# are compared, and the least ratio of their changes that is no braking.
_DRIVE_S = 1.0
_DRIVE_END_S = 0.2
_SUDDEN_RATIO = 0.5
_DRIVING_SHARE = 0.8  # of the frames
# A cover, or a light, changes the picture by far more than driving does.
_OTHER_PICTURE_RATIO = 3.0
# The picture's p99 below which a compressed stream shows too little to be judged, in levels.
_DIM_P99 = 60.0
_BRIGHT_P99 = 200.0


@dataclass(frozen=True, eq=False)
class Thumbnail:
    """Samples of the brightness of a frame at equal distances.

    Attributes:
        samples: (rows, columns) uint8, as the camera sent them.
        cells: (rows / 4, columns / 4) float32, 0..255 from black to white.
        scale: from a sample to the levels of `cells`.
    """

    samples: NDArray[np.uint8]
    cells: NDArray[np.float32]
    scale: float

    @staticmethod
    def of(image: Image) -> Thumbnail | None:
        """Return the thumbnail of `image`; None where it is smaller than one tile."""
        luma = image.luma()
        step = max(1, round(luma.shape[1] / _SAMPLES_ACROSS))
        height, width = _CELL * _TILE_ROWS, _CELL * _TILE_COLUMNS
        rows = luma.shape[0] // step // height * height
        # An even number of tiles, for the halves of the picture.
        columns = luma.shape[1] // step // (2 * width) * 2 * width
        if not rows or not columns:
            return None
        samples = np.ascontiguousarray(luma[::step, ::step][:rows, :columns])
        lines = samples.astype(np.uint16).reshape(rows // _CELL, _CELL, columns)
        # Many times faster than a sum over two axes.
        sums = lines[:, 0] + lines[:, 1] + lines[:, 2] + lines[:, 3]
        sums = sums[:, 0::_CELL] + sums[:, 1::_CELL] + sums[:, 2::_CELL] + sums[:, 3::_CELL]
        cells = sums.astype(np.float32) * np.float32(1 / _CELL**2)
        scale = 1.0
        limited = image.colour.range is ColourRange.LIMITED
        if limited and image.pixel_format is not PixelFormat.BGR:
            scale = 255.0 / (_WHITE - _BLACK)
            cells = np.clip((cells - np.float32(_BLACK)) * np.float32(scale), 0, 255)
        return Thumbnail(samples, cells, scale)


def tiles_of(cells: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return `cells` as (rows, cells of a tile's row, columns, cells of a tile's column)."""
    rows, columns = cells.shape
    return cells.reshape(rows // _TILE_ROWS, _TILE_ROWS, columns // _TILE_COLUMNS, _TILE_COLUMNS)


class _Motion(NamedTuple):
    """From one frame to the next: the mean change, and whether the whole picture moved."""

    at: float
    change: float
    whole: bool


class FrozenDetector:
    """Finds pictures that stand while frames arrive. Not thread-safe.

    A raw camera is frozen after `IDENTICAL_FRAMES` frames and `FROZEN_AFTER_S` that are identical
    bit for bit. A decoder repeats a parked scene bit for bit until the next key frame, so that a
    compressed stream is frozen only where the whole picture moved until it stood from one frame
    to the next, and stands for `FROZEN_AFTER_S`: no vehicle stops like that. Noise or a clock in
    the picture make no difference to it. A stream that froze while the vehicle stood looks like a
    parked vehicle.
    """

    def __init__(self) -> None:
        self._before: Thumbnail | None = None
        self._motions: deque[_Motion] = deque()
        self._identical = 0
        self._identical_since = 0.0
        self._stood = False  # the last frame did
        self._held_back: _Motion | None = None
        self._stands_since: float | None = None  # after it stood at once

    def look(
        self,
        thumbnail: Thumbnail,
        textured: NDArray[np.bool_],
        p99: float,
        now: float,
        *,
        raw: bool,
    ) -> str:
        """Return why the camera is frozen, "" if it is not.

        Args:
            thumbnail: of the next frame.
            textured: (rows, columns) of tiles, those that show structure.
            p99: the level that 1 % of the cells exceed.
            now, raw: see `PictureHealth.inspect`.
        """
        before, self._before = self._before, thumbnail
        if before is None or before.samples.shape != thumbnail.samples.shape:
            self._identical = 0
            return ""
        self._count_identical(before, thumbnail, now)
        motion = _motion(before, thumbnail, textured, now)
        self._note(motion, p99)
        identical = self._identical if raw else 0
        if identical >= IDENTICAL_FRAMES and now - self._identical_since >= FROZEN_AFTER_S:
            return f"{identical} frames of the sensor are identical"
        stands_since = self._stands_since
        if stands_since is not None and now - stands_since >= FROZEN_AFTER_S:
            return "the picture stopped from one frame to the next while it was moving"
        return ""

    def _count_identical(self, before: Thumbnail, thumbnail: Thumbnail, now: float) -> None:
        if not np.array_equal(before.samples, thumbnail.samples):
            self._identical = 0
            return
        if not self._identical:
            self._identical_since = now
        self._identical += 1

    def _note(self, motion: _Motion, p99: float) -> None:
        motions = self._motions
        stands = motion.change < _STILL_CHANGE * min(1.0, p99 / _BRIGHT_P99) and not motion.whole
        begins = stands and self._stands_since is None and p99 >= _DIM_P99
        if motion.whole or not (stands or self._stood):
            # A frame alone that differs, and not everywhere, is a key frame of a frozen stream.
            self._stands_since = None
        elif begins and self._was_driving(motion.at):
            self._stands_since = motion.at
        self._stood = stands
        # A stream may have each frame twice: one that stands between two that move is left out.
        held_back, self._held_back = self._held_back, None
        if stands and held_back is None and motions and motions[-1].whole:
            self._held_back = motion
            return
        if held_back is not None and stands:
            motions.append(held_back)
        motions.append(motion)
        while motion.at - motions[0].at > _DRIVE_S + _DRIVE_END_S:
            motions.popleft()

    def _was_driving(self, now: float) -> bool:
        """Whether the whole picture moved all the time until now, and no less in the end."""
        motions = self._motions
        if not motions or now - motions[0].at < _DRIVE_S:
            return False
        end = [motion for motion in motions if now - motion.at < _DRIVE_END_S]
        before = [motion for motion in motions if now - motion.at >= _DRIVE_END_S]
        if sum(motion.whole for motion in before) < _DRIVING_SHARE * len(before):
            return False
        # The first frame of a frozen stream that is encoded again may be anything.
        if not end or sum(not motion.whole for motion in end) > 1:
            return False
        usual = sum(motion.change for motion in before) / len(before)
        latest = sum(motion.change for motion in end) / len(end)
        highest = max(motion.change for motion in end)
        return latest >= _SUDDEN_RATIO * usual and highest < _OTHER_PICTURE_RATIO * usual


def _motion(
    before: Thumbnail, thumbnail: Thumbnail, textured: NDArray[np.bool_], now: float
) -> _Motion:
    changes = np.abs(thumbnail.cells - before.cells)
    tiles = tiles_of(changes)
    # Many times faster than a mean over two axes.
    rows = tiles[:, 0] + tiles[:, 1] + tiles[:, 2]
    moving = (rows[..., 0] + rows[..., 1]) * np.float32(1 / 6) > _MOVING_CHANGE
    moving &= textured
    middle = moving.shape[1] // 2
    known = max(1, int(np.count_nonzero(textured)))
    left = int(np.count_nonzero(moving[:, :middle]))
    right = int(np.count_nonzero(moving)) - left
    whole = left + right >= _MOVING_SHARE * known
    whole = whole and min(left, right) >= _MOVING_SHARE_OF_HALF * known / 2
    return _Motion(now, float(changes.mean()), whole)


# A fault is one after this long, and over after this long without it; sooner where it costs lanes.
ON_AFTER_S = 1.0
OFF_AFTER_S = 2.0
UNUSABLE_OFF_AFTER_S = 0.6
# The frames that are looked at: motion shows from one to the next, the rest in a few.
_MOTION_PERIOD_S = 0.015
_PICTURE_PERIOD_S = 0.2

# In levels of full range. Real pictures have p99 169 and more, p1 88 and less, a contrast (std by
# p99) of 0.14 and more; a tenth of their brightness still has a std of 3.1, a plain cover with a
# gradient a contrast of 0.03.
_DARK_P99 = 40.0
_BLACK_STD = 1.5
_WHITE_P1 = 230.0
_PLAIN_CONTRAST = 0.05
# Cells of a flat tile differ by less than this part of p99. In a real picture 0.42 of the tiles at
# most are flat and not saturated as sky is; with one half covered 0.45 at least.
_FLAT_RANGE = 0.02
_FLAT_SHARE = 0.44
_SATURATED = 245.0
_DAYLIGHT_P75 = 60.0
# In a drive, sharpness and detail stay above 0.29 and 0.30 of their median.
_USUAL_SHARE = 0.25
_USUAL_SAMPLES = 60
_FEWEST_USUAL_SAMPLES = 20
_USUAL_PERIOD_S = 1.0

_TEXTS = {
    "black": "the picture is black: no light, or a covered lens",
    "white_out": "the picture is white: the sensor is blinded",
    "covered": "most of the picture is without structure: the lens is covered",
    "dark": "the picture is too dark to be judged",
    "blurred": "the picture is much less sharp than usual",
    "degraded": "the picture shows much less detail than usual",
}
_BY_WEIGHT = tuple(_TEXTS)


@dataclass
class _Lasting:
    since: float
    last: float
    on: bool = False


class PictureHealth:
    """Judges the pictures of one camera in their order, by their brightness alone.

    Takes 0.1 to 0.2 ms per frame, whatever the size of the picture. Not thread-safe.
    """

    def __init__(self) -> None:
        self._frozen = FrozenDetector()
        self._textured: NDArray[np.bool_] | None = None
        self._p99 = 0.0
        self._lasting: dict[str, _Lasting] = {}
        self._usual: deque[tuple[float, float]] = deque(maxlen=_USUAL_SAMPLES)
        self._usual_detail = self._usual_sharpness = 0.0  # their medians, once they are known
        self._usual_at = -np.inf
        self._size: tuple[int, ...] = ()
        self._motion_at = -np.inf
        self._picture_at = -np.inf
        self._why_frozen = ""

    def restart(self) -> None:
        """Forget the previous frames; what the camera usually shows is remembered."""
        self._frozen = FrozenDetector()
        self._why_frozen = ""
        self._lasting.clear()

    def inspect(self, image: Image, now: float, *, raw: bool, still: bool = False) -> Reason | None:
        """Return the worst that is wrong with the pictures; None where nothing is.

        A picture of less than 24 x 12 px is not judged.

        Args:
            image: the next one, of any size.
            now: of its arrival, `time.monotonic()`.
            raw: nothing between the sensor and here has compressed it.
            still: the source may be a single picture, so that it is never frozen.
        """
        is_due = now - self._picture_at >= _PICTURE_PERIOD_S
        # Motion alone needs each frame, and a still source has none.
        if now - self._motion_at < _MOTION_PERIOD_S or (still and not is_due):
            return self._worst()
        self._motion_at = now
        thumbnail = Thumbnail.of(image)
        if thumbnail is None:
            return None
        if (size := image.planes[0].shape) != self._size:
            # A decoder that makes pictures smaller makes them less sharp.
            self._size, self._textured = size, None
            self._usual.clear()
            self._usual_detail = self._usual_sharpness = 0.0
        if is_due or self._textured is None:
            self._picture_at, self._textured = now, self._look(thumbnail, now)
        if not still:
            self._why_frozen = self._frozen.look(thumbnail, self._textured, self._p99, now, raw=raw)
        return self._worst() if self._lasting or self._why_frozen else None

    def _worst(self) -> Reason | None:
        lasting = [reason for reason, fault in self._lasting.items() if fault.on]
        for reason in sorted(lasting, key=_BY_WEIGHT.index):
            if self._why_frozen and reason not in UNUSABLE:
                break
            return Reason(reason, _TEXTS[reason])
        return Reason("frozen", self._why_frozen) if self._why_frozen else None

    def _look(self, thumbnail: Thumbnail, now: float) -> NDArray[np.bool_]:
        """Judge one picture by itself and against the usual ones; return its textured tiles."""
        cells = thumbnail.cells
        p1, p75, p99 = [float(level) for level in np.percentile(cells, (1, 75, 99))]
        self._p99 = p99
        tiles = tiles_of(cells)
        # Many times faster than the extremes over two axes.
        across = tiles[..., 0], tiles[..., 1]
        highest, lowest = np.maximum(*across), np.minimum(*across)
        ranges = np.maximum(np.maximum(highest[:, 0], highest[:, 1]), highest[:, 2])
        ranges -= np.minimum(np.minimum(lowest[:, 0], lowest[:, 1]), lowest[:, 2])
        flat = ranges < _FLAT_RANGE * p99
        found = set()
        spread = float(cells.std())
        if p99 < _DARK_P99:
            found.add("black" if spread < _BLACK_STD else "dark")
        elif p1 > _WHITE_P1:
            found.add("white_out")
        elif spread < _PLAIN_CONTRAST * p99:
            found.add("covered")
        elif p75 >= _DAYLIGHT_P75:
            plain = np.count_nonzero(flat & (tiles[:, 0, :, 0] < _SATURATED))
            if plain >= _FLAT_SHARE * flat.size:
                found.add("covered")
        if not found:
            found |= self._compare_with_usual(thumbnail, now)
        self._note(found, now)
        return ~flat

    def _compare_with_usual(self, thumbnail: Thumbnail, now: float) -> set[str]:
        samples = thumbnail.samples.astype(np.float32)
        middle = samples[1:-1, 1:-1]
        laplacian = 4 * middle - samples[:-2, 1:-1] - samples[2:, 1:-1]
        laplacian -= samples[1:-1, :-2] + samples[1:-1, 2:]
        detail = float(laplacian.var()) * thumbnail.scale**2
        sharpness = detail / max(1.0, float(middle.var()) * thumbnail.scale**2)
        if sharpness < _USUAL_SHARE * self._usual_sharpness:
            return {"blurred"}
        if detail < _USUAL_SHARE * self._usual_detail:
            return {"degraded"}
        if now - self._usual_at >= _USUAL_PERIOD_S:
            self._usual_at = now
            self._usual.append((detail, sharpness))
            if len(self._usual) >= _FEWEST_USUAL_SAMPLES:
                medians = np.median(self._usual, axis=0)
                self._usual_detail, self._usual_sharpness = map(float, medians)
        return set()

    def _note(self, found: set[str], now: float) -> None:
        for reason in found:
            lasting = self._lasting.setdefault(reason, _Lasting(now, now))
            lasting.last = now
            lasting.on = lasting.on or now - lasting.since >= ON_AFTER_S
        for reason in tuple(self._lasting.keys() - found):
            lasting = self._lasting[reason]
            off_after_s = UNUSABLE_OFF_AFTER_S if reason in UNUSABLE else OFF_AFTER_S
            if not lasting.on or now - lasting.last >= off_after_s:
                del self._lasting[reason]


# A fault that a single frame shows is the camera's state for this long.
_FAULT_LASTS_S = 2.0
# Formats of sensors that no decoder gives: their frames were never compressed. NV12 may be either.
_RAW = (PixelFormat.YUY2, PixelFormat.GREY)
# After a longer silence, and three periods, the source is opened again, once its period is known:
# its frames are a backlog that a decoder may stamp as fresh. The age of frames with the driver's
# time is true.
_GAP_S = 0.5
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
    """

    def __init__(self, *, live: bool) -> None:
        self.corrupt = 0
        self._live = live
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
        if self._live and silent_s > _GAP_S and frame.clock != "sensor":
            backlog = silent_s > watch.limit_s(_GAP_S, float("inf"))
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
