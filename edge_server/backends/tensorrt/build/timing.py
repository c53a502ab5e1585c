"""TensorRT's timing cache: with its measurements, the next build of the same layers is quick."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.process.disk import atomic_write

if TYPE_CHECKING:
    import tensorrt as trt

    from edge_server.backends.tensorrt.build.facts import DeviceFacts

_NONE = Path()


def timing_path(folder: Path, facts: DeviceFacts) -> Path:
    """Return the cache's path; measurements are valid for one TensorRT, GPU and Jetson Linux."""
    parts = (facts.tensorrt, facts.gpu, facts.sm, str(facts.multiprocessors), facts.l4t)
    name = "-".join(part for part in parts if part)
    return folder / f"{re.sub('[^A-Za-z0-9._-]+', '_', name)}.timing"


def read_timings(config: trt.IBuilderConfig, folder: Path, facts: DeviceFacts) -> None:
    """Give `config` the earlier measurements; TensorRT repeats those that do not fit."""
    if folder == _NONE:
        return
    try:
        data = timing_path(folder, facts).read_bytes()
    except OSError:
        data = b""
    cache: trt.ITimingCache | None = config.create_timing_cache(data)
    if cache is None or not config.set_timing_cache(cache, False):
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)


def write_timings(config: trt.IBuilderConfig, folder: Path, facts: DeviceFacts) -> None:
    """Store the measurements; a full disk costs only the next build's time."""
    cache: trt.ITimingCache | None = None if folder == _NONE else config.get_timing_cache()
    if cache is None:
        return
    data: trt.IHostMemory = cache.serialize()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(timing_path(folder, facts), bytes(data))
    except OSError:
        return
