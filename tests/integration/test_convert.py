"""`edge-server convert` makes complete models of ONNX files, and says what it has lost."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.verb import run_verb

from edge_server.cli.main import run_command
from edge_server.gpu.device import Devices
from edge_server.model_config.parse import read_model_config

if TYPE_CHECKING:
    from support.simulated_gpu import SimulatedGpu

SHIPPED = Path(__file__).parents[2] / "models" / "laneDetect_model"
SHAPE = (3, 24, 32)
CLASSES = 5


def write_network(path: Path, *, batch: object = "n") -> Path:
    """Two convolutions and a linear layer, and a node that does nothing."""
    random = np.random.default_rng(3)

    def weights(name: str, *shape: int) -> Any:
        values = random.normal(0, 0.3, shape).astype(np.float32)
        return numpy_helper.from_array(values, name)

    nodes = [
        helper.make_node("Conv", ["images", "w0"], ["c0"], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c0"], ["r0"]),
        helper.make_node("Conv", ["r0", "w1"], ["c1"], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Identity", ["c1"], ["same"]),
        helper.make_node("GlobalAveragePool", ["same"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "w2"], ["scores"]),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, [batch, *SHAPE])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [batch, CLASSES])],
        [weights("w0", 8, 3, 3, 3), weights("w1", 8, 8, 3, 3), weights("w2", 8, CLASSES)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    return path


@pytest.fixture
def network(tmp_path: Path) -> Path:
    return write_network(tmp_path / "net.onnx")


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Recorded inputs: one sample with a batch dimension, others without."""
    folder = tmp_path / "recorded"
    folder.mkdir()
    random = np.random.default_rng(7)
    for index in range(3):
        sample = random.random(SHAPE, np.float32)
        array = sample[np.newaxis] if index == 0 else sample
        np.savez(folder / f"{index}.npz", **{"input.images": array})
    return folder


def convert(*arguments: object) -> int:
    return run_command(["convert", *map(str, arguments)])


def served(repository: Path) -> int:
    flags = ["--grpc-port=0", "--metrics-port=0"]
    return run_command(["check", "--model-repository", str(repository), *flags])


def run_network(path: Path, images: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {"images": images})
    return np.asarray(scores)


