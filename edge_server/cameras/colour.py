"""Conversion of camera images to BGR, for people, models that take nothing else, and networks.

Y, U and V are resized apart and converted at the size that is wanted: a network's input needs no
BGR image of the frame's size. `pixels.YuvToBgr` defines the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import cv2
import numpy as np
from numpy.typing import NDArray

from edge_server.pixels import Colour, ColourRange, CropRegion, Image, PixelFormat

Pixels = NDArray[np.uint8]

_FULL = Colour(range=ColourRange.FULL)
# The values of U and V without colour.
_NEUTRAL = 128


# Samples a layer of an image, values that are sampled together, at another size: its pixels, (h, w)
# or (h, w, channels), the columns and rows of the image that each stands for, and black by channel.
Sample = Callable[[Pixels, tuple[int, int], tuple[int, ...]], Pixels]


def bgr_of(
    image: Image,
    size: tuple[int, int] | None = None,
    region: CropRegion | None = None,
    sample: Sample | None = None,
) -> Pixels:
    """Return `image` as (H, W, 3) uint8 BGR; a BGR image's own pixels where they have that size,
    otherwise new ones.

    Chroma is interpolated.

    Args:
        size: width and height of the result in px; by default those of the image.
        region: only this part of the image is resized.
        sample: makes layers of that size; by default they are resized.
    """
    width, height = size or (image.width, image.height)
    crop = region or CropRegion(0, 0, image.width, image.height)

    def layer(pixels: Pixels, part: CropRegion, step_px: tuple[int, int], *black: int) -> Pixels:
        pixels = pixels[part.y : part.y + part.height, part.x : part.x + part.width]
        if sample is not None:
            return sample(pixels, step_px, black)
        # Enlarged or halved, channels are taken apart before.
        is_far_larger = pixels.shape[0] > 2 * height and pixels.shape[1] > 2 * width
        return resized(pixels, width, height) if is_far_larger else pixels

    first, pixel_format = image.planes[0], image.pixel_format
    if pixel_format is PixelFormat.BGR:
        return resized(layer(first, crop, (1, 1), 0, 0, 0), width, height)
    black = image.colour.to_bgr.black
    if pixel_format is PixelFormat.GREY:
        luma = resized(layer(image.luma(), crop, (1, 1), black), width, height)
        bright = cv2.LUT(luma, _grey_table(image.colour))
        return cv2.cvtColor(bright, cv2.COLOR_GRAY2BGR)  # type: ignore[no-any-return]  # OpenCV has no types
    of_chroma, step_px = crop.of_chroma(pixel_format), pixel_format.chroma_step_px
    chroma: Sequence[Pixels]
    if pixel_format is PixelFormat.YUY2:
        # Luma is the first of two channels, the second of which has no meaning; chroma is the
        # second and fourth of four.
        luma = cv2.extractChannel(layer(first, crop, (1, 1), black, _NEUTRAL), 0)
        pairs = first.reshape(len(first), -1, 4)
        pairs = layer(pairs, of_chroma, step_px, *(black, _NEUTRAL) * 2)
        chroma = [cv2.extractChannel(pairs, channel) for channel in (1, 3)]
    elif pixel_format is PixelFormat.NV12:
        luma = layer(first, crop, (1, 1), black)
        pairs = image.planes[1].reshape(len(image.planes[1]), -1, 2)
        chroma = cv2.split(layer(pairs, of_chroma, step_px, _NEUTRAL, _NEUTRAL))
    else:
        luma = layer(first, crop, (1, 1), black)
        chroma = [layer(plane, of_chroma, step_px, _NEUTRAL) for plane in image.planes[1:]]
    channels = [resized(channel, width, height) for channel in (luma, *chroma)]
    return cv2.transform(cv2.merge(channels), _matrix(image.colour))  # type: ignore[no-any-return]  # OpenCV has no types


def converted(image: Image, pixel_format: PixelFormat) -> Image | None:
    """Return `image` in another format; None where there is no conversion.

    BGR and GREY from every format, NV12 and I420 from each other and from BGR. What comes from BGR
    is BT.601 of limited range, but for GREY, which is of full range.
    """
    given, first, chroma = image.pixel_format, image.planes[0], image.planes[1:]
    planes: tuple[Pixels, ...] | None = None
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


def resized(pixels: Pixels, width: int, height: int) -> Pixels:
    """Return `pixels` at that size in px, bilinearly interpolated in 8 bits (sample centres at half
    pixels, no antialiasing); `pixels` themselves where they have it."""
    if pixels.shape[:2] == (height, width):
        return pixels
    if pixels.shape == (2 * height, 2 * width, 2):
        # OpenCV halves one, three or four channels by other roundings than two.
        channels = [resized(channel, width, height) for channel in cv2.split(pixels)]
        return cv2.merge(channels)  # type: ignore[no-any-return]  # OpenCV has no types
    return cv2.resize(pixels, (width, height), interpolation=cv2.INTER_LINEAR)  # type: ignore[no-any-return]  # OpenCV has no types


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
def _grey_table(colour: Colour) -> Pixels:
    """Return the (256,) uint8 brightness of each luma."""
    to_bgr = colour.to_bgr
    bright = (to_bgr.luma * (np.arange(256) - to_bgr.black) + 256) >> 9
    return bright.clip(0, 255).astype(np.uint8)
