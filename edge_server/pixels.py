"""Images in a camera's own pixel format, and the colours that their YUV values mean."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class PixelFormat(Enum):
    """Memory format of an image; a packed array has three axes in each of them.

    Attributes:
        has_chroma: the values are Y, U and V.
        is_subsampled: the chroma has half the rows of the luma, in planes behind it.
        chroma_step_px: the columns and rows of the frame that one U and V pair stands for.

    - BGR: (H, W, 3).
    - GREY: (H, W, 1), luma alone.
    - YUY2: (H, W, 2), Y interleaved with U or V; W is even.
    - NV12: (H * 3 / 2, W, 1), H rows of luma, then H / 2 of interleaved U and V; H and W are even.
    - I420: (H * 3 / 2, W, 1), luma, then all of U, then all of V; H and W are even.
    """

    BGR = "bgr"
    GREY = "grey"
    YUY2 = "yuy2"
    NV12 = "nv12"
    I420 = "i420"

    has_chroma: bool
    is_subsampled: bool
    chroma_step_px: tuple[int, int]

    def __init__(self, name: str) -> None:
        self.has_chroma = name not in ("bgr", "grey")
        self.is_subsampled = name in ("nv12", "i420")
        self.chroma_step_px = (2 if self.has_chroma else 1), (2 if self.is_subsampled else 1)

    def shapes(self, width: int, height: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the planes of an `Image` of that size in px."""
        match self:
            case PixelFormat.NV12:
                return (height, width), (height // 2, width)
            case PixelFormat.I420:
                half = height // 2, width // 2
                return (height, width), half, half
        return ((height, width, {PixelFormat.BGR: 3, PixelFormat.YUY2: 2}.get(self, 1)),)


class ColourMatrix(Enum):
    """How luma and chroma mix red, green and blue (ITU-R BT.601, BT.709)."""

    BT601 = "bt601"
    BT709 = "bt709"


class ColourRange(Enum):
    """The values of black and white luma: 16 and 235, or 0 and 255."""

    LIMITED = "limited"
    FULL = "full"


@dataclass(frozen=True)
class Colour:
    """What the values of a YUV or GREY image mean; without effect on BGR."""

    matrix: ColourMatrix = ColourMatrix.BT601
    range: ColourRange = ColourRange.LIMITED

    @property
    def to_bgr(self) -> YuvToBgr:
        return _yuv_to_bgr(self)


class YuvToBgr(NamedTuple):
    """The conversion of Y, U and V to B, G and R in whole numbers.

    Each channel is a sum of products, plus 256, shifted right by 9 bits and clipped to 0..255.
    `luma` multiplies Y - `black` in each channel; `blue_u` multiplies U - 128 in B, `green_u` and
    `green_v` U - 128 and V - 128 in G, `red_v` V - 128 in R. All are times 512: with more bits
    OpenCV's fastest conversion would round; these results differ from the exact ones by less than
    0.8 of a level, 0.5 of which is the rounding to 8 bits.
    """

    black: int
    luma: int
    blue_u: int
    green_u: int
    green_v: int
    red_v: int


# Kr and Kb of the two recommendations.
_WEIGHTS = {ColourMatrix.BT601: (0.299, 0.114), ColourMatrix.BT709: (0.2126, 0.0722)}


@lru_cache
def _yuv_to_bgr(colour: Colour) -> YuvToBgr:
    red, blue = _WEIGHTS[colour.matrix]
    green = 1 - red - blue
    black, luma, chroma = 0, 1.0, 1.0
    if colour.range is ColourRange.LIMITED:
        black, luma, chroma = 16, 255 / 219, 255 / 224
    by_u, by_v = 2 * (1 - blue) * chroma, 2 * (1 - red) * chroma
    factors = (luma, by_u, -by_u * blue / green, -by_v * red / green, by_v)
    return YuvToBgr(black, *(round(512 * factor) for factor in factors))


@dataclass(frozen=True)
class CropRegion:
    """A rectangle of a frame in px, whole pixels; of any parity in every format."""

    x: int
    y: int
    width: int
    height: int

    def is_within(self, width: int, height: int) -> bool:
        """Return whether the region is not empty, and lies within a frame of that size in px."""
        return (
            min(self.x, self.y) >= 0
            and min(self.width, self.height) >= 1
            and self.x + self.width <= width
            and self.y + self.height <= height
        )

    def of_chroma(self, pixel_format: PixelFormat) -> CropRegion:
        """Return the region in px of the chroma: whole ones, so that it may be larger than this
        region by 1 px of the frame on each side."""
        columns, rows = pixel_format.chroma_step_px
        x, y = self.x // columns, self.y // rows
        right, bottom = -(-(self.x + self.width) // columns), -(-(self.y + self.height) // rows)
        return CropRegion(x, y, right - x, bottom - y)


@dataclass(frozen=True, eq=False)
class Image:
    """Pixels in the camera's own format.

    Attributes:
        planes: uint8, in the order of the format: one array (H, W, channels) for BGR, GREY and
            YUY2; luma (H, W) and chroma (H / 2, W) for NV12; (H, W) and twice (H / 2, W / 2) for
            I420. Rows may have gaps (strides); read-only by convention.
    """

    pixel_format: PixelFormat
    planes: tuple[NDArray[np.uint8], ...]
    colour: Colour = Colour()

    @staticmethod
    def of_bgr(pixels: NDArray[np.uint8]) -> Image:
        """Return the image of (H, W, 3) uint8 BGR pixels, which are not copied."""
        return Image(PixelFormat.BGR, (pixels,))

    @staticmethod
    def grey(pixel_format: PixelFormat, width: int, height: int) -> Image:
        """Return an image of one grey, of that size in px."""
        rows = height * 3 // 2 if pixel_format.is_subsampled else height
        channels = {PixelFormat.BGR: 3, PixelFormat.YUY2: 2}.get(pixel_format, 1)
        return Image.of_packed(pixel_format, np.full((rows, width, channels), 127, np.uint8))

    @staticmethod
    def of_packed(
        pixel_format: PixelFormat, pixels: NDArray[np.uint8], colour: Colour = Colour()
    ) -> Image:
        """Return the image of a packed array, see `PixelFormat`, which is not copied; raise
        ValueError where it does not have the format's shape."""
        rows, width, channels = pixels.shape
        expected = {PixelFormat.BGR: 3, PixelFormat.YUY2: 2}.get(pixel_format, 1)
        if channels != expected or (pixel_format.is_subsampled and (rows % 3 or width % 2)):
            raise ValueError(f"{pixels.shape} is no shape of {pixel_format.value}")
        if not pixel_format.is_subsampled:
            return Image(pixel_format, (pixels,), colour)
        height = rows // 3 * 2
        flat = pixels[..., 0]
        luma, chroma = flat[:height], flat[height:]
        if pixel_format is PixelFormat.NV12:
            return Image(pixel_format, (luma, chroma), colour)
        halves = np.ascontiguousarray(chroma).reshape(2, height // 2, width // 2)
        return Image(pixel_format, (luma, halves[0], halves[1]), colour)

    @property
    def width(self) -> int:
        """In px."""
        return int(self.planes[0].shape[1])

    @property
    def height(self) -> int:
        """In px."""
        return int(self.planes[0].shape[0])

    def luma(self) -> NDArray[np.uint8]:
        """Return the brightness, (H, W) uint8, as a view: Y, or the green channel of BGR."""
        first = self.planes[0]
        if first.ndim == 2:
            return first
        return first[..., 1] if self.pixel_format is PixelFormat.BGR else first[..., 0]

    def packed(self) -> NDArray[np.uint8]:
        """Return the packed array, see `PixelFormat`: a view where the planes follow each other in
        memory without gaps, otherwise a copy."""
        first = self.planes[0]
        if not self.pixel_format.is_subsampled:
            return first if first.ndim == 3 else first[..., np.newaxis]
        rows = self.height + self.height // 2
        following = _following(self.planes)
        if following is None:
            following = np.concatenate([plane.reshape(-1) for plane in self.planes])
        return following.reshape(rows, self.width, 1)


def _following(planes: tuple[NDArray[np.uint8], ...]) -> NDArray[np.uint8] | None:
    """Return the bytes of `planes` as one view; None where they do not follow each other."""
    address = planes[0].ctypes.data
    for plane in planes:
        if plane.ctypes.data != address or not plane.flags.c_contiguous:
            return None
        address += plane.nbytes
    nbytes = address - planes[0].ctypes.data
    return np.lib.stride_tricks.as_strided(planes[0].reshape(-1), (nbytes,), (1,), writeable=False)
