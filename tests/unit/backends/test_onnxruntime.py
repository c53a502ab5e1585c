"""ONNX models are completed from their own file, and what disagrees is said before they serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from google.protobuf import text_format
from onnx import TensorProto, helper
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends import onnxruntime
from edge_server.backends.contract import ExecuteRequest, Placement
from edge_server.errors import InternalError, InvalidRequest, ModelConfigError
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.files import ModelFiles
from edge_server.requests import InferRequest
from edge_server.serving.snapshot import Snapshot
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

X = ' input { name: "x" data_type: TYPE_FP32 dims: 4 }'
Y = ' output { name: "y" data_type: TYPE_FP32 dims: 4 }'


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    return ModelFiles("m", tmp_path, {1: tmp_path / "1"})


def config(text: str) -> ModelConfig:
    head = 'name: "m" backend: "onnxruntime" default_model_filename: "model.onnx" '
    return ModelConfig.of(text_format.Parse(head + text, pb.ModelConfig()))


def test_names_types_and_shapes_come_from_the_file(
    files: ModelFiles, write_onnx: Callable[..., None]
) -> None:
    write_onnx(files.versions[1] / "model.onnx", ("n", 4))
    completed = onnxruntime.complete(files, 1, config(""))
    assert [(s.name, s.shape) for s in completed.inputs] == [("x", (-1, 4))]
    assert list(completed.message.output[0].dims) == [-1, 4]


def test_a_leading_one_is_a_batch_of_at_most_one(
    files: ModelFiles, write_onnx: Callable[..., None]
) -> None:
    write_onnx(files.versions[1] / "model.onnx", (1, 4))
    completed = onnxruntime.complete(files, 1, config("max_batch_size: 1" + X + Y))
    assert completed.inputs[0].shape == (4,)
    with pytest.raises(ModelConfigError, match="model does not support batching while non-zero"):
        onnxruntime.complete(files, 1, config("max_batch_size: 2"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            'input { name: "x" data_type: TYPE_INT32 dims: [1, 4] }',
            "configuration expects datatype TYPE_INT32 for input 'x', model provides TYPE_FP32",
        ),
        (
            'input { name: "x" data_type: TYPE_FP32 dims: [1, 5] }',
            "tensor 'x': the model expects 2 dimensions (shape [1,4]) but the model configuration "
            "specifies 2 dimensions (shape [1,5])",
        ),
        (
            'input { name: "wrong" data_type: TYPE_FP32 dims: 4 }',
            "unexpected inference input 'wrong', allowed inputs are: x",
        ),
        (X + 'input { name: "z" data_type: TYPE_FP32 dims: 4 }', "configuration expects 2 inputs"),
    ],
)
def test_what_configuration_and_file_disagree_on_is_said(
    files: ModelFiles, write_onnx: Callable[..., None], text: str, says: str
) -> None:
    write_onnx(files.versions[1] / "model.onnx", (1, 4))
    with pytest.raises(ModelConfigError) as caught:
        onnxruntime.complete(files, 1, config(text))
    assert says in str(caught.value)


@pytest.mark.parametrize("keep", [0, 40, 0.9])
def test_a_file_cut_short_is_named_with_the_remedy(
    files: ModelFiles, write_onnx: Callable[..., None], keep: float
) -> None:
    path = files.versions[1] / "model.onnx"
    write_onnx(path, (1, 4))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if keep < 1 else int(keep)])
    with pytest.raises(ModelConfigError, match=r"model\.onnx: ONNX Runtime cannot load it: .*copy"):
        onnxruntime.complete(files, 1, config(""))


def test_a_missing_file_is_named(files: ModelFiles) -> None:
    with pytest.raises(ModelConfigError, match=r"model\.onnx: missing"):
        onnxruntime.complete(files, 1, config(""))


def test_a_file_that_cannot_be_read_is_not_to_be_exported_again(
    files: ModelFiles, unreadable: Callable[[Path], None]
) -> None:
    unreadable(files.versions[1] / "model.onnx")
    with pytest.raises(ModelConfigError, match=r"model\.onnx: cannot be read: File name too long"):
        onnxruntime.complete(files, 1, config(""))


def test_parameters_are_checked_before_the_model_is_loaded(files: ModelFiles) -> None:
    with pytest.raises(ModelConfigError, match=r"config\.pbtxt: parameters: .*unknown field `x`"):
        onnxruntime.complete(files, 1, config('parameters { key: "x" }'))


@pytest.mark.parametrize(
    ("in_file", "in_config", "served"),
    [
        ((1, 4), "[-1, 4]", (1, 4)),
        (("n", 4), "[2, -1]", (2, 4)),
        (("n", 4), "[-1, 4]", (-1, 4)),
    ],
)
def test_a_size_that_file_or_configuration_fixes_is_served_as_fixed(
    files: ModelFiles,
    write_onnx: Callable[..., None],
    in_file: tuple[object, ...],
    in_config: str,
    served: tuple[int, ...],
) -> None:
    write_onnx(files.versions[1] / "model.onnx", in_file)
    completed = onnxruntime.complete(
        files,
        1,
        config(
            f'input {{ name: "x" data_type: TYPE_FP32 dims: {in_config} }} '
            f'output {{ name: "y" data_type: TYPE_FP32 dims: {in_config} }}'
        ),
    )
    assert completed.inputs[0].shape == completed.outputs[0].shape == served
    assert tuple(completed.message.input[0].dims) == served


def answer(model_config: ModelConfig, directory: Path, array: np.ndarray) -> object:
    instance = onnxruntime.load(directory, model_config, Placement()).make_instance("m_0")
    answers: list[object] = []
    inputs = {"x": Tensor(array)}
    instance.execute(
        [
            ExecuteRequest(
                inputs,
                frozenset({"y"}),
                lambda a, _final, _parameters=None: answers.append(a),
                InferRequest("m", inputs),
                Snapshot({}),
            )
        ]
    )
    return answers[0]


def test_it_computes_and_a_runtime_failure_is_an_internal_error(
    files: ModelFiles, write_onnx: Callable[..., None]
) -> None:
    write_onnx(files.versions[1] / "model.onnx", (1, 4))
    completed = onnxruntime.complete(files, 1, config(""))
    made = answer(completed, files.versions[1], np.zeros((1, 4), np.float32))
    assert made["y"].array.tolist() == [[1, 1, 1, 1]]  # type: ignore[index]
    failed = answer(completed, files.versions[1], np.zeros((2, 4), np.float32))
    assert isinstance(failed, InternalError)
    assert "model 'm' failed" in str(failed)


@pytest.fixture
def string_model(files: ModelFiles) -> ModelConfig:
    """A string tensor `x` of any rank-1 shape comes back as `y`."""
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "identity",
        [helper.make_tensor_value_info("x", TensorProto.STRING, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.STRING, ["n"])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8
    files.versions[1].mkdir()
    onnx.save(model, files.versions[1] / "model.onnx")
    return onnxruntime.complete(files, 1, config(""))


@pytest.mark.parametrize("texts", [[b"lane", b"", "f\u00fcr".encode(), b"a\0b"], []])
def test_strings_go_in_and_come_out_as_bytes(
    files: ModelFiles, string_model: ModelConfig, texts: list[bytes]
) -> None:
    made = answer(string_model, files.versions[1], np.array(texts, np.object_))
    assert made["y"].array.dtype == np.object_  # type: ignore[index]
    assert made["y"].array.tolist() == texts  # type: ignore[index]


def test_a_string_that_is_not_utf8_is_the_callers_fault(
    files: ModelFiles, string_model: ModelConfig
) -> None:
    failed = answer(string_model, files.versions[1], np.array([b"ok", b"\xff"], np.object_))
    assert isinstance(failed, InvalidRequest)
    assert "input 'x': an ONNX string is UTF-8 text" in str(failed)
