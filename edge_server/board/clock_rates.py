"""Current and maximum clock rates of CPU and GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_server.board.kernel_files import listed, read_number

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class ClockRate:
    """The rate of one engine; the kernel varies it with the load between `lowest_hz` and
    `highest_hz`."""

    engine: str
    now_hz: int
    lowest_hz: int | None = None
    highest_hz: int | None = None


def read_clock_rates(root: Path) -> tuple[ClockRate, ...]:
    """Read the rates of each CPU cluster and the GPU of the board below `root`."""
    rates = []
    for policy in listed(root / "sys/devices/system/cpu/cpufreq", "policy*"):
        khz = [read_number(policy / f"scaling_{name}_freq") for name in ("cur", "min", "max")]
        hz = [None if each is None else each * 1000 for each in khz]
        if hz[0] is not None:
            rates.append(ClockRate(f"cpu {policy.name.removeprefix('policy')}", hz[0], *hz[1:]))
    # 17000000.gpu on JetPack 6, 17000000.ga10b on 5; on others unverified.
    for pattern in ("*.gpu", "*.ga10b", "gpu-gpc-*"):
        for device in listed(root / "sys/class/devfreq", pattern):
            hz = [read_number(device / f"{name}_freq") for name in ("cur", "min", "max")]
            if hz[0] is not None:
                rates.append(ClockRate("gpu", hz[0], *hz[1:]))
    return tuple(rates)
