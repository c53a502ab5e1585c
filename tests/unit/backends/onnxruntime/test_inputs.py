"""Inputs that clients may leave out, and those that the sequence batcher gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from onnx import TensorProto, helper
from unit.backends.onnxruntime.graphs import answer, config, write_graph

from edge_server.backends import onnxruntime
from edge_server.errors import ModelConfigError

if TYPE_CHECKING:
    from edge_server.model_config.files import ModelFiles


def test_an_input_with_a_default_is_an_optional_input_where_the_configuration_names_it(
    default_model: ModelFiles,
) -> None:
    named = config('input { name: "x" } input { name: "b" optional: true }')
    completed = onnxruntime.complete(default_model, 1, named)
    assert [(s.name, s.shape, s.optional) for s in completed.inputs] == [
        ("x", (-1,), False),
        ("b", (1,), True),
    ]
    directory, x = default_model.versions[1], np.float32([1])
    assert answer(completed, directory, x)["y"].array.tolist() == [6]
    assert answer(completed, directory, x, b=x)["y"].array.tolist() == [2]
    unnamed = onnxruntime.complete(default_model, 1, config('input { name: "x" dims: -1 }'))
    assert [spec.name for spec in unnamed.inputs] == ["x"]


def test_an_input_of_onnx_optional_type_is_optional(files: ModelFiles) -> None:
    inside = helper.make_tensor_type_proto(TensorProto.FLOAT, ["n"])
    write_graph(
        files,
        [helper.make_node("OptionalHasElement", ["x"], ["y"])],
        [helper.make_value_info("x", helper.make_optional_type_proto(inside))],
        [helper.make_tensor_value_info("y", TensorProto.BOOL, [])],
    )
    completed = onnxruntime.complete(files, 1, config(""))
    assert completed.inputs[0].optional
    assert completed.max_batch_size == 0
    directory = files.versions[1]
    assert not answer(completed, directory, None)["y"].array
    assert answer(completed, directory, np.float32([1]))["y"].array


SEQUENCES = (
    'sequence_batching { control_input { name: "start" control { kind: CONTROL_SEQUENCE_START '
    "%s: [0, 1] } } "
    'state { input_name: "sum" output_name: "new_sum" data_type: TYPE_FP32 dims: %s } }'
)


@pytest.fixture
def sequence_model(files: ModelFiles) -> ModelFiles:
    """`y` is `new_sum`, the sum of `x`, `sum` and `start`."""
    shape = ["n", 1]
    write_graph(
        files,
        [
            helper.make_node("Sum", ["x", "sum", "start"], ["new_sum"]),
            helper.make_node("Identity", ["new_sum"], ["y"]),
        ],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name in ("x", "sum", "start")
        ],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name in ("y", "new_sum")
        ],
    )
    return files


def test_what_the_sequence_batcher_gives_and_takes_is_hidden_from_clients(
    sequence_model: ModelFiles,
) -> None:
    text = "max_batch_size: 2 " + SEQUENCES % ("fp32_false_true", "1")
    completed = onnxruntime.complete(sequence_model, 1, config(text))
    assert [spec.name for spec in completed.inputs] == ["x"]
    assert [spec.name for spec in completed.outputs] == ["y"]
    shown = config(text + 'output { name: "new_sum" }')
    outputs = onnxruntime.complete(sequence_model, 1, shown).outputs
    assert [spec.name for spec in outputs] == ["y", "new_sum"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            SEQUENCES % ("int32_false_true", "1"),
            "configuration expects datatype TYPE_INT32 for input 'start', model provides TYPE_FP32",
        ),
        (
            SEQUENCES % ("fp32_false_true", "3"),
            "model 'm', state 'sum': the model has shape [-1,1] but the configuration has dims [3]",
        ),
        (
            (SEQUENCES % ("fp32_false_true", "1")).replace("new_sum", "other"),
            "unexpected inference output 'other', allowed outputs are: y, new_sum",
        ),
    ],
)
def test_what_the_sequence_batcher_gives_and_takes_must_be_the_models(
    sequence_model: ModelFiles, text: str, says: str
) -> None:
    with pytest.raises(ModelConfigError) as caught:
        onnxruntime.complete(sequence_model, 1, config("max_batch_size: 2 " + text))
    assert says in str(caught.value)


def test_the_sequence_batcher_does_not_fill_in_what_has_a_default(
    default_model: ModelFiles,
) -> None:
    text = SEQUENCES.replace('"start"', '"b"') % ("fp32_false_true", "1")
    with pytest.raises(ModelConfigError, match="unexpected inference input 'b'"):
        onnxruntime.complete(default_model, 1, config(text))


RAGGED = (
    "max_batch_size: 4 "
    'input { name: "x" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true } '
    'output { name: "same" dims: -1 } output { name: "y" dims: -1 } '
    'batch_output { target_name: "same" source_input: "x" } '
    "batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT "
    'target_name: "index" data_type: %s source_input: "x" }'
)


def write_ragged(files: ModelFiles, shape: list[str]) -> None:
    write_graph(
        files,
        [
            helper.make_node("Identity", ["x"], ["same"]),
            helper.make_node("Unsqueeze", ["index", "one"], ["y"]),
        ],
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, shape),
            helper.make_tensor_value_info("index", TensorProto.FLOAT, ["requests"]),
        ],
        [
            helper.make_tensor_value_info("same", TensorProto.FLOAT, shape),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ["requests", 1]),
        ],
        (helper.make_tensor("one", TensorProto.INT64, [1], [1]),),
    )


def test_a_ragged_batch_hides_its_batch_inputs_and_gives_each_request_its_own(
    files: ModelFiles,
) -> None:
    write_ragged(files, ["elements"])
    completed = onnxruntime.complete(files, 1, config(RAGGED % "TYPE_FP32"))
    assert [(spec.name, spec.shape) for spec in completed.inputs] == [("x", (-1,))]
    x = np.float32([[1, 2, 3]])
    given = answer(completed, files.versions[1], x, frozenset({"same", "y"}))
    assert given["same"].array.tolist() == [[1, 2, 3]]
    assert given["y"].array.tolist() == [[3]]


@pytest.mark.parametrize(
    ("shape", "datatype", "text"),
    [
        (
            ["batch", "elements"],
            "TYPE_FP32",
            "unable to load model 'm', configuration expects model provides input with shape [-1]  "
            "for ragged input 'x', model provides [-1,-1]",
        ),
        (
            ["elements"],
            "TYPE_INT32",
            "configuration expects datatype TYPE_INT32 for input 'index', model provides TYPE_FP32",
        ),
    ],
)
def test_a_model_that_cannot_take_ragged_batches_is_refused(
    files: ModelFiles, shape: list[str], datatype: str, text: str
) -> None:
    write_ragged(files, shape)
    with pytest.raises(ModelConfigError) as caught:
        onnxruntime.complete(files, 1, config(RAGGED % datatype))
    assert text in str(caught.value)
