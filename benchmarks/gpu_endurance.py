"""Minutes of four cameras leave device memory as it was; what is freed keeps no thread waiting.

    python benchmarks/gpu_endurance.py [--quick] [--json FILE]

First the longest time in which no other Python thread ran while device memory, graphs and the
shipped models were freed. Then four rendered cameras at the shipped models, each with a thread of
its own; device memory is read each second: this process's where nvidia-smi tells it, else what of
the device is not free. The network is a plan that is built first where TensorRT is here; else it
runs on the CPU. Exits 69 where there is no GPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gpu_chain import MODELS
from gpu_section import run_section
from gpu_tensorrt import serving, with_plan

from edge_server.cameras.colour import bgr_of
from edge_server.cameras.source import open_source
from edge_server.gpu.memory import DeviceMemory
from edge_server.gpu.stream import Stream, record_graph
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge_server.gpu.device import Device, Devices
    from edge_server.inference.registry import Snapshot

MOST_GAP_MS = 20.0
CAMERAS = 4
MIB = 1 << 20
# Until pools and libraries have what they need, and what the driver may round.
WARM_UP_S, SECONDS_S = 20.0, 300.0
MOST_GROWTH_BYTES = 2 * MIB


def main() -> int:
    return run_section("gpu_endurance", __doc__, report)


def report(devices: Devices, quick: bool) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="edge-server-") as folder:
        repository, network = MODELS, "the network on the CPU"
        if importlib.util.find_spec("tensorrt") is not None:
            repository, network = Path(folder), "the network as a plan"
            with_plan(repository, "fp16")
        for found in _tried(devices, repository, quick=quick):
            yield {**found, "notes": [network]}


def _tried(devices: Devices, repository: Path, *, quick: bool) -> Iterator[dict[str, Any]]:
    device = devices.gpu()
    gaps = {
        "device memory and graphs": longest_gap_ms(lambda: _free_memory(device, quick=quick)),
    }
    with ExitStack() as models:
        models.enter_context(serving(devices, repository))
        gaps["the shipped models"] = longest_gap_ms(models.close)
    rows: list[dict[str, Any]] = [{"freed": what, "gap_ms": ms} for what, ms in gaps.items()]
    goals = [
        {
            "goal": f"no thread waits {MOST_GAP_MS:g} ms while {what} are freed",
            "reached": ms,
            "met": ms < MOST_GAP_MS,
        }
        for what, ms in gaps.items()
    ]
    print(
        "\n".join(f"{what}: no other thread ran for up to {ms:.1f} ms" for what, ms in gaps.items())
    )
    yield {"rows": rows, "goals": goals}
    warm_up_s, seconds_s = (1.0, 2.0) if quick else (WARM_UP_S, SECONDS_S)
    with serving(devices, repository) as snapshot:
        for row in cameras(device, snapshot, warm_up_s, seconds_s):
            goal = {
                "goal": f"{CAMERAS} cameras for {row['seconds']:.0f} s leave device memory as it "
                f"was, to {MOST_GROWTH_BYTES // MIB} MiB",
                "reached": row["growth_bytes"],
                "met": row["growth_bytes"] <= MOST_GROWTH_BYTES and row["frames"] > 0,
            }
            yield {"rows": [*rows, row], "goals": [*goals, goal]}
    print(
        f"{CAMERAS} cameras: {row['frames']} frames in {row['seconds']:.0f} s, "
        f"{row['growth_bytes']} bytes more of device memory at most"
    )


def longest_gap_ms(work: Callable[[], None]) -> float:
    """The longest time between two looks of a thread at the clock during `work`."""
    worst_s, ended = 0.0, threading.Event()
    begun = threading.Event()

    def look() -> None:
        nonlocal worst_s
        last_s = time.perf_counter()
        begun.set()
        while not ended.is_set():
            now_s = time.perf_counter()
            worst_s = max(worst_s, now_s - last_s)
            last_s = now_s
            time.sleep(0.0005)

    thread = threading.Thread(target=look)
    thread.start()
    begun.wait()
    try:
        work()
    finally:
        ended.set()
        thread.join()
    return 1e3 * worst_s


def _free_memory(device: Device, *, quick: bool) -> None:
    """Drop memory and graphs while the GPU is busy: the driver frees once it is idle."""
    stream = Stream(device)
    busy = DeviceMemory(device, (1 if quick else 256) * MIB)
    for _ in range(2 if quick else 20):
        kept: list[object] = [DeviceMemory(device, MIB) for _ in range(16)]
        kept.append(record_graph(stream, lambda: stream.fill(busy, 1)))
        for _ in range(1 if quick else 50):
            stream.fill(busy, 2)
        kept.clear()
    stream.synchronize()


def cameras(
    device: Device, snapshot: Snapshot, warm_up_s: float, seconds_s: float
) -> Iterator[dict[str, Any]]:
    """Frames of all cameras and how much more device memory they had at most than at first; as
    far as it has come each minute, and at the end."""
    counts = [0] * CAMERAS
    ended = threading.Event()
    with _threads([lambda n=n: _follow(snapshot, n, counts, ended) for n in range(CAMERAS)], ended):
        warm_s = time.monotonic() + warm_up_s
        while not ended.is_set() and (time.monotonic() < warm_s or min(counts) < 5):
            time.sleep(0.1)
        before, first = sum(counts), used_bytes(device)
        most, begun_s = first, time.monotonic()
        passed_s = told_s = 0.0
        while passed_s < seconds_s:
            time.sleep(min(1.0, seconds_s / 2))
            most = max(most, used_bytes(device))
            passed_s = time.monotonic() - begun_s
            if passed_s - told_s >= 60.0 or passed_s >= seconds_s:
                told_s = passed_s
                yield {
                    "cameras": CAMERAS,
                    "seconds": passed_s,
                    "frames": sum(counts) - before,
                    "used_bytes": first,
                    "growth_bytes": most - first,
                }


def _follow(snapshot: Snapshot, number: int, counts: list[int], ended: threading.Event) -> None:
    source = open_source(f"synthetic://road?seed={number}&fps=15")
    try:
        while not ended.is_set():
            frame = Tensor(bgr_of(source.read().image)[np.newaxis])
            snapshot.infer(InferRequest("lane_detection", {"image": frame}))
            counts[number] += 1
    finally:
        # One that fails ends them all.
        ended.set()
        source.close()


@contextmanager
def _threads(work: list[Callable[[], None]], ended: threading.Event) -> Iterator[None]:
    threads = [threading.Thread(target=each) for each in work]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def used_bytes(device: Device) -> int:
    """Of this process, where nvidia-smi tells it: others may use the GPU. Else of the device."""
    if smi := shutil.which("nvidia-smi"):
        asked = [smi, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        told = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
        for line in told.splitlines():
            pid, _, mib = line.partition(",")
            if pid.strip() == str(os.getpid()) and mib.strip().isdecimal():
                return int(mib) * MIB
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    device.call("read its memory", "cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return total.value - free.value


if __name__ == "__main__":
    sys.exit(main())
