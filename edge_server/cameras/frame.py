"""Frames, and the sources that produce them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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
