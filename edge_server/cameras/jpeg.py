"""JPEGs of cameras, and PNGs: whether they are whole, and their pixels at the scale needed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import cv2
import numpy as np

from edge_server.cameras.colour import bgr_of
from edge_server.cameras.frame import LARGEST_PX, PictureTooLarge, UsefulSize, check_size
from edge_server.errors import SourceError
from edge_server.pixels import Image

if TYPE_CHECKING:
    from edge_server.cameras.frame import Frame

_BEGIN = b"\xff\xd8"
_END, _TABLES, _SCAN, _COMMENT = 0xD9, {0xC4, 0xDB, 0xDD}, 0xDA, 0xFE  # ITU-T T.81, table B.1
# Baseline, extended and progressive with Huffman codes, which is what cameras write. Arithmetic
# codes take several times as long.
_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
_IN_HEADER = frozenset({*_FRAMES, *_TABLES, _SCAN, _COMMENT, *range(0xE0, 0xF0)})
_BETWEEN_SCANS = frozenset({*_TABLES, _SCAN, _COMMENT})
# In a scan, 0xFF is followed by 0 or a restart marker; more of them may fill the space between two
# segments. libjpeg looks for the next segment in the same way.
_MARKER = re.compile(rb"\xff([^\x00\xd0-\xd7\xff])")
# Cameras write about ten segments before the picture. Each one more takes time, in which a reader
# seems to hang.
_MOST_SEGMENTS = 1000
# Each scan costs a pass over the whole picture, whatever its length. Progressive encoders write
# about ten, of pictures of which this allows 26 megapixels.
_MOST_SCANNED_PX = 8 * LARGEST_PX
# JPEGs of 8K are smaller; a camera that never ends one costs no more memory than this.
LONGEST_JPEG_BYTES = 2**25
PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
# libpng unpacks each of these up to 8 MB, which takes 40 ms. Editors write one or two.
_PACKED_TEXTS = frozenset({b"zTXt", b"iTXt", b"iCCP"})
_MOST_PACKED_TEXTS = 16
# A picture of 256 MiB in the smallest pieces that encoders make has a third of it.
_MOST_CHUNKS = 100_000
# libjpeg's inverse transform gives a picture of 1/2, 1/4 or 1/8 at once.
_SCALED = {
    1: cv2.IMREAD_COLOR,
    2: cv2.IMREAD_REDUCED_COLOR_2,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    8: cv2.IMREAD_REDUCED_COLOR_8,
}
_DIVISORS = tuple(_SCALED)


def size_of_jpeg(data: bytes) -> tuple[int, int]:
    """Return the width and height in px of a JPEG that is whole and may be decoded.

    libjpeg fills the rest of a damaged picture with grey, and says so on stderr alone; and a few
    kilobytes may keep it busy for minutes. Drivers fill a JPEG's buffer up behind its end.

    Raises:
        ValueError: `data` is damaged, or is more work than the picture of a camera.
        PictureTooLarge: it has more than `LARGEST_PX`.
    """
    width = height = scans = 0
    found = _MARKER.search(data, len(_BEGIN)) if data.startswith(_BEGIN) else None
    for _ in range(_MOST_SEGMENTS):
        if found is None:
            raise ValueError("its end is missing" if scans else "it has no JPEG header")
        marker, at = found[1][0], found.end()
        if marker == _END and scans:
            check_size(width, height)
            if scans * width * height > _MOST_SCANNED_PX:
                raise ValueError(
                    f"it has {scans} scans of {width} x {height}, more work than the picture of a "
                    "camera"
                )
            return width, height
        if marker not in (_BETWEEN_SCANS if scans else _IN_HEADER):
            raise ValueError(
                "something else begins in the middle of it"
                if scans
                else "its JPEG header has what no camera writes"
            )
        scans += marker == _SCAN
        if marker in _FRAMES:
            height = int.from_bytes(data[at + 3 : at + 5], "big")
            width = int.from_bytes(data[at + 5 : at + 7], "big")
        if marker == _SCAN and not width * height:
            raise ValueError("it has no JPEG header")
        found = _MARKER.search(data, at + int.from_bytes(data[at : at + 2], "big"))
    raise ValueError(f"it has more than {_MOST_SEGMENTS} segments")


def size_of_png(data: bytes) -> tuple[int, int]:
    """Return the width and height in px of a PNG that is whole and may be decoded.

    Raises:
        ValueError: `data` is cut off, or is more work than a picture.
        PictureTooLarge: it has more than `LARGEST_PX`.
    """
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    check_size(width, height)
    at, packed = len(PNG) - 8, 0
    for _ in range(_MOST_CHUNKS):
        kind = data[at + 4 : at + 8]
        if kind == b"IEND":
            return width, height
        if len(kind) < 4:
            raise ValueError("its end is missing")
        packed += kind in _PACKED_TEXTS
        if packed > _MOST_PACKED_TEXTS:
            raise ValueError(f"it has more than {_MOST_PACKED_TEXTS} packed texts")
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    raise ValueError(f"it has more than {_MOST_CHUNKS} chunks")


class JpegDecoder:
    """Decodes the JPEGs of one camera, no larger than its model needs them; not thread-safe. Errors
    name it by its `label`."""

    def __init__(self, label: str, useful: UsefulSize | None = None) -> None:
        self._label = label
        self._useful = useful or UsefulSize()

    def decode(self, data: bytes) -> tuple[Image, tuple[int, int] | None]:
        """Return a BGR image, and where it was made smaller, the camera's own width and height.

        Raises:
            ValueError: the JPEG is damaged.
            SourceError: the picture is larger than `LARGEST_PX`.
        """
        try:
            width, height = size_of_jpeg(data)
        except PictureTooLarge as error:
            raise SourceError(f"{self._label}: {error}", reason="unavailable") from None
        divisor = self._useful.divisor(width, height, _DIVISORS)
        flags = _SCALED[divisor] | cv2.IMREAD_IGNORE_ORIENTATION
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
        if pixels is None:
            raise ValueError("it cannot be decoded")
        whole = pixels.shape[:2] == (height, width)
        return Image.of_bgr(pixels), None if whole else (width, height)


def encode_jpeg(image: Image, quality: int, width: int = 0) -> bytes:
    """Return `image` as a JPEG.

    Args:
        image: in any format.
        quality: 1..100.
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
