"""The preprocessing kernels beside a plain copy, the CPU and torch: 1080p → [3,360,640].

    python benchmarks/preprocess.py [--quick] [--json FILE]

`preprocess_cpu.py` measures the CPU by itself. Kernel and copy are timed by the GPU's own clock,
one frame a launch, each frame and output in memory that the caches do not hold. A kernel's bytes
are those of the frame that carry weight (an exact threefold downscale reads every third row of
luma) and those it writes; the copy moves as many, half of them read. Exits 69 where there is no
GPU.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import torch_preprocess
from gpu_section import run_section
from gpu_timing import GpuClock, host_ms

from edge_server.backends.vision.preprocess_cpu import scale_frame
from edge_server.gpu.memory import DeviceMemory, MappedMemory
from edge_server.gpu.preprocess_kernel import (
    MAX_FRAMES,
    FrameLayout,
    FramePreprocess,
    PreprocessArgs,
    kernel_image,
)
from edge_server.gpu.stream import Module
from edge_server.pixels import Colour, ColourMatrix, ColourRange, Image, PixelFormat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_server.gpu.device import Device, Devices

WIDTH, HEIGHT = 1920, 1080
OUT_WIDTH, OUT_HEIGHT = 640, 360
SCALE = np.float32(1 / 255)
COLOUR = Colour(ColourMatrix.BT709, ColourRange.LIMITED)
# More than any GPU caches: an H100 has 50 MB.
ROTATED_BYTES = 256 << 20
GOALS = {"share of copy": 0.6, "times CPU": 10.0, "times torch": 2.0}


def main() -> int:
    return run_section("preprocess", __doc__, report)


def report(devices: Devices, quick: bool) -> Iterator[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    notes = [torch_preprocess.note()]
    for row in measure(devices.gpu(), quick=quick):
        rows.append(row)
        yield {"rows": rows, "goals": [], "notes": notes}
    yield {"rows": rows, "goals": goals_of(rows, quick=quick), "notes": notes}


def measure(device: Device, *, quick: bool) -> Any:
    """A row of figures for each format and type, printed as they come."""
    bench = Bench(device, quick=quick)
    print(f"{WIDTH}x{HEIGHT} -> [3,{OUT_HEIGHT},{OUT_WIDTH}] on {device.name}")
    names = (
        "",
        "us",
        "batched",
        "GB/s",
        "copy GB/s",
        "share",
        "mapped us",
        "CPU ms",
        "torch us",
    )
    print("{:10} {:>8} {:>8} {:>8} {:>9} {:>6} {:>9} {:>9} {:>9}".format(*names))
    for pixel_format in PixelFormat:
        for dtype in (np.float16, np.float32):
            row = bench.row(pixel_format, np.dtype(dtype))
            mapped, torch_us = (row[k] or math.nan for k in ("mapped_us", "torch_us"))
            print(
                f"{pixel_format.name} {'FP16' if dtype is np.float16 else 'FP32':5} "
                f"{row['kernel_us']:8.1f} {row['kernel_us_in_batch']:8.1f} {row['gb_per_s']:8.1f} "
                f"{row['copy_gb_per_s']:9.1f} {row['share_of_copy']:6.2f} {mapped:9.1f} "
                f"{row['cpu_ms']:9.2f} {torch_us:9.1f}",
                flush=True,
            )
            yield row


def goals_of(rows: list[dict[str, Any]], *, quick: bool) -> list[dict[str, Any]]:
    """Those of speed are for NV12 to FP16; a figure that is not there meets none."""
    (row,) = (r for r in rows if (r["format"], r["dtype"]) == ("NV12", "FP16"))
    keys = ("share_of_copy", "times_cpu", "times_torch")
    error = max(row["largest_error"] for row in rows)
    numbers = {"goal": "as on the CPU, within 1/255", "reached": error, "met": error <= 1 / 255}
    if quick:
        return [numbers]
    return [numbers] + [
        {
            "goal": f"1080p NV12 -> [3,360,640] FP16: {name} >= {wanted:g}",
            "reached": row[key],
            "met": row[key] is not None and row[key] >= wanted,
        }
        for (name, wanted), key in zip(GOALS.items(), keys, strict=True)
    ]


class Bench:
    """All that the rows share: kernels, a clock, frames."""

    def __init__(self, device: Device, *, quick: bool) -> None:
        self._device = device
        self._clock = GpuClock(device, quick=quick)
        self._batch = 2 if quick else MAX_FRAMES
        self._rotated_bytes = (8 << 20) if quick else ROTATED_BYTES
        image = kernel_image(device.compute_capability, device.driver_version)
        self._module = Module(device, image)

    def row(self, pixel_format: PixelFormat, dtype: np.dtype[Any]) -> dict[str, Any]:
        """Figures of one format and type; its output has been held against the CPU's."""
        image = random_image(pixel_format)
        frame = image.packed().reshape(-1)
        layout = FrameLayout.packed(pixel_format, WIDTH, HEIGHT)
        half = dtype == np.float16
        geometry = FramePreprocess(
            layout, OUT_WIDTH, OUT_HEIGHT, scale=float(SCALE), half=half, colour=COLOUR
        )
        signature = f"{ctypes.sizeof(PreprocessArgs)}s"
        kernel = self._module.kernel(f"{pixel_format.value}_to_nchw", signature)
        stream = self._clock.stream

        out_bytes = 3 * OUT_HEIGHT * OUT_WIDTH * dtype.itemsize
        places = max(self._batch, self._rotated_bytes // (frame.nbytes + out_bytes))
        frames, outs = (DeviceMemory(self._device, places * n) for n in (frame.nbytes, out_bytes))
        for place in range(places):
            stream.to_device(_At(frames.pointer + place * frame.nbytes, frame.nbytes), frame)

        def launch(first: int, count: int = 1, pointer: int = frames.pointer) -> None:
            addresses = [layout.address(pointer + (first + i) * frame.nbytes) for i in range(count)]
            made = geometry.launch(addresses, outs.pointer + first * out_bytes)
            stream.launch(kernel, made.grid, made.block, made.args)

        launch(0)
        out = np.empty((3, OUT_HEIGHT, OUT_WIDTH), dtype)
        stream.to_host(out, outs)
        stream.synchronize()
        # Not by the OpenCV that is here.
        bgr = find_whole_numbers()(image, OUT_WIDTH, OUT_HEIGHT)
        expected = (bgr.transpose(2, 0, 1) * SCALE).astype(dtype)
        error = float(np.abs(out.astype(np.float64) - expected.astype(np.float64)).max())

        kernel_us = self._clock.piece_us(lambda i: launch(i % places))
        turns = places // self._batch
        batch_us = self._clock.piece_us(lambda i: launch(i % turns * self._batch, self._batch))
        bytes_moved = bytes_read(pixel_format) + out_bytes
        copied = bytes_moved // 2
        pieces = min(frames.nbytes, outs.nbytes) // copied

        def copy(number: int) -> None:
            at = number % pieces * copied
            stream.copy(_At(outs.pointer + at, copied), _At(frames.pointer + at, copied))

        copy_us = self._clock.piece_us(copy)
        mapped_us = None
        if self._device.can_map_host_memory:
            mapped = MappedMemory(self._device, (4, frame.nbytes), np.uint8)
            mapped.array[:] = frame
            mapped_us = self._clock.piece_us(lambda i: launch(i % 4, pointer=mapped.pointer))
        cpu_ms = host_ms(lambda: scale_frame(image, SCALE, out), self._clock.repeats)
        torch_us = torch_preprocess.gpu_us(pixel_format, frame, (OUT_HEIGHT, OUT_WIDTH), half)
        return {
            "format": pixel_format.name,
            "dtype": "FP16" if half else "FP32",
            "largest_error": error,
            "kernel_us": kernel_us,
            "kernel_us_in_batch": batch_us / self._batch,
            "mapped_us": mapped_us,
            "frame_bytes": frame.nbytes,
            "bytes_moved": bytes_moved,
            "gb_per_s": bytes_moved / kernel_us / 1e3,
            "copy_us": copy_us,
            "copy_gb_per_s": 2 * copied / copy_us / 1e3,
            "share_of_copy": copy_us / kernel_us * bytes_moved / (2 * copied),
            "cpu_ms": cpu_ms,
            "cpu_threads": cv2.getNumThreads(),
            "times_cpu": 1e3 * cpu_ms / kernel_us,
            "torch_us": torch_us,
            "times_torch": None if torch_us is None else torch_us / kernel_us,
        }


class _At:
    """Some bytes on the device."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.pointer = pointer
        self.nbytes = nbytes


def random_image(pixel_format: PixelFormat) -> Image:
    """A frame whose planes follow each other."""
    rows = HEIGHT * 3 // 2 if pixel_format.is_subsampled else HEIGHT
    channels = {PixelFormat.BGR: 3, PixelFormat.YUY2: 2}.get(pixel_format, 1)
    pixels = np.random.default_rng(0).integers(0, 256, (rows, WIDTH, channels), np.uint8)
    return Image.of_packed(pixel_format, pixels, COLOUR)


def find_whole_numbers() -> Any:
    """The tests' `bgr_by_integers`, which needs no OpenCV."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    try:
        return importlib.import_module("support.integer_colours").bgr_by_integers
    finally:
        sys.path.pop(0)


def bytes_read(pixel_format: PixelFormat) -> int:
    """Of the rows of a frame that carry weight, each once."""
    luma = rows_read(HEIGHT) * WIDTH
    match pixel_format:
        case PixelFormat.BGR:
            return 3 * luma
        case PixelFormat.YUY2:
            return 2 * luma
        case PixelFormat.GREY:
            return luma
        case PixelFormat.NV12 | PixelFormat.I420:
            return luma + rows_read(HEIGHT // 2) * WIDTH


def rows_read(height: int) -> int:
    step = height / OUT_HEIGHT
    centres = (np.arange(OUT_HEIGHT) + 0.5) * step - 0.5
    top = np.floor(centres).astype(int)
    weighs = np.rint((centres - top) * 2048) > 0
    rows = np.clip(np.concatenate([top, top[weighs] + 1]), 0, height - 1)
    return len(np.unique(rows))


if __name__ == "__main__":
    sys.exit(main())
