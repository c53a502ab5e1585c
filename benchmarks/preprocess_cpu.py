"""Preprocessing on the CPU: a frame of each pixel format → FP32 [3,360,640].

    python benchmarks/preprocess_cpu.py [--repeats N] [--threads N]

Columns: the CPU time of one frame, the median of the repeats, which other programs on the machine
hardly change; the share of one core that four such cameras take at 30 frames a second, each on a
thread of its own; the CPU time of the same frame converted to BGR at its own size first, by
OpenCV's cvtColor (BT.601 limited only), where OpenCV has it; and of a BGR picture of the frame's
own size (`cameras.colour.bgr_of`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import cv2
import numpy as np
from record import add_option, record

from edge_server.backends.vision.preprocess_cpu import scale_frame
from edge_server.cameras.colour import bgr_of
from edge_server.pixels import Colour, ColourMatrix, ColourRange, Image, PixelFormat
from edge_server.tools.road.renderer import render
from edge_server.tools.road.scene import RoadScene

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

SIZES = {"4K": (3840, 2160), "1080p": (1920, 1080), "720p": (1280, 720)}
COLOURS = {
    "709 limited": Colour(ColourMatrix.BT709, ColourRange.LIMITED),
    "601 full": Colour(ColourMatrix.BT601, ColourRange.FULL),
}
CAMERAS, FPS = 4, 30
SCALE = np.float32(1 / 255)
CODES = {
    PixelFormat.YUY2: cv2.COLOR_YUV2BGR_YUY2,
    PixelFormat.NV12: cv2.COLOR_YUV2BGR_NV12,
    PixelFormat.I420: cv2.COLOR_YUV2BGR_I420,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1, help="of OpenCV, for one frame")
    add_option(parser)
    arguments = parser.parse_args()
    cv2.setNumThreads(arguments.threads)
    print(f"OpenCV {cv2.__version__}, {cv2.getNumThreads()} thread(s) for a frame")
    print(f"{'frame':26} {'ms':>8} {'x4 core':>8} {'BGR 1st':>8} {'picture':>8}")
    found: dict[str, float] = {}
    for size_name, (width, height) in SIZES.items():
        picture, _ = render(RoadScene.for_camera(3), 120.0, 1280, 720)
        picture = cv2.resize(picture, (width, height))
        for pixel_format in PixelFormat:
            for colour_name, colour in COLOURS.items():
                if pixel_format is PixelFormat.BGR and colour is not COLOURS["709 limited"]:
                    continue
                image = image_of(pixel_format, picture, colour)
                values = measure(image, arguments.repeats)
                name = "" if pixel_format is PixelFormat.BGR else colour_name
                row = f"{size_name:5} {pixel_format.value:5} {name:14}"
                print(row, " ".join(f"{value:8.2f}" for value in values.values()), flush=True)
                found |= {f"{' '.join(row.split())} {key}": each for key, each in values.items()}
    record(arguments.record, found)


def measure(image: Image, repeats: int) -> dict[str, float]:
    out = np.empty((CAMERAS, 3, 360, 640), np.float32)
    one_ms = median_ms(lambda: scale_frame(image, SCALE, out[0]), repeats)
    images = [
        Image(image.pixel_format, tuple(plane.copy() for plane in image.planes), image.colour)
        for _ in range(CAMERAS)
    ]
    with ThreadPoolExecutor(CAMERAS) as pool:

        def all_cameras() -> None:
            list(pool.map(lambda i: scale_frame(images[i], SCALE, out[i]), range(CAMERAS)))

        share = median_ms(all_cameras, repeats) / 1e3 * FPS
    first_ms = float("nan")
    if (code := CODES.get(image.pixel_format)) is not None:
        packed = image.packed()

        def full_size_first() -> None:
            scale_frame(Image.of_bgr(cv2.cvtColor(packed, code)), SCALE, out[0])

        first_ms = median_ms(full_size_first, repeats)
    shown_ms = median_ms(lambda: bgr_of(image), repeats)
    return {"ms": one_ms, "core": share, "BGR first ms": first_ms, "picture ms": shown_ms}


def median_ms(work: Callable[[], object], repeats: int) -> float:
    work()
    times_s = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        times_s.append(time.process_time() - began)
    return 1e3 * statistics.median(times_s)


def image_of(pixel_format: PixelFormat, bgr: NDArray[np.uint8], colour: Colour) -> Image:
    """The picture in that format; what its colours are has no effect on the time."""
    height, width = bgr.shape[:2]
    i420 = cv2.cvtColor(bgr, cv2.COLOR_BGR2YUV_I420)
    u, v = i420[height:].reshape(2, height // 2, width // 2)
    luma, pairs = i420[:height], np.stack([u, v], axis=-1).reshape(height // 2, width)
    match pixel_format:
        case PixelFormat.BGR:
            packed = bgr
        case PixelFormat.GREY:
            packed = luma[..., None]
        case PixelFormat.YUY2:
            packed = np.stack([luma, pairs.repeat(2, axis=0)], axis=-1)
        case PixelFormat.NV12:
            packed = np.concatenate([luma, pairs])[..., None]
        case PixelFormat.I420:
            packed = i420[..., None]
    return Image.of_packed(pixel_format, packed, colour)


if __name__ == "__main__":
    main()
