"""Conversion of camera images to BGR, for people, models that take nothing else, and networks.

Y, U and V are resized apart and converted at the size that is wanted: a network's input needs no
BGR image of the frame's size. `pixels.YuvToBgr` defines the numbers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import cv2
import numpy as np

from edge_server.pixels import Colour, ColourRange, CropRegion, Image, PixelFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_FULL = Colour(range=ColourRange.FULL)
# The values of U and V without colour.
_NEUTRAL = 128


class Layer(NamedTuple):
    """Values of an image that are resized together.

    Attributes:
        pixels: (h, w) or (h, w, channels) uint8, a view; rows may have gaps.
        step_px: columns and rows of the image per pixel of the layer.
        black: the value of black, by channel.
    """

    pixels: NDArray[np.uint8]
    step_px: tuple[int, int]
    black: tuple[int, ...]


def layers_of(image: Image, region: CropRegion | None = None) -> list[Layer]:
    """Return the layers of `image`, or of one region of it, as `channels_of` takes them.

    YUY2's luma is the first of two channels, the second of which has no meaning; its chroma is the
    second and fourth of four.
    """
    first = image.planes[0]
    crop = region or CropRegion(0, 0, image.width, image.height)
    if image.pixel_format is PixelFormat.BGR:
        pixels = first[crop.y : crop.y + crop.height, crop.x : crop.x + crop.width]
        return [Layer(pixels, (1, 1), (0, 0, 0))]
    black = image.colour.to_bgr.black
    pairs: list[tuple[NDArray[np.uint8], tuple[int, ...]]]
    match image.pixel_format:
        case PixelFormat.GREY:
            return [_cropped(image.luma(), crop, (1, 1), (black,))]
        case PixelFormat.YUY2:
            pairs = [(first.reshape(len(first), -1, 4), (black, _NEUTRAL) * 2)]
            luma = _cropped(first, crop, (1, 1), (black, _NEUTRAL))
        case PixelFormat.NV12:
            chroma = image.planes[1]
            pairs = [(chroma.reshape(len(chroma), -1, 2), (_NEUTRAL, _NEUTRAL))]
            luma = _cropped(first, crop, (1, 1), (black,))
        case PixelFormat.I420:
            pairs = [(plane, (_NEUTRAL,)) for plane in image.planes[1:]]
            luma = _cropped(first, crop, (1, 1), (black,))
    step_px = image.pixel_format.chroma_step_px
    of_chroma = crop.of_chroma(image.pixel_format)
    return [luma, *(_cropped(plane, of_chroma, step_px, empty) for plane, empty in pairs)]


def channels_of(
    pixel_format: PixelFormat, layers: Sequence[NDArray[np.uint8]]
) -> list[NDArray[np.uint8]]:
    """Return the pixels of `layers_of`, of any size, as the channels of `bgr_of_channels`."""
    match pixel_format:
        case PixelFormat.YUY2:
            return [cv2.extractChannel(layers[i], c) for i, c in ((0, 0), (1, 1), (1, 3))]
        case PixelFormat.NV12:
            return [layers[0], *cv2.split(layers[1])]
        case _:
            return list(layers)


def bgr_of_channels(
    pixel_format: PixelFormat, colour: Colour, channels: Sequence[NDArray[np.uint8]]
) -> NDArray[np.uint8]:
    """Return (H, W, 3) uint8 BGR of channels of one size: Y, U and V, or the luma of GREY, each
    (H, W); BGR pixels are returned themselves."""
    if pixel_format is PixelFormat.BGR:
        return channels[0]
    if pixel_format is PixelFormat.GREY:
        bright = cv2.LUT(channels[0], _grey_table(colour))
        return cv2.cvtColor(bright, cv2.COLOR_GRAY2BGR)  # type: ignore[no-any-return]  # OpenCV has no types
    return cv2.transform(cv2.merge(channels), _matrix(colour))  # type: ignore[no-any-return]  # OpenCV has no types


def bgr_of(image: Image, size: tuple[int, int] | None = None) -> NDArray[np.uint8]:
    """Return `image` as (H, W, 3) uint8 BGR; a BGR image's own pixels, otherwise new ones.

    Chroma is interpolated.

    Args:
        size: width and height of the result in px; by default those of the image.
    """
    width, height = size or (image.width, image.height)

    def shrunk(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        # Halving two channels would take them apart first.
        is_far_larger = pixels.shape[0] > 2 * height and pixels.shape[1] > 2 * width
        return resized(pixels, width, height) if is_far_larger else pixels

    # Channels are taken apart where they are small: enlarged chroma has more pixels than before.
    layers = [shrunk(layer.pixels) for layer in layers_of(image)]
    channels = [
        resized(channel, width, height) for channel in channels_of(image.pixel_format, layers)
    ]
    return bgr_of_channels(image.pixel_format, image.colour, channels)


def converted(image: Image, pixel_format: PixelFormat) -> Image | None:
    """Return `image` in another format; None where there is no conversion.

    BGR and GREY from every format, NV12 and I420 from each other and from BGR. What comes from BGR
    is BT.601 of limited range, but for GREY, which is of full range.
    """
    given, first, chroma = image.pixel_format, image.planes[0], image.planes[1:]
    planes: tuple[NDArray[np.uint8], ...] | None = None
    colour = image.colour
    if given is pixel_format:
        planes = image.planes
    elif pixel_format is PixelFormat.BGR:
        planes = (bgr_of(image),)
    elif pixel_format is PixelFormat.GREY and given is PixelFormat.BGR:
        planes, colour = (cv2.cvtColor(first, cv2.COLOR_BGR2GRAY)[..., np.newaxis],), _FULL
    elif pixel_format is PixelFormat.GREY:
        planes = (np.ascontiguousarray(image.luma())[..., np.newaxis],)
    elif (given, pixel_format) == (PixelFormat.I420, PixelFormat.NV12):
        planes = first, cv2.merge(chroma).reshape(len(chroma[0]), -1)
    elif (given, pixel_format) == (PixelFormat.NV12, PixelFormat.I420):
        planes = first, *cv2.split(chroma[0].reshape(len(chroma[0]), -1, 2))
    elif given is PixelFormat.BGR and pixel_format.is_subsampled:
        even = first[: image.height & ~1, : image.width & ~1]
        packed = cv2.cvtColor(even, cv2.COLOR_BGR2YUV_I420)[..., np.newaxis]
        return converted(Image.of_packed(PixelFormat.I420, packed), pixel_format)
    return None if planes is None else Image(pixel_format, planes, colour)


def resized(pixels: NDArray[np.uint8], width: int, height: int) -> NDArray[np.uint8]:
    """Return `pixels` at that size in px, bilinearly interpolated in 8 bits (sample centres at half
    pixels, no antialiasing); `pixels` themselves where they have it."""
    if pixels.shape[:2] == (height, width):
        return pixels
    if pixels.shape == (2 * height, 2 * width, 2):
        # OpenCV halves one, three or four channels by other roundings than two.
        channels = [resized(channel, width, height) for channel in cv2.split(pixels)]
        return cv2.merge(channels)  # type: ignore[no-any-return]  # OpenCV has no types
    return cv2.resize(pixels, (width, height), interpolation=cv2.INTER_LINEAR)  # type: ignore[no-any-return]  # OpenCV has no types


def _cropped(
    pixels: NDArray[np.uint8], crop: CropRegion, step_px: tuple[int, int], black: tuple[int, ...]
) -> Layer:
    rows, columns = slice(crop.y, crop.y + crop.height), slice(crop.x, crop.x + crop.width)
    return Layer(pixels[rows, columns], step_px, black)


@lru_cache
def _matrix(colour: Colour) -> NDArray[np.float64]:
    """Return the (3, 4) matrix from Y, U, V and 1 to B, G, R.

    All are multiples of 1/1024, and no sum lies in the middle between two whole numbers: each way
    in which an OpenCV computes and rounds them is exact, and gives the same numbers.
    """
    to_bgr = colour.to_bgr
    rows = np.array(
        [
            [to_bgr.luma, to_bgr.blue_u, 0],
            [to_bgr.luma, to_bgr.green_u, to_bgr.green_v],
            [to_bgr.luma, 0, to_bgr.red_v],
        ]
    )
    offsets = 1 - 2 * rows @ (to_bgr.black, _NEUTRAL, _NEUTRAL)
    return np.column_stack([rows / 512, offsets / 1024])


@lru_cache
def _grey_table(colour: Colour) -> NDArray[np.uint8]:
    """Return the (256,) uint8 brightness of each luma."""
    to_bgr = colour.to_bgr
    bright = (to_bgr.luma * (np.arange(256) - to_bgr.black) + 256) >> 9
    return bright.clip(0, 255).astype(np.uint8)
