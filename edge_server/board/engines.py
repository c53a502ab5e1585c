"""Load and clock of the CPU clusters, the GPU and the NVDLA cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_server.board.kernel_files import listed, read_number, read_text

if TYPE_CHECKING:
    from pathlib import Path

# 17000000.gpu on JetPack 6 and on Orin with JetPack 7.2, 17000000.ga10b on 5, gpu-gpc-0 on Thor.
_GPUS = ("*.gpu", "*.ga10b", "gpu-gpc-*")
# Where a kernel has no such devfreq device; the last one is JetPack 5's.
_GPU_LOADS = (
    "sys/devices/platform/bus@0/*.gpu/load",
    "sys/devices/platform/*gpu*/load",
    "sys/devices/gpu.*/load",
)
_NVDLA_DEVICES = (
    "sys/devices/platform/bus@0/*.host1x/*.nvdla*",
    "sys/devices/platform/*.host1x/*.nvdla*",
    "sys/devices/platform/host1x/*.nvdla*",
)


@dataclass(frozen=True)
class BoardEngine:
    """One engine; None where the kernel does not report the fact.

    Attributes:
        name: `cpu 0` is the cluster of core 0; `gpu`, `nvdla0`.
        load: share of busy time in the kernel's last interval, 0..1.
        now_hz: the kernel varies it with the load between `lowest_hz` and `highest_hz`.
        powered: the kernel has the engine switched on, which only NVDLA cores report.
    """

    name: str
    load: float | None = None
    now_hz: int | None = None
    lowest_hz: int | None = None
    highest_hz: int | None = None
    powered: bool | None = None


def read_engines(root: Path) -> tuple[BoardEngine, ...]:
    """Read the engines of the board below `root`."""
    engines = []
    for policy in listed(root / "sys/devices/system/cpu/cpufreq", "policy*"):
        khz = (read_number(policy / f"scaling_{name}_freq") for name in ("cur", "min", "max"))
        now, lowest, highest = (None if each is None else each * 1000 for each in khz)
        if now is not None:
            name = f"cpu {policy.name.removeprefix('policy')}"
            engines.append(BoardEngine(name, None, now, lowest, highest))
    if (gpu := _gpu(root)) is not None:
        engines.append(gpu)
    return (*engines, *_nvdla(root))


def _gpu(root: Path) -> BoardEngine | None:
    devices = (device for each in _GPUS for device in listed(root / "sys/class/devfreq", each))
    device = next(devices, None)
    loads = [path for pattern in _GPU_LOADS for path in listed(root, pattern)]
    if device is not None:
        loads.insert(0, device / "device/load")
    load = next((found for each in loads if (found := _load(each)) is not None), None)
    hz = (None, None, None) if device is None else _devfreq(device)
    return None if load is None and hz[0] is None else BoardEngine("gpu", load, *hz)


def _nvdla(root: Path) -> list[BoardEngine]:
    """Return the NVDLA cores. That they report a load, and their clock, is not confirmed on a
    board."""
    engines: dict[str, BoardEngine] = {}
    for pattern in _NVDLA_DEVICES:
        for device in listed(root, pattern):
            name = device.name.rpartition(".")[2]
            status = read_text(device / "power/runtime_status")
            hz = _devfreq(root / "sys/class/devfreq" / device.name)
            load = _load(device / "load")
            if name not in engines and (status is not None or hz[0] is not None):
                powered = None if status is None else status == "active"
                engines[name] = BoardEngine(name, load, *hz, powered)
    return [engines[name] for name in sorted(engines)]


def _devfreq(device: Path) -> tuple[int | None, int | None, int | None]:
    now, lowest, highest = (read_number(device / f"{each}_freq") for each in ("cur", "min", "max"))
    return now, lowest, highest


def _load(path: Path) -> float | None:
    """Return the share of busy time; NVIDIA's drivers report it in thousandths."""
    thousandths = read_number(path)
    if thousandths is None or not 0 <= thousandths <= 1000:
        return None
    return thousandths / 1000
