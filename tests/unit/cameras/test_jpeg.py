"""JPEGs are checked before they are decoded, and decoded no larger than needed."""

from __future__ import annotations

import time
import tracemalloc
import zlib

import cv2
import numpy as np
import pytest

from edge_server.cameras.frame import UsefulSize
from edge_server.cameras.jpeg import JpegDecoder, encode_jpeg, size_of_jpeg, size_of_png
from edge_server.errors import SourceError
from edge_server.pixels import Image, PixelFormat


def jpeg(width: int = 330, height: int = 242, *options: int) -> bytes:
    across = np.linspace(0, 255, width, dtype=np.uint8)
    image = np.dstack([np.tile(across, (height, 1))] * 3)
    image[height // 2 :, :, 0] = 40
    return cv2.imencode(".jpg", image, options)[1].tobytes()


WHOLE = jpeg()


@pytest.mark.parametrize("progressive", [0, 1])
def test_a_header_says_the_size(progressive: int) -> None:
    data = jpeg(330, 242, cv2.IMWRITE_JPEG_PROGRESSIVE, progressive)
    assert size_of_jpeg(data) == (330, 242)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "header"),
        (b"<html>busy</html>", "header"),
        (WHOLE[:40], "header"),
        (WHOLE[: len(WHOLE) // 2], "end is missing"),
        (WHOLE[: len(WHOLE) - 90] + WHOLE, "something else begins"),
    ],
)
def test_what_is_not_whole_is_damaged(data: bytes, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        size_of_jpeg(data)
    with pytest.raises(ValueError, match=word):
        JpegDecoder("usb").decode(data)


@pytest.mark.parametrize("filler", [b"\xff", b"\xff\xfe\x00\x02"])
def test_a_header_without_end_takes_no_time(filler: bytes) -> None:
    data = b"\xff\xd8" + filler * (2**23 // len(filler))
    began = time.thread_time()
    with pytest.raises(ValueError, match=r"header|segments"):
        size_of_jpeg(data)
    assert time.thread_time() - began < 1.0


def with_scans(width: int, height: int, scans: int) -> bytes:
    """A plain progressive JPEG whose last scan is there again and again."""
    data = jpeg_of_size(width, height)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + (scans - data.count(b"\xff\xda")) * last + b"\xff\xd9"


def jpeg_of_size(width: int, height: int) -> bytes:
    plain = np.full((height, width, 3), 90, np.uint8)
    return cv2.imencode(".jpg", plain, (cv2.IMWRITE_JPEG_PROGRESSIVE, 1))[1].tobytes()


def test_no_more_is_decoded_than_the_work_of_a_camera_s_picture() -> None:
    decoder = JpegDecoder("http://cam/x")
    # 33 megapixels, each of them 49 times, in 200 kB.
    with pytest.raises(ValueError, match="it has 49 scans of 7680 x 4368, more work"):
        decoder.decode(with_scans(7680, 4368, 49))
    # Progressive encoders write ten; a small picture may have any number of them.
    assert decoder.decode(jpeg_of_size(6000, 4000)) is not None
    assert decoder.decode(with_scans(640, 360, 49)) is not None


@pytest.mark.parametrize("segment", [0xFE, 0xDB])
def test_an_end_within_a_segment_hides_no_scans(segment: int) -> None:
    data = jpeg_of_size(3840, 2160)
    hidden = bytes([0xFF, segment, 0, 6]) + b"\xff\xd9\xff\xd9"
    last = data[data.rindex(b"\xff\xda") : -2]
    with pytest.raises(ValueError, match="60 scans"):
        size_of_jpeg(data[:-2] + hidden + 50 * last + b"\xff\xd9")


@pytest.mark.parametrize("frame", [0xC3, 0xC9, 0xCA, 0xCF])
def test_a_jpeg_of_a_kind_that_cameras_do_not_write_is_not_decoded(frame: int) -> None:
    at = WHOLE.index(b"\xff\xc0")
    with pytest.raises(ValueError, match="what no camera writes"):
        size_of_jpeg(WHOLE[: at + 1] + bytes([frame]) + WHOLE[at + 2 :])


def test_a_buffer_that_a_driver_fills_up_is_whole() -> None:
    assert JpegDecoder("usb").decode(WHOLE + bytes(2000) + WHOLE[-500:]) is not None


@pytest.mark.parametrize(
    ("useful", "shape"),
    [
        (None, (242, 330)),
        ((330, 242), (242, 330)),
        ((166, 121), (242, 330)),
        ((165, 121), (121, 165)),
        ((64, 36), (61, 83)),
        ((41, 30), (31, 42)),
        ((1, 1), (31, 42)),
    ],
)
def test_no_more_is_decoded_than_the_model_needs(
    useful: tuple[int, int] | None, shape: tuple[int, int]
) -> None:
    size = UsefulSize()
    size.size = useful
    image, whole = JpegDecoder("usb", size).decode(WHOLE)
    assert (image.height, image.width) == shape
    assert whole == (None if shape == (242, 330) else (330, 242))


def test_a_smaller_picture_shows_the_same() -> None:
    size = UsefulSize()
    decoder = JpegDecoder("usb", size)
    whole = decoder.decode(jpeg(640, 480))[0].planes[0]
    size.size = (160, 120)
    small = decoder.decode(jpeg(640, 480))[0].planes[0]
    means = cv2.resize(whole, (160, 120), interpolation=cv2.INTER_AREA)
    differences = np.abs(means.astype(int) - small)
    # The most at the edge between two colours, where chroma has half the resolution.
    assert differences.mean() < 0.5
    assert differences.max() <= 16


@pytest.mark.parametrize("pixel_format", PixelFormat)
def test_a_small_jpeg_of_a_huge_image_needs_no_copy_of_its_size(pixel_format: PixelFormat) -> None:
    width, height = 7680, 4320
    rows = height * 3 // 2 if pixel_format.is_subsampled else height
    channels = {PixelFormat.BGR: 3, PixelFormat.YUY2: 2}.get(pixel_format, 1)
    image = Image.of_packed(pixel_format, np.full((rows, width, channels), 128, np.uint8))
    tracemalloc.start()
    try:
        data = encode_jpeg(image, 78, 320)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size_of_jpeg(data) == (320, 180)
    assert peak < 4_000_000


def test_a_picture_too_large_for_the_memory_is_not_decoded() -> None:
    at = WHOLE.index(b"\xff\xc0")
    huge = WHOLE[: at + 5] + (60000).to_bytes(2, "big") * 2 + WHOLE[at + 9 :]
    with pytest.raises(SourceError, match="60000 x 60000, more than 32 megapixels"):
        JpegDecoder("usb").decode(huge)


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


PNG = cv2.imencode(".png", np.zeros((4, 6, 3), np.uint8))[1].tobytes()
# libpng unpacks each of these to 8 MB.
PACKED_TEXT = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(8 << 20)))


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (PNG[:33] + 900 * PACKED_TEXT + PNG[33:], "more than 16 packed texts"),
        (PNG[:33] + 200_000 * chunk(b"tEXt", b"") + PNG[33:], "more than 100000 chunks"),
        (PNG[:-12], "its end is missing"),
        (PNG[:20], "its end is missing"),
        (PNG[:16] + 2 * (9000).to_bytes(4, "big") + PNG[24:], "9000 x 9000, more than"),
    ],
)
def test_a_png_that_is_cut_off_or_too_much_work_is_refused_at_once(data: bytes, word: str) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match=word):
        size_of_png(data)
    assert time.process_time() - began < 1.0


def test_a_png_says_its_size() -> None:
    assert size_of_png(PNG[:33] + 9 * PACKED_TEXT + PNG[33:] + b"more") == (6, 4)
