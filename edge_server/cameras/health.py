"""Whether the pictures of a camera show the world: frozen, black, white, covered, blurred.

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
from typing import TYPE_CHECKING

import numpy as np

from edge_server.cameras.motion import FrozenDetector, Thumbnail, tiles_of
from edge_server.cameras.status import UNUSABLE, PictureFault

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.pixels import Image

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
    """When a fault began and was last there."""

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

    def inspect(
        self, image: Image, now: float, *, raw: bool, still: bool = False
    ) -> PictureFault | None:
        """Return the worst that is wrong with the pictures; None where nothing is.

        A picture of less than 24 x 12 px is not judged.

        Args:
            image: the next one, of any size.
            now: of its arrival, `time.monotonic()`.
            raw: nothing between the sensor and here has compressed it.
            still: the source may be a single picture, so that it is never frozen.
        """
        if now - self._motion_at < _MOTION_PERIOD_S:
            return self._worst()
        self._motion_at = now
        thumbnail = Thumbnail.of(image)
        if thumbnail is None:
            return None
        if (size := image.luma().shape) != self._size:
            # A decoder that makes pictures smaller makes them less sharp.
            self._size = size
            self._usual.clear()
            self._usual_detail = self._usual_sharpness = 0.0
        textured = self._textured
        if now - self._picture_at >= _PICTURE_PERIOD_S or textured is None:
            self._picture_at = now
            textured = self._textured = self._look(thumbnail, now)
        if textured.size * 6 != thumbnail.cells.size:
            # The size of the picture has changed.
            textured = self._textured = self._look(thumbnail, now)
        if not still:
            self._why_frozen = self._frozen.look(thumbnail, textured, self._p99, now, raw=raw)
        return self._worst()

    def _worst(self) -> PictureFault | None:
        lasting = [reason for reason, fault in self._lasting.items() if fault.on]
        for reason in sorted(lasting, key=_BY_WEIGHT.index):
            if self._why_frozen and reason not in UNUSABLE:
                break
            return PictureFault(reason, _TEXTS[reason])
        return PictureFault("frozen", self._why_frozen) if self._why_frozen else None

    def _look(self, thumbnail: Thumbnail, now: float) -> NDArray[np.bool_]:
        """Judge one picture by itself and against the usual ones; return its textured tiles."""
        cells = thumbnail.cells
        p1, p75, p99 = (float(level) for level in np.percentile(cells, (1, 75, 99)))
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
