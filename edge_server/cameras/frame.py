"""Frames, the sources that produce them, and the pace of recordings."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    import numpy as np
    from numpy.typing import NDArray

# Below 1 Hz, a recording cannot be distinguished from a stalled camera.
SLOWEST_FPS = 1.0
FASTEST_FPS = 1000.0

# Suffixes of image files, alone or in a folder.
IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png"})

# A delay by the disk or the scheduler up to this long is caught up. After a longer delay, playback
# continues from its current frame, as a camera never sends a burst of late frames.
CATCH_UP_S = 0.25


@dataclass(frozen=True, eq=False)
class Frame:
    """One captured image and its capture time.

    Attributes:
        id: counts every frame that the source delivers, from 0, dropped ones included.
        image: (H, W, 3) uint8 BGR, read-only by convention.
        capture_mono_ns: CLOCK_MONOTONIC when the source delivered the image.
        capture_epoch_ns: Unix time of the same moment.
    """

    id: int
    image: NDArray[np.uint8]
    capture_mono_ns: int
    capture_epoch_ns: int


class FrameSource(Protocol):
    """Delivers images in order, at the source's own pace, to one thread."""

    def read(self) -> NDArray[np.uint8] | None:
        """Return the next image, (H, W, 3) uint8 BGR; None at the end.

        Blocks until the image is due: a recording is played at its frame rate.

        Raises:
            SourceError: the source failed.
        """
        ...

    def close(self) -> None:
        """Release the device or file; a second call does nothing."""
        ...


class Pace:
    """Paces its caller at `fps` calls a second, without drift.

    The first `wait` returns at once; each later wait is due one period after the previous one was
    due, however late the caller came. A caller more than `CATCH_UP_S` late starts a new schedule.

    Args:
        fps: frames per second; 0 never waits.
        clock: returns monotonic time in seconds.
        sleep: blocks for the given seconds.
    """

    def __init__(
        self,
        fps: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.period_s = 1.0 / fps if fps else 0.0
        self._clock = clock
        self._sleep = sleep
        self._due: float | None = None

    def wait(self) -> None:
        """Block until the next frame is due."""
        if not self.period_s:
            return
        now = self._clock()
        if self._due is None or now - self._due > CATCH_UP_S:
            self._due = now
        if now < self._due:
            self._sleep(self._due - now)
        self._due += self.period_s


class Recording:
    """Plays images as they become due; a FrameSource.

    The first image is decoded by the constructor, so that a bad recording raises there.

    Args:
        images: each (H, W, 3) uint8 BGR; may raise SourceError.
        fps: frames per second; 0 plays at the reading speed.
    """

    def __init__(self, images: Generator[NDArray[np.uint8], None, None], fps: float) -> None:
        self.pace = Pace(fps)
        self._images = images
        self._first = next(images, None)

    def read(self) -> NDArray[np.uint8] | None:
        first, self._first = self._first, None
        image = next(self._images, None) if first is None else first
        if image is not None:
            self.pace.wait()
        return image

    def close(self) -> None:
        self._images.close()
