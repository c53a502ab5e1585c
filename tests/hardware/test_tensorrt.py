"""Plans are built, verified and served on a real GPU, by TensorRT or by TensorRT-RTX.

Without either every test here is skipped. What a plan answers is held against ONNX Runtime on the
CPU, by programs that people start.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.gpu.device import Device

    Run = Callable[..., subprocess.CompletedProcess[str]]

TIMEOUT_S = 900

pytestmark = [pytest.mark.hardware, pytest.mark.timeout(TIMEOUT_S)]

ROOT = Path(__file__).parents[2]
NETWORK = "laneDetect_model"


@pytest.fixture
def run(device: Device, tmp_path: Path) -> Run:
    """Runs a Python program that finds TensorRT, or TensorRT-RTX in its place."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if importlib.util.find_spec("tensorrt") is None:
        if importlib.util.find_spec("tensorrt_rtx_bindings") is None:
            pytest.skip("neither TensorRT nor TensorRT-RTX is here")
        import tensorrt_rtx_bindings as rtx

        chip = "SM{}{}".format(*device.compute_capability)
        if chip not in rtx.ComputeCapability.__members__:
            pytest.skip(f"TensorRT-RTX {rtx.__version__} has no {chip}")
        paths.insert(0, str(ROOT / "tests" / "rtx_as_tensorrt"))
    if importlib.util.find_spec("onnxruntime") is None:
        pytest.skip("onnxruntime is not here: nothing says what is right")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }

    def start(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    return start


def test_the_plan_of_the_shipped_network_is_built_and_verified(run: Run, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "models" / NETWORK, tmp_path / NETWORK)
    for verb in ("build", "verify"):
        done = run("-m", "edge_server", "plan", verb, NETWORK, f"--model-repository={tmp_path}")
        assert done.returncode == 0, done.stdout + done.stderr
    assert "predict_lanes agrees" in done.stdout


def test_plans_answer_as_they_should_however_they_are_asked(run: Run, tmp_path: Path) -> None:
    """With and without CUDA graphs, from the host and on the GPU, in two profiles."""
    found = tmp_path / "found.json"
    done = run("benchmarks/gpu_tensorrt.py", "--quick", "--json", found)
    assert done.returncode == 0, done.stderr
    report = json.loads(found.read_text())
    # Where a lane is may turn on rounding (TF32, FP16): the report tells that, no test.
    goals = [goal for goal in report["goals"] if "lanes within" not in goal["goal"]]
    missed = [goal for goal in goals if not goal["met"]]
    assert not missed, report["notes"]
    assert report["rows"]
