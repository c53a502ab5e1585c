"""The preprocessing kernels on this machine's GPU, beside what they have to beat.

    python benchmarks/preprocess.py [--launches 400] [--json FILE]

For each format a 1080p frame becomes [3,360,640] FP16. Times are per frame. The GPU's are taken
between two events around launches that wait in their stream until all are enqueued, so that
Python's own time is not in them; they go round 256 MiB of frames and outputs, so that no cache
holds them. `copy` is the driver's own device copy of as many bytes as the kernel reads and writes,
`share` what the kernel reaches of its bandwidth. `opencv` is the CPU path with all of this
machine's cores. `torch` is its separate operations on the GPU, where torch is installed, as fast as
Python enqueues them or the GPU does them, whichever is slower.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edge_server.backends.preprocess_cpu import bgr_of, scale_frame
from edge_server.cuda.device import Device, open_device
from edge_server.cuda.kernels.preprocess import (
    FrameAddress,
    FrameLayout,
    FramePreprocess,
    PixelFormat,
    PreprocessArgs,
)
from edge_server.cuda.kernels.shipped import kernel_image
from edge_server.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

WIDTH, HEIGHT = 1920, 1080
OUT_WIDTH, OUT_HEIGHT = 640, 360
SCALE = 1 / 255
OUT_BYTES = 3 * OUT_WIDTH * OUT_HEIGHT * 2
SPREAD_BYTES = 256 * 2**20
# Fills of this keep a GPU busy while launches are enqueued behind them.
HOLD_BYTES = 2**28
ROUNDS = 7


def planes_of(pixel_format: PixelFormat) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
    random = np.random.default_rng(0)
    channels = {PixelFormat.BGR: (3,), PixelFormat.NV12: (), PixelFormat.YUY2: (2,)}
    pixels = random.integers(0, 256, (HEIGHT, WIDTH, *channels[pixel_format]), np.uint8)
    if pixel_format is not PixelFormat.NV12:
        return pixels, None
    return pixels, random.integers(0, 256, (HEIGHT // 2, WIDTH), np.uint8)


def rows_read(step: float, height: int, out_height: int, shift: int) -> int:
    """How many of a plane's rows carry weight."""
    centres = (np.arange(out_height) + 0.5) * step - 0.5
    tops = np.floor(centres)
    bottoms = tops[np.rint((centres - tops) * 2048) > 0] + 1
    rows = np.clip(np.concatenate([tops, bottoms]), 0, height - 1).astype(int) >> shift
    return len(np.unique(rows))


def bytes_moved(layout: FrameLayout) -> int:
    step = HEIGHT / OUT_HEIGHT
    read = rows_read(step, HEIGHT, OUT_HEIGHT, 0) * layout.stride_bytes
    read += rows_read(step, HEIGHT, OUT_HEIGHT, 1) * layout.chroma_stride_bytes
    return read + OUT_BYTES


