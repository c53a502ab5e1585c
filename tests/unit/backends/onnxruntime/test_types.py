"""Strings, BF16 and what the protocol lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from onnx import TensorProto, helper
from unit.backends.onnxruntime.graphs import answer, config, write_graph

from edge_server.backends import onnxruntime
from edge_server.errors import InvalidRequest, ModelConfigError
from edge_server.tensors import DataType

if TYPE_CHECKING:
    from edge_server.model_config.config import ModelConfig
    from edge_server.model_config.files import ModelFiles


@pytest.fixture
def string_model(files: ModelFiles) -> ModelConfig:
    """A string tensor `x` of any rank-1 shape comes back as `y`."""
    write_graph(
        files,
        [helper.make_node("Identity", ["x"], ["y"])],
        [helper.make_tensor_value_info("x", TensorProto.STRING, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.STRING, ["n"])],
    )
    return onnxruntime.complete(files, 1, config('input { name: "x" dims: -1 }'))


@pytest.mark.parametrize("texts", [[b"lane", b"", "f\u00fcr".encode(), b"a\0b"], []])
def test_strings_go_in_and_come_out_as_bytes(
    files: ModelFiles, string_model: ModelConfig, texts: list[bytes]
) -> None:
    made = answer(string_model, files.versions[1], np.array(texts, np.object_))
    assert made["y"].array.dtype == np.object_
    assert made["y"].array.tolist() == texts


def test_a_string_that_is_not_utf8_is_the_callers_fault(
    files: ModelFiles, string_model: ModelConfig
) -> None:
    failed = answer(string_model, files.versions[1], np.array([b"ok", b"\xff"], np.object_))
    assert isinstance(failed, InvalidRequest)
    assert "input 'x': an ONNX string is UTF-8 text" in str(failed)


def bf16(values: list[float]) -> np.ndarray:
    """The upper halves of 32-bit floats."""
    bits = (np.array(values, np.float32).view(np.uint32) >> 16).astype("<u2")
    return bits.view(DataType.BF16.numpy)


@pytest.fixture
def bf16_model(files: ModelFiles) -> ModelConfig:
    """`y` is twice the BF16 `x`, `z` the same as FP32."""
    write_graph(
        files,
        [
            helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT),
            helper.make_node("Add", ["f", "f"], ["z"]),
            helper.make_node("Cast", ["z"], ["y"], to=TensorProto.BFLOAT16),
        ],
        [helper.make_tensor_value_info("x", TensorProto.BFLOAT16, ["n", "k"])],
        [
            helper.make_tensor_value_info("y", TensorProto.BFLOAT16, ["n", "k"]),
            helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n", "k"]),
        ],
    )
    return onnxruntime.complete(files, 1, config("max_batch_size: 2"))


@pytest.mark.parametrize("values", [[1.5, -2.0], []])
def test_bf16_goes_in_and_comes_out_bit_by_bit(
    files: ModelFiles, bf16_model: ModelConfig, values: list[float]
) -> None:
    assert bf16_model.inputs[0].datatype is DataType.BF16
    array = np.frombuffer(b"\0" + bf16(values).tobytes(), np.uint8)[1:]  # at an odd address
    array = array.view(DataType.BF16.numpy).reshape(1, len(values))
    outputs = frozenset({"y", "z"})
    made = answer(bf16_model, files.versions[1], array, outputs)
    twice = [2 * value for value in values]
    assert made["y"].array.tobytes() == bf16(twice).tobytes()
    assert made["y"].shape == (1, len(values))
    assert made["z"].array.tolist() == [twice]


def test_bf16_and_strings_in_one_model_are_refused(files: ModelFiles) -> None:
    write_graph(
        files,
        [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("Identity", ["s"], ["t"])],
        [
            helper.make_tensor_value_info("x", TensorProto.BFLOAT16, [1]),
            helper.make_tensor_value_info("s", TensorProto.STRING, [1]),
        ],
        [
            helper.make_tensor_value_info("y", TensorProto.BFLOAT16, [1]),
            helper.make_tensor_value_info("t", TensorProto.STRING, [1]),
        ],
    )
    with pytest.raises(ModelConfigError, match="both string and bfloat16 tensors"):
        onnxruntime.complete(files, 1, config(""))


def test_other_types_go_beside_bf16(files: ModelFiles) -> None:
    write_graph(
        files,
        [
            helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT),
            helper.make_node("Add", ["f", "b"], ["y"]),
        ],
        [
            helper.make_tensor_value_info("x", TensorProto.BFLOAT16, [1]),
            helper.make_tensor_value_info("b", TensorProto.FLOAT, [1]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
    )
    completed = onnxruntime.complete(files, 1, config(""))
    made = answer(completed, files.versions[1], bf16([1.5]), b=np.float32([2]))
    assert made["y"].array.tolist() == [3.5]


def test_a_type_that_the_protocol_lacks_is_named(files: ModelFiles) -> None:
    write_graph(
        files,
        [helper.make_node("SequenceConstruct", ["x"], ["y"])],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None)],
    )
    with pytest.raises(ModelConfigError, match=r"tensor 'y' has type seq\(tensor\(float\)\)"):
        onnxruntime.complete(files, 1, config(""))