def operators(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


def test_half_precision_is_half_the_size_and_served_with_its_labels(
    network: Path, repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = tmp_path / "names.txt"
    labels.write_text("".join(f"class {index}\n" for index in range(CLASSES)))
    target = repository / "half"
    assert convert(network, target, "--fp16", "--simplify", "--labels", labels) == 0
    out, err = capsys.readouterr()
    assert "output scores: largest error " in out
    assert "at most" in out
    assert "onnxsim" in out
    assert "converting to FP16 …" in err
    made = target / "1" / "model.onnx"
    types = {tensor.data_type for tensor in onnx.load(made).graph.initializer}
    assert types == {TensorProto.FLOAT16}
    assert "Identity" not in operators(made)
    config = (target / "config.pbtxt").read_text()
    assert "max_batch_size: 4" in config
    assert 'label_filename: "labels.txt"' in config
    assert (target / "labels.txt").read_text() == labels.read_text()
    assert served(repository) == 0
    assert "model half version 1: READY" in capsys.readouterr().out
    # The source's labels and batch size go with it.
    assert convert(target, repository / "again", "--limit", "0") == 0
    assert (repository / "again" / "labels.txt").read_text() == labels.read_text()


def test_scheduling_and_instances_of_a_repositorys_model_are_kept(
    network: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(network, repository / "net") == 0
    config = repository / "net" / "config.pbtxt"
    for kind in ("KIND_CPU", "KIND_GPU"):
        kept = (
            "dynamic_batching {\n  max_queue_delay_microseconds: 100\n}\n"
            f"instance_group {{\n  kind: {kind}\n  count: 2\n}}\n"
        )
        config.write_text(config.read_text().partition("dynamic_batching")[0] + kept)
        made = repository / kind.lower()
        assert convert(repository / "net", made, "--fp16") == 0
        found = read_model_config(made / "config.pbtxt")
        assert found.dynamic_batching.max_queue_delay_microseconds == 100
        assert [group.count for group in found.instance_group] == [2]
    # A model for a GPU is made on a machine without one, too.
    assert ("not loaded: its instances are for a GPU" in capsys.readouterr().err) == bool(
        Devices().reason
    )


def test_int8_has_its_scales_of_recorded_inputs(
    network: Path, recorded: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--int8", "--calibration", recorded, "--compare", recorded / "0.npz")
    assert convert(network, repository / "small", *flags) == 0
    out, err = capsys.readouterr()
    assert "with 3 recorded samples" in out
    assert "4 random and 1 recorded inputs" in out
    assert "calibrating: sample 3 of 3 …" in err
    made = repository / "small" / "1" / "model.onnx"
    readers = [node for node in onnx.load(made).graph.node if node.op_type != "DequantizeLinear"]
    scaled = {
        o for n in onnx.load(made).graph.node if n.op_type.endswith("Linear") for o in n.output
    }
    quantised = {node.op_type for node in readers if set(node.input) & scaled}
    # The convolutions alone, and what passes their values on.
    assert "Conv" in quantised
    assert "MatMul" not in quantised
    zero_points = [t for t in onnx.load(made).graph.initializer if "zero_point" in t.name]
    # TensorRT takes symmetric scales only.
    assert zero_points
    assert all(not numpy_helper.to_array(t).any() for t in zero_points)
    assert served(repository) == 0


def test_a_result_that_differs_too_much_is_not_written(
    network: Path, repository: Path, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(network, repository / "half", "--fp16", "--limit", "1e-6") == 1
    out, err = capsys.readouterr()
    assert "output scores: largest error" in out
    assert "nothing is written" in err
    assert list(repository.iterdir()) == []


def test_another_version_stands_beside_the_first(
    network: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = repository / "net"
    assert convert(network, target) == 0
    assert convert(network, target) == 78
    assert "--version N adds another version" in capsys.readouterr().err
    assert convert(network, target, "--version", 2, "--fp16") == 0
    assert {path.name for path in target.iterdir()} == {"config.pbtxt", "1", "2"}
    fixed = write_network(network.with_name("fixed.onnx"), batch=1)
    assert convert(fixed, target, "--version", 3) == 78
    assert "is another than the one of version 3" in capsys.readouterr().err
    assert {path.name for path in target.iterdir()} == {"config.pbtxt", "1", "2"}


@pytest.mark.long
def test_the_printed_command_lines_do_the_same(
    network: Path, tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(network, repository / "small", "--simplify") == 0
    lines = [
        line.removeprefix("the same with: ")
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("the same with: ")
    ]
    assert lines == ["onnxsim 0.onnx model.onnx"]
    folder = tmp_path / "by_hand"
    folder.mkdir()
    (folder / "0.onnx").write_bytes(network.read_bytes())
    (line,) = lines
    tool, *words = shlex.split(line)
    subprocess.run([Path(sys.executable).with_name(tool), *words], cwd=folder, check=True)
    images = np.random.default_rng(1).random((2, *SHAPE), np.float32)
    ours = run_network(repository / "small" / "1" / "model.onnx", images)
    assert (run_network(folder / "model.onnx", images) == ours).all()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["{folder}/none.onnx"], "no such file"),
        (["{folder}"], "no model is in this directory"),
        (["{net}", "--int8"], "--calibration PATH"),
        (["{net}", "--int8", "--calibration", "{folder}/empty"], "no .npz or .npy file"),
        (["{net}", "--int8", "--fp16"], "give one of the two"),
        (["{net}", "--to", "graphdef"], "an ONNX file is not converted to that"),
        (["{folder}/bad.onnx"], "is no valid ONNX file"),
        (["{folder}/net.keras"], "tensorflow, tf2onnx: not installed here; --python FILE names"),
        (["{folder}/net.plan"], "belongs to one GPU"),
        (["{net}", "--compare", "{folder}/wrong.npz"], "has no array for input images"),
        (["{net}", "--compare", "{folder}/wide.npy"], "has shape (1, 3, 24, 33)"),
        (["{net}", "--python", "{folder}/none"], "is no Python that starts"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_remedy(
    arguments: list[str],
    expected: str,
    network: Path,
    repository: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = network.parent / "files"
    (folder / "empty").mkdir(parents=True)
    (folder / "bad.onnx").write_bytes(network.read_bytes()[:1000])
    (folder / "net.keras").touch()
    (folder / "net.plan").touch()
    np.savez(folder / "wrong.npz", other=np.zeros(1))
    np.save(folder / "wide.npy", np.zeros((3, 24, 33), np.float32))
    given = [argument.format(folder=folder, net=network) for argument in arguments]
    code = 69 if "not installed" in expected else 78
    assert convert(given[0], repository / "out", *given[1:]) == code
    assert expected in capsys.readouterr().err
    assert list(repository.iterdir()) == []


def test_a_step_that_is_killed_is_reported(
    network: Path, repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interpreter that dies in the middle, as for want of memory; asked what it has, it runs."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ -e "$0.asked" ] && kill -9 $$\n>"$0.asked"\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    assert convert(network, repository / "out", "--python", python) == 1
    assert "killed: most likely for want of memory" in capsys.readouterr().err
    assert list(repository.iterdir()) == []


def test_the_interface_of_a_text_model_is_kept(repository: Path, tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Identity", ["words"], ["same"])],
        "texts",
        [helper.make_tensor_value_info("words", TensorProto.STRING, ["n", 2])],
        [helper.make_tensor_value_info("same", TensorProto.STRING, ["n", 2])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save(model, tmp_path / "texts.onnx")
    assert convert(tmp_path / "texts.onnx", repository / "texts") == 0
    assert "data_type: TYPE_STRING dims: [ 2 ]" in (repository / "texts/config.pbtxt").read_text()
    assert served(repository) == 0


def test_python_packages_of_this_interpreter_stay_out_of_another(
    network: Path, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PYTHONPATH would bring this interpreter's numpy to another framework; its path may be
    relative."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    record = tmp_path / "environment.json"
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f'json.dump(dict(os.environ), open({str(record)!r}, "w"))\n'
        f"os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])\n"
    )
    python.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert convert(network, repository / "out", "--python", "bin/python") == 0
    assert "PYTHONPATH" not in json.loads(record.read_text())


@pytest.mark.long
def test_a_plan_is_built_and_verified_by_the_plan_verbs(
    simulated_libcuda: SimulatedGpu, repository: Path, tmp_path: Path
) -> None:
    """GPU and TensorRT are simulated; tests/integration/test_plan_rtx.py has a real builder."""
    environment = {**simulated_libcuda.environment(), "XDG_STATE_HOME": str(tmp_path / "state")}
    target = repository / "lanes"
    command = ["convert", str(SHIPPED), str(target), "--to", "plan"]
    done = run_verb(*command, env=environment)
    assert done.returncode == 0, done.stderr
    assert "predict_lanes agrees" in done.stdout
    assert 'platform: "tensorrt_plan"' in (target / "config.pbtxt").read_text()
    names = {path.name for path in (target / "1").iterdir()}
    assert {"model.onnx", "model.plan"} <= names
