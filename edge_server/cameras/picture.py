"""Draw lanes on a frame and write the picture, for display."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cv2
import numpy as np

from edge_server.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from edge_server.lanes.types import Lane

# BGR, by rank: the lane with the highest score first.
_COLOURS = ((80, 220, 60), (60, 160, 255), (255, 160, 60), (220, 80, 220), (60, 220, 220))
_SUBPIXEL_BITS = 4


def draw_lanes(image: NDArray[np.uint8], lanes: Sequence[Lane]) -> NDArray[np.uint8]:
    """Return a copy of `image`, (H, W, 3) uint8 BGR, with each finite lane drawn as a line with its
    score."""
    picture: NDArray[np.uint8] = image.copy()
    thickness = max(2, image.shape[1] // 320)
    for rank, lane in enumerate(lanes):
        if not np.isfinite(lane.points).all():
            continue
        colour = _COLOURS[rank % len(_COLOURS)]
        points = np.rint(lane.points * (1 << _SUBPIXEL_BITS)).astype(np.int32)
        cv2.polylines(
            picture, [points], False, colour, thickness, cv2.LINE_AA, shift=_SUBPIXEL_BITS
        )
        x, y = lane.points[len(lane.points) // 3]
        text = f"{lane.score:.2f}"
        place = (int(x) + 2 * thickness, int(y))
        scale = image.shape[1] / 1600
        cv2.putText(picture, text, place, cv2.FONT_HERSHEY_SIMPLEX, scale, (0, 0, 0), 4)
        cv2.putText(picture, text, place, cv2.FONT_HERSHEY_SIMPLEX, scale, colour, 1, cv2.LINE_AA)
    return picture


def write_picture(path: Path, image: NDArray[np.uint8]) -> None:
    """Write `image`, (H, W, 3) uint8 BGR, in the format of `path`'s suffix.

    Raises:
        SourceError: the image cannot be encoded in that format, or not be written to `path`.
    """
    try:
        encoded, data = cv2.imencode(path.suffix, image)
    except cv2.error:
        encoded = False
    if not encoded:
        raise SourceError(
            f"{path}: cannot be encoded: {image.shape} image, format {path.suffix!r}; "
            "use .png or .jpg"
        )
    try:
        path.write_bytes(data.tobytes())
    except OSError as error:
        raise SourceError(f"{path}: cannot be written: {error.strerror}") from error
