"""JPEGs of cameras: whether they are whole, and their pixels at the scale that is needed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import cv2
import numpy as np

from edge_server.cameras.colour import bgr_of
from edge_server.cameras.frame import LARGEST_PX, UsefulSize
from edge_server.errors import SourceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.cameras.frame import Frame
    from edge_server.pixels import Image

_BEGIN, _END = b"\xff\xd8", b"\xff\xd9"
# A header segment with the size: every SOF, baseline and progressive (ITU-T T.81, table B.1).
_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SCAN_MARKER = 0xDA
# Cameras write about ten segments before the picture, and no fill bytes. Each one more takes time,
# in which a reader seems to hang.
_MOST_SEGMENTS = 1000
# Progressive encoders write about ten scans; each costs as much as a pass over the whole picture,
# whatever its length.
_MOST_SCANS = 50
_SCAN = b"\xff\xda"
# In a scan, 0xFF is followed by 0, a restart marker, or what begins the next scan. Anything else
# ends the picture, as it should or not. Drivers fill a JPEG's buffer up behind it.
_LAST_MARKER = re.compile(rb"\xff[^\x00\xc4\xd0-\xd7\xda\xdb\xdd\xfe\xff]")
# libjpeg's inverse transform gives a picture of 1/2, 1/4 or 1/8 at once.
_SCALED = {
    1: cv2.IMREAD_COLOR,
    2: cv2.IMREAD_REDUCED_COLOR_2,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    8: cv2.IMREAD_REDUCED_COLOR_8,
}
_DIVISORS = tuple(_SCALED)


class JpegHeader(NamedTuple):
    """What the header of a JPEG says.

    Attributes:
        width, height: in px.
        scan_at: where the entropy-coded data begins.
    """

    width: int
    height: int
    scan_at: int


def read_header(data: bytes) -> JpegHeader | None:
    """Return the header of `data`; None where it is no JPEG, ends within its header, or has more
    segments than any camera writes."""
    if data[:2] != _BEGIN:
        return None
    at, size = 2, (0, 0)
    for _ in range(_MOST_SEGMENTS):
        if at + 4 > len(data) or data[at] != 0xFF:
            break
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if marker == 0xFF:  # fill bytes
            at += 1
            continue
        if marker in _FRAME_MARKERS and at + 9 <= len(data):
            height = int.from_bytes(data[at + 5 : at + 7], "big")
            size = int.from_bytes(data[at + 7 : at + 9], "big"), height
        at += 2 + max(length, 2)
        if marker == _SCAN_MARKER:
            return JpegHeader(*size, at) if min(size) and at <= len(data) else None
    return None


def damage_of(data: bytes, header: JpegHeader | None) -> str:
    """Return why `data` is not a whole JPEG; "" where nothing shows that it is not.

    libjpeg fills the rest of a damaged picture with grey, and says so on stderr alone.
    """
    if header is None:
        return "it has no JPEG header"
    last = _LAST_MARKER.search(data, header.scan_at)
    if last is None:
        return "its end is missing"
    if last[0] != _END:
        return "something else begins in the middle of it"
    many = data.count(_SCAN, header.scan_at, last.start()) >= _MOST_SCANS
    return f"it has more than {_MOST_SCANS} scans" if many else ""


class JpegDecoder:
    """Decodes the JPEGs of one camera, no larger than its model needs them; not thread-safe.

    Attributes:
        damage: what was wrong with the last JPEG that was not decoded.

    Args:
        label: names the camera in errors.
        useful: the smallest size that is worth decoding.
    """

    def __init__(self, label: str, useful: UsefulSize | None = None) -> None:
        self.damage = ""
        self._label = label
        self._useful = useful or UsefulSize()

    def decode(self, data: bytes) -> tuple[NDArray[np.uint8], tuple[int, int]] | None:
        """Return (H, W, 3) uint8 BGR, and the width and height of the camera's picture in px; None
        for a damaged JPEG.

        Raises:
            SourceError: the picture is larger than `LARGEST_PX`.
        """
        header = read_header(data)
        self.damage = damage_of(data, header)
        if header is None or self.damage:
            return None
        width, height = header.width, header.height
        if width * height > LARGEST_PX:
            raise SourceError(
                f"{self._label}: its images are {width} x {height}, more than "
                f"{LARGEST_PX >> 20} megapixels; set a lower resolution in the camera",
                reason="unavailable",
            )
        divisor = self._useful.divisor(width, height, _DIVISORS)
        flags = _SCALED[divisor] | cv2.IMREAD_IGNORE_ORIENTATION
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
        if pixels is None:
            self.damage = "it cannot be decoded"
            return None
        return pixels, (width, height)


def encode_jpeg(image: Image, quality: int, width: int = 0) -> bytes:
    """Return `image` as a JPEG.

    Args:
        image: in any format.
        quality: 1..100, of libjpeg.
        width: a wider picture is made so small, in px, and keeps its shape; 0 keeps its size.
    """
    size = None
    if 0 < width < image.width:
        size = width, max(1, round(image.height * width / image.width))
    pixels = bgr_of(image, size)
    _, data = cv2.imencode(".jpg", pixels, (cv2.IMWRITE_JPEG_QUALITY, quality))
    return bytes(data)


def jpeg_of(frame: Frame, quality: int, width: int) -> bytes:
    """Return the picture of `frame`: a JPEG of the camera as it came, where it need not be smaller,
    otherwise as `encode_jpeg` makes it."""
    if frame.jpeg is not None and not 0 < width < frame.size[0]:
        return frame.jpeg
    return encode_jpeg(frame.image, quality, width)
