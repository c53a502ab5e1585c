"""Images in files: a folder of them as a source of frames, and pictures with lanes drawn in."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import cv2
import numpy as np

from edge_server.cameras.frame import IMAGE_SUFFIXES, Pace
from edge_server.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from edge_server.lanes.types import Lane

log = logging.getLogger(__name__)

DEFAULT_FPS = 10.0

# BGR, by rank: the lane with the highest score first.
_COLOURS = ((80, 220, 60), (60, 160, 255), (255, 160, 60), (220, 80, 220), (60, 220, 220))
_SUBPIXEL_BITS = 4


class ImageFolder:
    """Plays the images of a folder in the order of their names; a FrameSource.

    The source skips an image that cannot be decoded completely, and logs that image once, however
    often the folder loops.

    Args:
        path: a folder, or one image, which is played as a folder of one.
        fps: frames per second; 0 plays at the reading speed.
        loop: restart at the end.

    Raises:
        SourceError: the folder has no image that can be decoded.
    """

    def __init__(self, path: Path, *, fps: float | None = None, loop: bool = False) -> None:
        self._path = path
        self._loop = loop
        self._images = _images_of(path)
        self._at = 0
        self._pace = Pace(DEFAULT_FPS if fps is None else fps)
        self._ahead: NDArray[np.uint8] | None = None
        self._ahead = self._decode()
        if self._ahead is None:
            raise self._nothing_readable()

    def read(self) -> NDArray[np.uint8] | None:
        """Return the next image, (H, W, 3) uint8 BGR, when it is due; None at the end.

        Raises:
            SourceError: a loop has no readable image left.
        """
        image, self._ahead = self._ahead, None
        if image is None:
            image = self._decode()
        if image is None and self._loop:
            self._at = 0
            image = self._decode()
            if image is None:
                raise self._nothing_readable()
        if image is not None:
            self._pace.wait()
        return image

    def close(self) -> None:
        """Do nothing: no file stays open between two images."""

    def _decode(self) -> NDArray[np.uint8] | None:
        """Return the next readable image of this round; None after the last."""
        while self._at < len(self._images):
            image = _decode_or_skip(self._images[self._at])
            if image is not None:
                self._at += 1
                return image
            del self._images[self._at]
        return None

    def _nothing_readable(self) -> SourceError:
        return SourceError(
            f"{self._path}: none of its images can be read; they are damaged or no JPEG or PNG"
        )


def _images_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    images = sorted(
        entry
        for entry in path.iterdir()
        if entry.suffix.lower() in IMAGE_SUFFIXES and entry.is_file()
    )
    if not images:
        wanted = ", ".join(sorted(IMAGE_SUFFIXES))
        raise SourceError(f"{path}: has no images in it; put {wanted} files there")
    return images


def _decode_or_skip(path: Path) -> NDArray[np.uint8] | None:
    try:
        return _decode_whole(path)
    except (OSError, ValueError) as error:
        log.warning("image %s: skipped: %s", path, error)
        return None


def _decode_whole(path: Path) -> NDArray[np.uint8]:
    """Decode one image; raise for an incomplete file, which OpenCV would decode half grey.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged, incomplete or no image.
    """
    data = path.read_bytes()
    if data[:2] == b"\xff\xd8" and not _jpeg_is_complete(data):
        raise ValueError("the JPEG is cut off")
    try:
        buffer = np.frombuffer(data, np.uint8)
        image: NDArray[np.uint8] | None = cv2.imdecode(buffer, cv2.IMREAD_COLOR)
    except cv2.error as error:  # empty, or larger than OpenCV's limit
        raise ValueError(error.err) from error
    if image is None:
        raise ValueError("it is damaged or no image")
    return image


def _jpeg_is_complete(data: bytes) -> bool:
    """Return whether the scan has an end marker; OpenCV 4.8 decodes a scan without one and reports
    no error.

    The walk skips the segments before the scan by their lengths (ITU-T T.81, B.1.1.4), as a segment
    may hold a thumbnail with its own end marker.
    """
    at = 2
    while data[at : at + 1] == b"\xff" and data[at + 1 : at + 2] != b"\xda":
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return data.find(b"\xff\xd9", at) >= 0


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
