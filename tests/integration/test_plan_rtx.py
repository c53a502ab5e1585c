"""The shipped network goes through our builder with NVIDIA's real parser and a real builder.

TensorRT-RTX's, which need no GPU, stand in under the name of TensorRT (tests/rtx_as_tensorrt).
Their plans run on no Jetson; what is seen is that the ONNX file parses, that our text drives the
real classes to the end, and that names, types and shapes are those of the configuration.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import pytest
from onnx import TensorProto, helper
from support.verb import run_verb

from edge_server import errors
from edge_server.backends.tensorrt import plan_process
from edge_server.backends.tensorrt.plan_options import (
    BuildOptions,
    GivenShapes,
    Range,
    build_options_of,
    read_side_car,
    sha256_of,
)
from edge_server.backends.tensorrt.plan_process import BuildJob, Progressed
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.parse import read_model_config

if TYPE_CHECKING:
    from edge_server.backends.tensorrt.plan_process import BuildEvent, PlanBuilt

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "laneDetect_model"
AS_TENSORRT = ROOT / "tests" / "rtx_as_tensorrt"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_bindings") is None,
    reason="TensorRT-RTX is not here: pip install 'edge-server[tensorrt-tests]'; there is none for "
    "this platform where that cannot be done",
)


@pytest.fixture(autouse=True)
def real_builder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    paths = [str(ROOT), str(AS_TENSORRT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def write_network(path: Path, shape: list[Any], datatype: int = TensorProto.FLOAT) -> Path:
    """A convolution of `x`, giving `y`."""
    weights = helper.make_tensor("w", datatype, [8, 3, 3, 3], [0.01] * 216)
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])],
        "net",
        [helper.make_tensor_value_info("x", datatype, shape)],
        [helper.make_tensor_value_info("y", datatype, [shape[0], 8, *shape[2:]])],
        [weights],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save(model, path)
    return path


def build(path: Path, wish: BuildOptions, events: list[BuildEvent] | None = None) -> PlanBuilt:
    job = BuildJob(str(path), str(path.with_suffix(".plan")), wish, str(path.parent / "timing"))
    return plan_process.build(job, (events if events is not None else []).append)


def test_the_shipped_network_has_the_tensors_that_its_configuration_says(tmp_path: Path) -> None:
    config = ModelConfig.of(read_model_config(MODEL / "config.pbtxt"))
    onnx_path = tmp_path / "model.onnx"
    shutil.copyfile(MODEL / "1" / "model.onnx", onnx_path)
    events: list[BuildEvent] = []
    built = build(onnx_path, build_options_of(config), events)
    # It was exported for a batch of exactly 1, which is its `max_batch_size`.
    assert config.max_batch_size == 1
    expected = {
        (spec.name, spec.datatype.value, (1, *spec.shape), is_input)
        for specs, is_input in ((config.inputs, True), (config.outputs, False))
        for spec in specs
    }
    assert {(t.name, t.datatype, t.shape, t.is_input) for t in built.tensors} == expected
    assert built.profiles == ()
    assert onnx_path.with_suffix(".plan").stat().st_size > 1 << 20
    fractions = [event.fraction for event in events if isinstance(event, Progressed)]
    assert fractions == sorted(fractions)
    assert fractions


def test_a_batching_network_gets_its_profile_from_the_configuration(tmp_path: Path) -> None:
    path = write_network(tmp_path / "net.onnx", ["n", 3, 32, 32])
    built = build(path, BuildOptions(max_batch_size=4, dims={"x": (-1, 3, 32, 32)}))
    most = (4, 3, 32, 32)
    assert built.profiles == ({"x": Range((1, 3, 32, 32), most, most)},)
    assert built.tensors[0].shape == (-1, 3, 32, 32)


def test_several_profiles_are_taken(tmp_path: Path) -> None:
    path = write_network(tmp_path / "net.onnx", ["n", 3, "h", "w"])
    small, large = (1, 3, 32, 32), (2, 3, 64, 64)
    given = (GivenShapes({}, {"x": small}, {}), GivenShapes({"x": small}, {}, {"x": large}))
    assert build(path, BuildOptions(profiles=given)).profiles == (
        {"x": Range(small, small, small)},
        {"x": Range(small, large, large)},
    )


def test_an_fp16_typed_file_keeps_its_types(tmp_path: Path) -> None:
    path = write_network(tmp_path / "net.onnx", [1, 3, 32, 32], TensorProto.FLOAT16)
    built = build(path, BuildOptions())
    assert built.precision == "as the ONNX file"
    assert {tensor.datatype for tensor in built.tensors} == {"FP16"}


def test_a_quantised_file_is_int8_as_it_says(tmp_path: Path) -> None:
    path = write_network(tmp_path / "net.onnx", [1, 3, 32, 32])
    with pytest.raises(errors.InvalidRequest, match="INT8 needs the range of every tensor"):
        build(path, BuildOptions("int8"))
    model = onnx.load(path)
    model.graph.initializer.extend(
        [
            helper.make_tensor("scale", TensorProto.FLOAT, [], [0.05]),
            helper.make_tensor("zero", TensorProto.INT8, [], [0]),
        ]
    )
    for name in ("x", "w"):
        quantise = helper.make_node("QuantizeLinear", [name, "scale", "zero"], [f"{name}q"])
        back = helper.make_node("DequantizeLinear", [f"{name}q", "scale", "zero"], [f"{name}d"])
        model.graph.node.insert(0, back)
        model.graph.node.insert(0, quantise)
    model.graph.node[-1].input[:] = ["xd", "wd"]
    onnx.save(model, path)
    assert build(path, BuildOptions("int8")).precision == "as the ONNX file"


def test_what_the_real_parser_says_is_told(tmp_path: Path) -> None:
    path = write_network(tmp_path / "net.onnx", [1, 3, 32, 32])
    model = onnx.load(path)
    model.graph.node[0].op_type = "DesiredModel"
    onnx.save(model, path)
    with pytest.raises(
        errors.ModelConfigError, match=r"net\.onnx: TensorRT 11\.4\.0 cannot read"
    ) as caught:
        build(path, BuildOptions())
    assert "(DesiredModel): " in str(caught.value)
    path.write_bytes(b"no network")
    with pytest.raises(errors.ModelConfigError, match="Failed to parse the ONNX model"):
        build(path, BuildOptions())


def test_the_verbs_build_and_inspect_and_say_what_verify_lacks(tmp_path: Path) -> None:
    models = tmp_path / "models"
    shutil.copytree(MODEL, models / MODEL.name)
    here = [MODEL.name, "--model-repository", str(models)]
    done = _run("build", *here)
    assert done.returncode == 0, done.stderr
    assert "the same with: trtexec --onnx=" in done.stdout
    # TensorRT-RTX, as TensorRT 11, has the types of the ONNX file alone.
    assert "parsing model_fp16.onnx …\nbuilding …\n" in done.stderr
    plan = models / MODEL.name / "1" / "model.plan"
    side_car = read_side_car(plan)
    assert side_car is not None
    assert side_car.plan_sha256 == sha256_of(plan)
    assert side_car.onnx_sha256 == sha256_of(MODEL / "1" / "model_fp16.onnx")

    shown = _run("inspect", *here)
    assert shown.returncode == 0, shown.stderr
    assert "input      input: FP32 [1,3,360,640]" in shown.stdout
    assert "does not run: no CUDA driver" in shown.stdout
    assert json.loads(_run("inspect", *here, "--json").stdout)["plan_sha256"] == sha256_of(plan)
    layers = _run("inspect", *here, "--layers")
    assert layers.returncode == 69
    assert "the layers are read by TensorRT, on the device: no CUDA driver" in layers.stderr

    verified = _run("verify", *here)
    assert verified.returncode == 69
    assert "verify runs the plan, which takes its device: no CUDA driver" in verified.stderr

    before = plan.read_bytes()
    (models / MODEL.name / "1" / "model_fp16.onnx").unlink()
    refused = _run("build", *here)
    assert refused.returncode == 78
    assert "takes no --fp16: give an ONNX file that is FP16-typed" in refused.stderr
    assert plan.read_bytes() == before
    # The shipped network in INT8, asked for by its configuration.
    settings = tmp_path / "config.toml"
    settings.write_text('[repository]\nconfig_name = "int8"\n')
    done = _run("build", *here, "--config", str(settings))
    assert done.returncode == 0, done.stderr
    assert "parsing model_int8.onnx …\nbuilding …\n" in done.stderr


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    path = write_network(tmp_path / "net.onnx", [1, 3, 32, 32])
    ours, theirs = pty.openpty()
    done = _run("build", str(path), stderr=theirs)
    os.close(theirs)
    assert done.returncode == 0
    shown = b""
    with suppress(OSError):  # how a terminal says that it has no more
        while more := os.read(ours, 1 << 16):
            shown += more
    os.close(ours)
    assert b"parsing net.onnx" in shown
    assert shown.endswith(b"\x1b[2K")  # and it is taken away at the end


def test_the_plain_script_builds_too(tmp_path: Path) -> None:
    path = write_network(tmp_path / "net.onnx", ["n", 3, 32, 32])
    plan = tmp_path / "net.plan"
    command = [sys.executable, str(ROOT / "scripts" / "onnx_to_plan.py"), str(path), str(plan)]
    shapes = ["--shape", "x", "1x3x32x32", "4x3x32x32"]
    done = subprocess.run([*command, *shapes], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert plan.stat().st_size > 0
    refused = subprocess.run([*command, "--fp16"], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "TensorRT 11 takes no --fp16" in refused.stderr


def _run(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return run_verb("plan", *arguments, **more)
