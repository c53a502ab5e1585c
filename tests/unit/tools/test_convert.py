"""What is converted to what, how far the result may be off, and what is written of it."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import InternalError, InvalidRequest, ModelConfigError, Unavailable
from edge_server.model_config.parse import read_model_config
from edge_server.tools.convert.conversion import LIMITS, compare
from edge_server.tools.convert.formats import (
    DESTINATIONS,
    ONNX,
    SIMPLIFIER,
    SOURCES,
    TENSORFLOW,
    interpreter_having,
    read_source,
    source_format,
    write_model,
)
from edge_server.tools.convert.steps import step as samples

if TYPE_CHECKING:
    from pathlib import Path


def write(folder: Path, which: str, *arrays: Any) -> None:
    for index, array in enumerate(arrays):
        np.savez(folder / f"{which}-{index}.npz", **{"array.y": np.asarray(array)})


@pytest.mark.parametrize(
    ("source", "result", "agrees"),
    [
        ([1.0, -4.0], [1.0, -4.0], True),
        ([1.0, -4.0], [1.0003, -4.0], True),
        ([1.0, -4.0], [1.0005, -4.0], False),
        ([0.0, 0.0], [0.0, 1e-9], False),
        ([np.nan, 1.0], [np.nan, 1.0], True),
        ([1.0, 1.0], [np.nan, 1.0], False),
        ([np.inf, 1.0], [np.inf, 1.0], True),
        ([1, 2], [1, 3], False),
        ([1, 2], [1, 2], True),
        (["a", "b"], ["a", "c"], False),
        ([True, False], [True, False], True),
    ],
)
def test_the_error_is_a_share_of_the_largest_value(
    source: list[Any], result: list[Any], agrees: bool, tmp_path: Path
) -> None:
    write(tmp_path, "source", source)
    write(tmp_path, "result", result)
    (error,) = compare(tmp_path, 1, LIMITS["fp32"])
    assert error.agrees == agrees, str(error)


def test_the_largest_and_the_mean_are_over_all_samples(tmp_path: Path) -> None:
    write(tmp_path, "source", [1.0, 2.0], [3.0])
    write(tmp_path, "result", [1.0, 2.0], [3.3])
    (error,) = compare(tmp_path, 2, 1.0)
    assert error.largest == pytest.approx(0.3)
    assert error.mean == pytest.approx(0.1)
    assert error.magnitude == pytest.approx(3.0)


def test_another_shape_is_no_small_error(tmp_path: Path) -> None:
    write(tmp_path, "source", np.zeros((2, 3)))
    write(tmp_path, "result", np.zeros((1, 3)))
    with pytest.raises(InternalError, match=r"shape is \(1, 3\), the source's \(2, 3\)"):
        compare(tmp_path, 1, 1.0)


def archive(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name in names:
            file.writestr(f"net/{name}", "")
    return path


def test_a_file_shows_what_it_is(tmp_path: Path) -> None:
    for name in ("a.onnx", "b.keras", "c.h5", "d.pb", "e.graphdef"):
        (tmp_path / name).touch()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "saved_model.pb").touch()
    (tmp_path / "paddle").mkdir()
    for name in ("inference.json", "inference.pdiparams"):
        (tmp_path / "paddle" / name).touch()
    archive(tmp_path / "script.pt", "data.pkl", "constants.pkl", "code/net.py")
    archive(tmp_path / "module.pth", "data.pkl", "data/0")
    archive(tmp_path / "program.pt2", "models/model.json", "archive_format")
    found = {path.name: source_format(path) for path in sorted(tmp_path.iterdir())}
    assert found == {
        "a.onnx": "onnx",
        "b.keras": "keras",
        "c.h5": "keras",
        "d.pb": "graphdef",
        "e.graphdef": "graphdef",
        "saved": "savedmodel",
        "paddle": "paddle",
        "script.pt": "torchscript",
        "module.pth": "torch-module",
        "program.pt2": "torch-export",
    }
    assert set(found.values()) <= SOURCES.keys()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("net.plan", "belongs to one GPU"),
        ("net.tflite", "are not converted"),
        ("net.bin", "its format is unknown"),
        ("aoti.pt2", "machine code for one processor"),
        ("old.pt", "no file of PyTorch 1.6"),
        ("missing.onnx", "no such file"),
    ],
)
def test_what_cannot_be_converted_is_named(name: str, expected: str, tmp_path: Path) -> None:
    archive(tmp_path / "aoti.pt2", "data/aotinductor/model/net.so")
    for empty in ("net.plan", "net.tflite", "net.bin", "old.pt"):
        (tmp_path / empty).touch()
    with pytest.raises(ModelConfigError, match=expected):
        source_format(tmp_path / name)


def tensor(name: str, *shape: int, datatype: str = "float32") -> samples.TensorInfo:
    return {"name": name, "datatype": datatype, "shape": list(shape)}


def config_of(folder: Path, *tensors: samples.TensorInfo, **how: Any) -> Any:
    inputs, outputs = [tensors[0]], list(tensors[1:])
    fields = DESTINATIONS["onnx"].fields
    write_model(folder / "net", 3, fields, inputs, outputs, labels={}, **how)
    return read_model_config(folder / "net" / "config.pbtxt")


def test_an_open_first_dimension_is_the_batch(tmp_path: Path) -> None:
    scores = tensor("scores", -1, datatype="int64")
    message = config_of(tmp_path, tensor("images", -1, 3, -1, 4), tensor("y", -1, 5), scores)
    assert message.max_batch_size == 4
    assert list(message.input[0].dims) == [3, -1, 4]
    assert list(message.output[1].dims) == [1]
    assert message.output[1].HasField("reshape")
    assert message.output[1].data_type == pb.TYPE_INT64
    assert (tmp_path / "net" / "3").is_dir()


def test_a_fixed_first_dimension_is_no_batch(tmp_path: Path) -> None:
    message = config_of(tmp_path, tensor("words", 1, 3, datatype=samples.TEXT), tensor("y", 1))
    assert message.max_batch_size == 0
    assert list(message.input[0].dims) == [1, 3]
    assert message.input[0].data_type == pb.TYPE_STRING
    with pytest.raises(ModelConfigError, match="whose first dimension is fixed"):
        config_of(tmp_path / "other", tensor("x", 1, 3), tensor("y", 1), max_batch_size=8)


def test_labels_and_shapes_of_a_repository_go_along(tmp_path: Path) -> None:
    net = tmp_path / "net"
    (net / "2").mkdir(parents=True)
    (net / "2" / "model.pt").touch()
    (net / "names.txt").write_text("cat\ndog\n")
    (net / "config.pbtxt").write_text(
        'platform: "pytorch_libtorch" max_batch_size: 8 '
        'input { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 3, 4 ] } '
        'output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: 2 label_filename: "names.txt" }'
    )
    source = read_source(net)
    assert source.path == net / "2" / "model.pt"
    assert source.inputs == (("INPUT__0", "FP32", [-1, 3, 4]),)
    assert source.labels == {"OUTPUT__0": net / "names.txt"}
    assert source.max_batch_size == 8


def test_random_inputs_have_two_sizes_of_batch_and_every_type(tmp_path: Path) -> None:
    tensors = [
        tensor("a", -1, 3),
        tensor("b", -1, datatype="int64"),
        tensor("c", -1, -1, datatype="uint8"),
        tensor("d", -1, 2, datatype=samples.TEXT),
        tensor("e", datatype="bool"),
    ]
    job = samples.StepJob(
        progress=print, source="", samples=str(tmp_path), count=2, seed=1, sizes={"c": [-1, 7]}
    )
    job.write_inputs(tensors)
    one, two = (samples.read(tmp_path, "inputs", index) for index in range(2))
    assert one["a"].shape == (1, 3)
    assert two["a"].shape == (2, 3)
    assert two["c"].shape == (2, 7)
    assert two["d"].dtype.kind == "U"
    assert one["e"].shape == ()


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.zeros((3,), np.float32), ""),
        (np.zeros((1, 3), np.float32), ""),
        (np.zeros((3,), np.float64), "float64, the model takes float32"),
        (np.zeros((4,), np.float32), "has shape"),
    ],
)
def test_a_recorded_sample_fits_or_is_named(array: Any, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "0.npy"
    np.save(path, array)
    if not expected:
        found = samples.recorded_sample(str(path), [tensor("a", -1, 3)])
        assert found["a"].shape == (1, 3)
        return
    with pytest.raises(InvalidRequest, match=expected):
        samples.recorded_sample(str(path), [tensor("a", -1, 3)])


@pytest.mark.parametrize("cut", [False, True])
def test_a_damaged_recorded_sample_is_named(cut: bool, tmp_path: Path) -> None:
    path = tmp_path / "0.npz"
    np.savez(path, a=np.zeros((100, 3), np.float32))
    data = bytearray(path.read_bytes())
    path.write_bytes(data[:600] if cut else data[:600] + b"x" + data[601:])
    with pytest.raises(InvalidRequest, match=r"0\.npz: is no file of arrays: "):
        samples.recorded_sample(str(path), [tensor("a", -1, 3)])


def test_a_missing_framework_comes_with_its_remedies() -> None:
    with pytest.raises(Unavailable) as caught:
        interpreter_having(TENSORFLOW, ())
    for remedy in (
        "--python FILE",
        "python3 -m venv ~/tensorflow",
        "pip install 'tensorflow-cpu>=",
    ):
        assert remedy in str(caught.value)


SCHEDULED = """
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 3 }
output { name: "y" data_type: TYPE_FP32 dims: 2 }
dynamic_batching { max_queue_delay_microseconds: 7 }
instance_group { count: 2 kind: KIND_CPU }
"""


@pytest.mark.parametrize(
    ("to", "left_out", "count"), [("onnx", "", 2), ("openvino", "instance_group", 0)]
)
def test_scheduling_is_kept_and_instances_where_the_backend_stays(
    to: str, left_out: str, count: int, tmp_path: Path
) -> None:
    net = tmp_path / "source"
    (net / "1").mkdir(parents=True)
    (net / "1" / "model.onnx").touch()
    (net / "config.pbtxt").write_text(f'platform: "onnxruntime_onnx" {SCHEDULED}')
    more, left = read_source(net).fields_for(DESTINATIONS[to])
    assert left == left_out
    message = config_of(tmp_path, tensor("x", -1, 3), tensor("y", -1, 2), more=more)
    assert message.dynamic_batching.max_queue_delay_microseconds == 7
    assert sum(group.count for group in message.instance_group) == count


def test_a_network_is_simplified_by_onnxsim_alone(tmp_path: Path) -> None:
    assert "onnxsim" not in ONNX.modules
    assert "onnxsim" in SIMPLIFIER.modules


def test_a_checkpoint_of_pytorch_lightning_is_one_of_pytorch(tmp_path: Path) -> None:
    archive(tmp_path / "net.ckpt", "data.pkl", "data/0")
    assert source_format(tmp_path / "net.ckpt") == "torch-module"
    (tmp_path / "old.ckpt").touch()
    with pytest.raises(ModelConfigError, match=r"of TensorFlow 1 give the \.meta file"):
        source_format(tmp_path / "old.ckpt")
