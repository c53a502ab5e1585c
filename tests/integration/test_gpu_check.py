"""`scripts/gpu_check` says where it cannot run, and does not take a GPU's word for its numbers.

The GPU is simulated, and its kernels do nothing at all here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.conftest import SimulatedGpu

GPU_CHECK = Path(__file__).parents[2] / "scripts/gpu_check"
PATIENCE_S = 120.0


def gpu_check(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [GPU_CHECK, "--no-venv", *arguments],
        env={**environment, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_without_a_gpu_it_says_so() -> None:
    # Nobody finds a driver there.
    done = gpu_check({**os.environ, "CUDA_VISIBLE_DEVICES": "none"})
    assert done.returncode == 69
    assert done.stderr.startswith("gpu_check: no CUDA d")


def test_kernels_that_do_nothing_are_found_out(
    simulated_libcuda: SimulatedGpu, tmp_path: Path
) -> None:
    environment = simulated_libcuda.environment("compute=90,integrated=0")
    sections = ["--only", "kernels", "--only", "frame to lanes"]
    done = gpu_check(environment, "--quick", "--output", str(tmp_path), *sections)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("simulated-gpu-0-*-quick.json")
    report = json.loads(path.read_text())
    assert report["machine"]["sm"] == "90"
    assert report["machine"]["binding"] == "pycuda stand-in, tests/simulated_gpu over ctypes"
    goals = {goal["goal"]: goal["met"] for goal in report["goals"]}
    assert goals == {
        "as OpenCV, within 1/255": False,
        "a copy on the device: no copy between preprocessing and decoding": True,
        "a copy on the device: lanes within 1 px of those by the host": False,
    }
    (row,) = report["sections"]["frame to lanes"]["rows"]
    assert row["copies_per_frame"] == {"lane_preprocess to_device": 1.0, "lane_decode to_host": 1.0}
    assert "NOT MET       as OpenCV" in path.with_suffix(".txt").read_text()
