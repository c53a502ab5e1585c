"""`scripts/gpu_check` says where it cannot run, and does not take a GPU's word for its numbers.

The GPU is simulated, and its kernels do nothing at all here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import SimulatedGpu

ROOT = Path(__file__).parents[2]
GPU_CHECK = ROOT / "scripts/gpu_check"
PATIENCE_S = 120.0


def gpu_check(
    environment: dict[str, str], *arguments: str, python: Path | str = sys.executable
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [GPU_CHECK, "--no-venv", *arguments],
        env={**environment, "PYTHON": str(python)},
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


def test_a_module_that_is_missing_is_told_by_its_package(
    simulated_libcuda: SimulatedGpu, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$2" = "import cv2" ] && exit 1\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = gpu_check(simulated_libcuda.environment("compute=87"), python=python)
    assert done.returncode == 1
    assert "has no cv2; on a Jetson: apt install python3-opencv, elsewhere: pip " in done.stderr


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


def tensorrt_section(environment: dict[str, str], tmp_path: Path) -> dict[str, Any]:
    done = gpu_check(environment, "--quick", "--output", str(tmp_path), "--only", "tensorrt")
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.json")
    section: dict[str, Any] = json.loads(path.read_text())["sections"]["tensorrt"]
    return section


@pytest.mark.parametrize(("settings", "is_right"), [("", True), ("off=100", False)])
def test_a_plan_is_compared_with_onnx_runtime(
    simulated_libcuda: SimulatedGpu,
    kernels_on_cpu: Path,
    tmp_path: Path,
    settings: str,
    is_right: bool,
) -> None:
    environment = {
        **simulated_libcuda.environment("compute=90,integrated=0"),
        "EDGE_SIMULATED_KERNELS": str(kernels_on_cpu),
        "EDGE_SIMULATED_TENSORRT": settings,
    }
    section = tensorrt_section(environment, tmp_path)
    assert section["notes"][0].startswith("the tests' simulation of TensorRT")
    assert [row["largest_error"] for row in section["rows"]] == pytest.approx(
        [0.0 if is_right else 100.0] * 4, abs=1e-2
    )
    numbers = {goal["met"] for goal in section["goals"] if " within " in goal["goal"]}
    others = {goal["met"] for goal in section["goals"] if " within " not in goal["goal"]}
    assert numbers == {is_right}
    # Copies and graphs are as they were.
    assert others == {True}


def test_a_tensorrt_that_refuses_is_quoted(simulated_libcuda: SimulatedGpu, tmp_path: Path) -> None:
    environment = {
        **simulated_libcuda.environment("compute=90,integrated=0"),
        "EDGE_SIMULATED_TENSORRT": "fail=build",
    }
    section = tensorrt_section(environment, tmp_path)
    refused = "TensorRT 10.3.0.30 built nothing: Error Code 10: Internal Error"
    assert f"the shipped network, FP32: {refused}" in section["text"]
    assert {goal["met"] for goal in section["goals"]} == {False}


@pytest.mark.skipif(
    any(map(importlib.util.find_spec, ("tensorrt", "tensorrt_rtx_bindings"))),
    reason="there is a TensorRT here",
)
def test_without_any_tensorrt_the_section_says_so(
    simulated_libcuda: SimulatedGpu, tmp_path: Path
) -> None:
    # The script itself stands in for pycuda, and for nothing that is not there.
    environment = {
        **simulated_libcuda.environment("compute=90,integrated=0"),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    section = tensorrt_section(environment, tmp_path)
    assert section["outcome"] == "not possible here"
    assert "neither TensorRT nor TensorRT-RTX can be imported" in section["text"]
