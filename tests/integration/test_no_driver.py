"""Opening a GPU, its primary context, and what becomes of its errors."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

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


def test_without_pycuda_the_reason_is_told(simulated_libcuda: SimulatedGpu, tmp_path: Path) -> None:
    (tmp_path / "pycuda.py").write_text("raise ModuleNotFoundError(name='pycuda')")
    environment = simulated_libcuda.environment()
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    assert reason(environment) == (
        "no pycuda: the CUDA driver is here, Python's way to it is not; "
        "build it with scripts/install_pycuda"
    )


def test_a_pycuda_for_another_driver_is_told(
    simulated_libcuda: SimulatedGpu, tmp_path: Path
) -> None:
    (tmp_path / "pycuda").mkdir()
    (tmp_path / "pycuda/__init__.py").touch()
    (tmp_path / "pycuda/driver.py").write_text(
        "import warnings\n"
        "warnings.warn('the version of your CUDA header does not match')\n"
        "raise ImportError('undefined symbol: cuCtxCreate_v4')"
    )
    environment = simulated_libcuda.environment("driver=12060")
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    assert reason(environment) == (
        "pycuda does not fit this driver (CUDA 12.6): undefined symbol: cuCtxCreate_v4; "
        "build it with scripts/install_pycuda"
    )
