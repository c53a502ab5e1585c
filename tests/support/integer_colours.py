"""What a camera's image is in BGR, in whole numbers and numpy alone.

Resize, lens and colours as `preprocess_cpu`, the kernels and `cameras.colour` have to make them, to
the bit, whatever OpenCV is here.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from edge_server.pixels import Colour, ColourMatrix, ColourRange, CropRegion, Image, PixelFormat

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.backends.vision.image_preprocess_config import UndistortionMap

# Each matrix with each range.
COLOURS = [Colour(matrix, range_) for matrix in ColourMatrix for range_ in ColourRange]


def bgr_by_integers(
    image: Image,
    width: int | None = None,
    height: int | None = None,
    region: CropRegion | None = None,
    lens: UndistortionMap | None = None,
) -> NDArray[np.uint8]:
    """(H, W, 3) uint8 BGR of `image` or its region, at that size; or as a lens's map sees it."""
    crop = region or CropRegion(0, 0, image.width, image.height)
    size = (width or crop.width, height or crop.height)
    luma, chroma = planes_of(image)
    black = 16 if image.colour.range is ColourRange.LIMITED else 0
    if image.pixel_format is PixelFormat.BGR:
        black = 0
    halves = {PixelFormat.YUY2: (2, 1), PixelFormat.NV12: (2, 2), PixelFormat.I420: (2, 2)}
    by_x, by_y = halves.get(image.pixel_format, (1, 1))
    if lens is not None:
        x, y = (lens.positions[..., i].astype(np.int64) * 32 for i in (0, 1))
        x, y = x + (lens.fractions & 31), y + (lens.fractions >> 5)
        half_x = x if by_x == 1 else x // 2 - 8
        half_y = y if by_y == 1 else y // 2 - 8
        first = [_mapped(plane, x, y, black) for plane in luma]
        second = [_mapped(plane, half_x, half_y, 128) for plane in chroma]
    else:
        left, top = crop.x // by_x, crop.y // by_y
        right = -(-(crop.x + crop.width) // by_x)
        bottom = -(-(crop.y + crop.height) // by_y)
        whole = (slice(crop.y, crop.y + crop.height), slice(crop.x, crop.x + crop.width))
        first = [_resized(plane[whole], *size) for plane in luma]
        second = [_resized(plane[top:bottom, left:right], *size) for plane in chroma]
    if image.pixel_format is PixelFormat.BGR:
        return np.stack(first, axis=-1).astype(np.uint8)
    u, v = second or [np.full_like(first[0], 128)] * 2
    return bgr_of_yuv(first[0], u, v, image.colour)


def bgr_of_yuv(
    y: NDArray[np.integer], u: NDArray[np.integer], v: NDArray[np.integer], colour: Colour
) -> NDArray[np.uint8]:
    """Each with the same shape; the channels are the last axis."""
    black, luma, blue_u, green_u, green_v, red_v = factors(colour)
    scaled = luma * (y.astype(np.int64) - black) + 256
    u, v = u.astype(np.int64) - 128, v.astype(np.int64) - 128
    channels = (scaled + blue_u * u, scaled + green_u * u + green_v * v, scaled + red_v * v)
    return np.stack([each >> 9 for each in channels], axis=-1).clip(0, 255).astype(np.uint8)


def exact_factors(colour: Colour) -> tuple[Fraction, Fraction, Fraction, Fraction, Fraction]:
    """Of luma, U in B, U in G, V in G and V in R, from the recommendations' Kr and Kb."""
    kr, kb = {
        ColourMatrix.BT601: (Fraction("0.299"), Fraction("0.114")),
        ColourMatrix.BT709: (Fraction("0.2126"), Fraction("0.0722")),
    }[colour.matrix]
    limited = colour.range is ColourRange.LIMITED
    of_luma, of_chroma = (Fraction(255, n) if limited else Fraction(1) for n in (219, 224))
    u, v = 2 * (1 - kb) * of_chroma, 2 * (1 - kr) * of_chroma
    return of_luma, u, -u * kb / (1 - kr - kb), -v * kr / (1 - kr - kb), v


def factors(colour: Colour) -> tuple[int, ...]:
    """Black, and the exact factors in the nearest 1/512."""
    black = 16 if colour.range is ColourRange.LIMITED else 0
    return black, *(round(512 * factor) for factor in exact_factors(colour))


def planes_of(image: Image) -> tuple[list[NDArray[np.uint8]], list[NDArray[np.uint8]]]:
    """B, G and R, or luma; and U and V at their own resolution."""
    first = image.planes[0]
    match image.pixel_format:
        case PixelFormat.BGR:
            return [first[..., i] for i in range(3)], []
        case PixelFormat.GREY:
            return [image.luma()], []
        case PixelFormat.YUY2:
            return [first[..., 0]], [first[:, 0::2, 1], first[:, 1::2, 1]]
        case PixelFormat.NV12:
            return [first], [image.planes[1][:, 0::2], image.planes[1][:, 1::2]]
        case PixelFormat.I420:
            return [first], list(image.planes[1:])


def image_of_planes(
    pixel_format: PixelFormat,
    luma: NDArray[np.uint8],
    u: NDArray[np.uint8],
    v: NDArray[np.uint8],
    colour: Colour,
) -> Image:
    """Of a YUV format; U and V at the format's own resolution."""
    match pixel_format:
        case PixelFormat.GREY:
            return Image(pixel_format, (luma[..., None],), colour)
        case PixelFormat.YUY2:
            pairs = np.stack([u, v], axis=-1).reshape(luma.shape)
            return Image(pixel_format, (np.stack([luma, pairs], axis=-1),), colour)
        case PixelFormat.NV12:
            pairs = np.stack([u, v], axis=-1).reshape(len(u), -1)
            return Image(pixel_format, (luma, pairs), colour)
        case PixelFormat.I420:
            return Image(pixel_format, (luma, u, v), colour)
    raise AssertionError(pixel_format)


def random_image(
    pixel_format: PixelFormat, width: int, height: int, seed: int = 0, colour: Colour = COLOURS[0]
) -> Image:
    """Every byte at random."""
    random = np.random.default_rng(seed)
    shape = {PixelFormat.BGR: (height, width, 3), PixelFormat.YUY2: (height, width, 2)}.get(
        pixel_format, (height * 3 // 2 if pixel_format.is_subsampled else height, width, 1)
    )
    return Image.of_packed(pixel_format, random.integers(0, 256, shape, np.uint8), colour)


def camera_image(pixel_format: PixelFormat, bgr: NDArray[np.uint8], colour: Colour) -> Image:
    """The picture as a camera with that format and those colours delivers it: exact values, chroma
    averaged over the pixels that share it, then rounded. Sides are even."""
    if pixel_format is PixelFormat.BGR:
        return Image.of_bgr(bgr)
    by_luma, by_u, _, _, by_v = (float(factor) for factor in exact_factors(colour))
    kr, kb = {ColourMatrix.BT601: (0.299, 0.114), ColourMatrix.BT709: (0.2126, 0.0722)}[
        colour.matrix
    ]
    blue, green, red = np.moveaxis(bgr.astype(np.float64), -1, 0)
    y = kr * red + kb * blue + (1 - kr - kb) * green
    u, v = (blue - y) / by_u + 128, (red - y) / by_v + 128
    u, v = ((each[:, 0::2] + each[:, 1::2]) / 2 for each in (u, v))
    if pixel_format.is_subsampled:
        u, v = ((each[0::2] + each[1::2]) / 2 for each in (u, v))
    luma = y / by_luma + factors(colour)[0]
    luma, u, v = (np.rint(each).clip(0, 255).astype(np.uint8) for each in (luma, u, v))
    return image_of_planes(pixel_format, luma, u, v, colour)


def _taps(source: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The first of two neighbours, and the weights of both, of 2048."""
    step = 1.0 / (size / source)
    centres = ((np.arange(size) + 0.5) * step - 0.5).astype(np.float32)
    whole = np.floor(centres)
    fraction = centres - whole
    near, far = (np.rint(part * np.float32(2048)) for part in (1 - fraction, fraction))
    return whole.astype(np.int64), near.astype(np.int64), far.astype(np.int64)


def _resized(plane: NDArray[np.uint8], width: int, height: int) -> NDArray[np.int64]:
    """Bilinear: 11-bit weights, and what of a sum's bits is dropped on the way."""
    values = plane.astype(np.int64)
    columns, near, far = _taps(values.shape[1], width)
    outside = (columns < 0) | (columns >= values.shape[1] - 1)
    near, far = np.where(outside, 2048, near), np.where(outside, 0, far)
    columns = columns.clip(0, values.shape[1] - 1)
    right = (columns + 1).clip(0, values.shape[1] - 1)
    across = values[:, columns] * near + values[:, right] * far
    rows, above, below = _taps(values.shape[0], height)
    last = len(values) - 1
    top, bottom = across[rows.clip(0, last)] >> 4, across[(rows + 1).clip(0, last)] >> 4
    return ((above[:, None] * top >> 16) + (below[:, None] * bottom >> 16) + 2) >> 2


def _mapped(
    plane: NDArray[np.uint8], x: NDArray[np.int64], y: NDArray[np.int64], outside: int
) -> NDArray[np.int64]:
    """Bilinear at positions in 1/32 px; `outside` lies around the plane."""
    height, width = plane.shape
    total = np.full(x.shape, 512, np.int64)
    for dx in (0, 1):
        for dy in (0, 1):
            column, row = (x >> 5) + dx, (y >> 5) + dy
            inside = (column >= 0) & (row >= 0) & (column < width) & (row < height)
            value = plane[row.clip(0, height - 1), column.clip(0, width - 1)].astype(np.int64)
            weight_x = (x & 31) if dx else 32 - (x & 31)
            weight_y = (y & 31) if dy else 32 - (y & 31)
            total += np.where(inside, value, outside) * weight_x * weight_y
    return total >> 10