class Gpu:
    """One stream, and times on it."""

    def __init__(self, device: Device, launches: int) -> None:
        self.device = device
        self.stream = device.stream()
        self._launches = launches
        self._hold = device.memory(HOLD_BYTES)
        self._begun, self._ended = device.event(timed=True), device.event(timed=True)

    def us_of(self, enqueue: Callable[[int], None]) -> float:
        """Microseconds of one `enqueue(i)`: the median of `ROUNDS`, after one to warm up."""
        times_us = []
        for _ in range(ROUNDS + 1):
            # A launch takes about 10 us of Python, a fill 100 us on an H100, more elsewhere.
            for _ in range(1 + self._launches // 8):
                self.stream.fill(self._hold)
            self.stream.record(self._begun)
            for i in range(self._launches):
                enqueue(i)
            self.stream.record(self._ended)
            self._ended.wait()
            times_us.append(self._ended.ms_since(self._begun) * 1e3 / self._launches)
        return statistics.median(times_us[1:])


def on_gpu(gpu: Gpu, pixel_format: PixelFormat) -> dict[str, float]:
    device, stream = gpu.device, gpu.stream
    module = device.module(kernel_image(device.compute_capability, device.libcuda.driver_version))
    layout = FrameLayout.packed(pixel_format, WIDTH, HEIGHT)
    preprocess = FramePreprocess(layout, OUT_WIDTH, OUT_HEIGHT, scale=SCALE, half=True)
    pixels, chroma = planes_of(pixel_format)
    frame = pixels.tobytes() + (b"" if chroma is None else chroma.tobytes())
    host = np.frombuffer(frame, np.uint8)
    moved = bytes_moved(layout)

    copies = max(1, SPREAD_BYTES // (len(frame) + OUT_BYTES))
    frames = [device.memory(len(frame)) for _ in range(copies)]
    outs = [device.memory(OUT_BYTES) for _ in range(copies)]
    for memory in frames:
        stream.to_device(memory, host)
    mapped = device.mapped(host.shape, np.uint8)
    mapped.array[:] = host

    def launch_of(pointer: int, out: int) -> tuple[tuple[int, ...], tuple[int, ...], bytes]:
        address = FrameAddress(pointer, 0 if chroma is None else pointer + pixels.nbytes)
        launch = preprocess.launch([address], out)
        return launch.grid, launch.block, launch.args

    name = preprocess.launch([FrameAddress(16, 0 if chroma is None else 16)], 16).kernel
    kernel = module.kernel(name, f"{ctypes.sizeof(PreprocessArgs)}s")
    launches = [
        launch_of(memory.pointer, out.pointer) for memory, out in zip(frames, outs, strict=True)
    ]
    from_mapped = launch_of(mapped.pointer, outs[0].pointer)

    # The numbers first: a wrong kernel has no speed.
    made = np.empty((3, OUT_HEIGHT, OUT_WIDTH), np.float16)
    stream.launch(kernel, *launches[0])
    stream.to_host(made, outs[0])
    stream.synchronize()
    expected = np.empty_like(made)
    scale_frame(bgr_of(pixel_format, pixels, chroma), np.float32(SCALE), expected)
    error = float(np.abs(made.astype(np.float64) - expected).max())
    assert error <= 1 / 255, f"{name}: the largest error is {error * 255:.2f} grey levels"

    # A copy reads as much as it writes.
    blocks = [device.memory(moved // 2) for _ in range(max(2, SPREAD_BYTES // moved))]
    kernel_us = gpu.us_of(lambda i: stream.launch(kernel, *launches[i % copies]))
    copy_us = gpu.us_of(
        lambda i: stream.copy(blocks[i % len(blocks)], blocks[(i + 1) % len(blocks)])
    )
    mapped_us = gpu.us_of(lambda _: stream.launch(kernel, *from_mapped))
    return {
        "error_grey_levels": error * 255,
        "moved_mb": moved / 1e6,
        "kernel_us": kernel_us,
        "copy_us": copy_us,
        "share_of_copy": copy_us / kernel_us,
        "kernel_gb_s": moved / kernel_us / 1e3,
        "mapped_us": mapped_us,
    }


def by_opencv_us(pixel_format: PixelFormat, runs: int = 50) -> float:
    pixels, chroma = planes_of(pixel_format)
    out = np.empty((3, OUT_HEIGHT, OUT_WIDTH), np.float16)
    times_us = []
    for _ in range(runs):
        begun = time.perf_counter()
        scale_frame(bgr_of(pixel_format, pixels, chroma), np.float32(SCALE), out)
        times_us.append((time.perf_counter() - begun) * 1e6)
    return statistics.median(times_us)


def by_torch_us(pixel_format: PixelFormat, launches: int) -> float | None:
    """Convert, resize, scale and cast, one operation after the other, as a program would."""
    try:
        import torch  # noqa: PLC0415
    except ImportError:
        return None
    pixels, chroma = planes_of(pixel_format)
    device_pixels = torch.from_numpy(pixels).cuda()
    device_chroma = None if chroma is None else torch.from_numpy(chroma).cuda()

    def yuv_planes() -> tuple[torch.Tensor, torch.Tensor]:
        if device_chroma is not None:
            pairs = device_chroma.view(HEIGHT // 2, WIDTH // 2, 2).permute(2, 0, 1)[None].float()
            wide = torch.nn.functional.interpolate(pairs, size=(HEIGHT, WIDTH))[0]
            return device_pixels.float(), wide
        pairs = device_pixels[:, :, 1].reshape(HEIGHT, WIDTH // 2, 2).permute(2, 0, 1)
        return device_pixels[:, :, 0].float(), pairs.float().repeat_interleave(2, dim=2)

    def run() -> torch.Tensor:
        if pixel_format is PixelFormat.BGR:
            bgr = device_pixels.permute(2, 0, 1).float()
        else:
            luma, (u, v) = yuv_planes()
            y = (luma - 16).clamp_min(0) * 1.164
            u, v = u - 128, v - 128
            bgr = torch.stack([y + 2.018 * u, y - 0.391 * u - 0.813 * v, y + 1.596 * v])
            bgr = bgr.clamp(0, 255)
        small = torch.nn.functional.interpolate(
            bgr[None], size=(OUT_HEIGHT, OUT_WIDTH), mode="bilinear", align_corners=False
        )
        return (small * SCALE).half()

    times_us = []
    for _ in range(ROUNDS + 1):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(launches):
            run()
        ended.record()
        ended.synchronize()
        times_us.append(begun.elapsed_time(ended) * 1e3 / launches)
    return statistics.median(times_us[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launches", type=int, default=400)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    try:
        device = open_device()
    except Unavailable as error:
        print(f"preprocess: {error}", file=sys.stderr)
        return 1
    print(f"{device.name}, compute capability {device.compute_capability}")
    gpu = Gpu(device, arguments.launches)
    rows = {}
    for pixel_format in PixelFormat:
        row = on_gpu(gpu, pixel_format)
        row["opencv_us"] = by_opencv_us(pixel_format)
        torch_us = by_torch_us(pixel_format, arguments.launches)
        if torch_us is not None:
            row["torch_us"] = torch_us
        rows[pixel_format.value] = row
        told = "  ".join(f"{name} {value:.2f}" for name, value in row.items())
        print(f"{pixel_format.value:5} {told}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": device.name, "formats": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
