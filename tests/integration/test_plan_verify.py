"""`edge-server plan verify` runs a plan as it would serve, beside its ONNX file.

GPU and TensorRT are simulated; the processes, the loader and ONNX Runtime are real.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.verb import run_verb

from edge_server.backends.tensorrt.plan_options import sha256_of, side_car_path

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from support.simulated_gpu import SimulatedGpu

    Edge = Callable[..., subprocess.CompletedProcess[str]]

MODEL = Path(__file__).parents[2] / "models" / "laneDetect_model"
# What is added to one of the network's weights, of a plan that went wrong.
OTHER_BIAS = 3.0


@pytest.fixture
def edge(simulated_libcuda: SimulatedGpu, tmp_path: Path) -> Edge:
    """Runs `edge-server plan …` on the shipped network, copied."""
    shutil.copytree(MODEL, tmp_path / "models" / MODEL.name)
    environment = {**simulated_libcuda.environment(), "XDG_STATE_HOME": str(tmp_path / "state")}

    def run(verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        repository = f"--model-repository={tmp_path / 'models'}"
        command = ["plan", verb, arguments[0] if arguments else MODEL.name, repository]
        return run_verb(*command, *arguments[1:], env=environment)

    return run


@pytest.fixture
def plan(edge: Edge, tmp_path: Path) -> Path:
    done = edge("build")
    assert done.returncode == 0, done.stderr
    return tmp_path / "models" / MODEL.name / "1" / "model.plan"


def test_a_plan_of_the_shipped_network_agrees(edge: Edge, plan: Path) -> None:
    # The plan is that of its preferred configuration, in FP16.
    done = edge("verify")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("random ") for line in lines)
    assert all(": predict_lanes agrees: off by up to " in line for line in lines)


def test_a_plan_in_int8_is_verified_beside_the_file_that_it_was_built_of(edge: Edge) -> None:
    done = edge("build", MODEL.name, "--int8")
    assert done.returncode == 0, done.stderr
    assert "parsing model_int8.onnx …" in done.stderr
    assert "here       runs" in edge("inspect").stdout
    done = edge("verify", MODEL.name, "--samples=1")
    assert done.returncode == 0, done.stderr
    assert "predict_lanes agrees" in done.stdout


def test_a_mere_onnx_file_is_verified_too(edge: Edge, plan: Path) -> None:
    done = edge("verify", str(plan.with_suffix(".onnx")), "--samples=1")
    assert done.returncode == 0, done.stderr
    assert "predict_lanes agrees" in done.stdout


def test_a_plan_of_other_weights_differs(
    edge: Edge, plan: Path, wrong_plan: Callable[[Path], None]
) -> None:
    wrong_plan(plan)
    done = edge("verify", MODEL.name, "--samples=1")
    assert done.returncode == 1, done.stderr
    assert "random 1: predict_lanes differs: off by up to " in done.stdout


@pytest.fixture
def wrong_plan() -> Callable[[Path], None]:
    """Changes the weights in a plan, which its side-car then vouches for."""
    import onnx
    from onnx import numpy_helper

    def change(plan: Path) -> None:
        model = onnx.load(plan.with_suffix(".onnx"))
        network = model.SerializeToString()
        at = plan.read_bytes().find(plan.with_suffix(".onnx").read_bytes())
        head = plan.read_bytes()[:at]
        weights = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
        last = weights[-1]
        values = numpy_helper.to_array(last)
        last.CopyFrom(numpy_helper.from_array(values + values.dtype.type(OTHER_BIAS), last.name))
        assert model.SerializeToString() != network
        plan.write_bytes(head + model.SerializeToString())
        path = side_car_path(plan)
        said = json.loads(path.read_text())
        path.write_text(json.dumps({**said, "plan_sha256": sha256_of(plan)}))

    return change
