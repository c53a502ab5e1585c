"""ONNX models are completed from their own file, and what disagrees is said before they serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends import onnxruntime
from edge_server.backends.contract import ExecuteRequest, Placement
from edge_server.errors import InternalError, ModelConfigError
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.files import ModelFiles
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


def answer(model_config: ModelConfig, directory: Path, array: np.ndarray) -> object:
    instance = onnxruntime.load(directory, model_config, Placement()).make_instance("m_0")
    answers: list[object] = []
    instance.execute(
        [ExecuteRequest({"x": Tensor(array)}, frozenset({"y"}), lambda a, _: answers.append(a))]
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
