"""Frames, and the sources that produce them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Frame:
    """One captured image and when it was captured.

    Attributes:
        id: counts every frame that the source gave, from 0, dropped ones included.
        image: (H, W, 3) uint8 BGR, read-only by agreement.
        capture_mono_ns: CLOCK_MONOTONIC when the image was there.
        capture_epoch_ns: Unix time of the same moment.
    """

    id: int
    image: NDArray[np.uint8]
    capture_mono_ns: int
    capture_epoch_ns: int


class FrameSource(Protocol):
    """Gives images one after the other, at its own pace, to one thread."""

    def read(self) -> NDArray[np.uint8] | None:
        """The next image, (H, W, 3) uint8 BGR; None at the end.

        Blocks until the image is due: a recording is played at its frame rate.

        Raises:
            SourceError: the source broke.
        """
        ...

    def close(self) -> None:
        """Release the device or file; a second call does nothing."""
        ...
