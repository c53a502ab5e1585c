"""Opening a GPU, its primary context, and what becomes of its errors."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.simulated_gpu import SimulatedGpu

SAY_REASON = "from edge_server.gpu.device import Devices; print(Devices().reason)"


def reason(environment: dict[str, str]) -> str:
    """What a process of its own says of its GPUs."""
    command = [sys.executable, "-W", "error", "-c", SAY_REASON]
    return subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_without_a_driver_the_reason_is_told(simulated_libcuda: SimulatedGpu) -> None:
    environment = simulated_libcuda.environment()
    del environment["LD_LIBRARY_PATH"]
    assert reason(environment) == (
        "no CUDA driver: libcuda.so.1 is not on this machine; install NVIDIA's driver "
        "(on a Jetson: apt install nvidia-l4t-cuda)"
    )
