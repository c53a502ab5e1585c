"""What a configuration leaves out comes from the file; where they disagree, that is said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from onnx import TensorProto, helper
from unit.backends.onnxruntime.graphs import X, Y, config, write_graph

from edge_server.backends import onnxruntime
from edge_server.errors import ModelConfigError
from edge_server.model_config.config import Completion

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.model_config.files import ModelFiles


def test_names_types_and_shapes_come_from_the_file(
    files: ModelFiles, write_onnx: Callable[..., None]
) -> None:
    write_onnx(files.versions[1] / "model.onnx", (3, "n"))
    completed = onnxruntime.complete(files, 1, config(""))
    assert [(s.name, s.shape) for s in completed.inputs] == [("x", (3, -1))]
    assert list(completed.message.output[0].dims) == [3, -1]
    assert completed.max_batch_size == 0
    assert completed.dynamic_batching is None


@pytest.mark.parametrize(
    ("text", "default", "made"),
    [
        ("", 4, (4, (4,))),
        (X, 4, (4, (4,))),
        ('input { name: "x" }', 8, (8, (8,))),
        ("dynamic_batching { max_queue_delay_microseconds: 7 }", 8, (8, (8,))),
        ("max_batch_size: 2", 8, (2, (2,))),
        ("max_batch_size: 3 dynamic_batching { preferred_batch_size: 2 }", 8, (3, (2,))),
        ("", 1, (1, None)),
        ("sequence_batching {}", 4, (4, None)),
    ],
)
def test_a_model_that_batches_gets_a_batch_size_and_a_batcher(
    files: ModelFiles,
    write_onnx: Callable[..., None],
    text: str,
    default: int,
    made: tuple[int, tuple[int, ...] | None],
) -> None:
    write_onnx(files.versions[1] / "model.onnx", ("n", 4))
    said = config(text, Completion(default_max_batch_size=default))
    completed = onnxruntime.complete(files, 1, said)
    batching = completed.dynamic_batching
    preferred = batching.preferred_batch_sizes if batching else None
    assert (completed.max_batch_size, preferred) == made
    assert completed.inputs[0].shape == (4,)


def test_a_batch_size_that_nobody_asked_for_is_logged(
    files: ModelFiles, write_onnx: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    write_onnx(files.versions[1] / "model.onnx", ("n", 4))
    onnxruntime.complete(files, 1, config("max_batch_size: 4"))
    assert not caplog.records
    onnxruntime.complete(files, 1, config(""))
    assert caplog.messages[0].startswith("model m: max_batch_size set to 4, since")


@pytest.mark.parametrize(
    "text",
    [
        'input { name: "x" data_type: TYPE_FP32 dims: [-1, 4] }',
        'output { name: "y" data_type: TYPE_FP32 dims: [-1, 4] }',
        'input { name: "x" data_type: TYPE_FP32 dims: 8 reshape { shape: [2, 4] } }',
    ],
)
def test_dims_with_the_batch_dimension_among_them_mean_no_batching(
    files: ModelFiles, write_onnx: Callable[..., None], text: str
) -> None:
    write_onnx(files.versions[1] / "model.onnx", ("n", 4))
    completed = onnxruntime.complete(files, 1, config(text))
    assert completed.max_batch_size == 0
    assert completed.dynamic_batching is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "",
            "unable to load model 'm', configuration expects 0 inputs, model provides 1",
        ),
        (
            "max_batch_size: 2" + X + Y,
            "model 'm', tensor 'x': for the model to support batching the shape should have at "
            "least 1 dimension and the first dimension must be -1; but shape expected by the model "
            "is [1,4]",
        ),
    ],
)
def test_without_completion_the_configuration_must_be_whole(
    files: ModelFiles, write_onnx: Callable[..., None], text: str, says: str
) -> None:
    write_onnx(files.versions[1] / "model.onnx", (1, 4))
    with pytest.raises(ModelConfigError) as caught:
        onnxruntime.complete(files, 1, config(text, Completion(auto=False)))
    assert says in str(caught.value)


def test_without_completion_nothing_is_added(
    files: ModelFiles, write_onnx: Callable[..., None]
) -> None:
    write_onnx(files.versions[1] / "model.onnx", ("n", 4))
    said = config("max_batch_size: 2" + X + Y, Completion(auto=False))
    assert onnxruntime.complete(files, 1, said) == said


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
            "unable to load model 'm', configuration expects datatype TYPE_INT32 for input 'x', "
            "model provides TYPE_FP32",
        ),
        (
            'input { name: "x" data_type: TYPE_FP32 dims: [1, 5] }',
            "model 'm', tensor 'x': the model expects 2 dimensions (shape [1,4]) but the model "
            "configuration specifies 2 dimensions (shape [1,5])",
        ),
        (
            'max_batch_size: 1 input { name: "x" data_type: TYPE_FP32 dims: [5] }',
            "model 'm', tensor 'x': the model expects 2 dimensions (shape [1,4]) but the model "
            "configuration specifies 2 dimensions (an initial batch dimension because "
            "max_batch_size > 0 followed by the explicit tensor shape, making complete shape "
            "[-1,5])",
        ),
        (
            "max_batch_size: 2",
            "autofill failed for model 'm': model does not support batching while non-zero "
            "max_batch_size is specified",
        ),
        (
            'max_batch_size: 1 input { name: "x" data_type: TYPE_FP32 dims: 4 optional: true }',
            "optional input 'x' is not supported for models that support batching",
        ),
        (
            'input { name: "x" data_type: TYPE_FP32 dims: [1, 4] optional: true }',
            "input 'x' is optional in the configuration of model 'm', but the model cannot do "
            "without",
        ),
        (
            'sequence_batching { control_input { name: "start" control { kind: '
            "CONTROL_SEQUENCE_START fp32_false_true: [0, 1] } } }",
            "unexpected inference input 'start', allowed inputs are: x",
        ),
        (
            "optimization { graph { level: 3 } }",
            "optimization.graph.level is 3; give -1 (basic), 1 (extended) or 2 (none)",
        ),
        (
            'parameters { key: "memory.enable_memory_arena_shrinkage" '
            'value { string_value: "gpu:0" } }',
            "Invalid enum value 'gpu:0' - at `$.memory.enable_memory_arena_shrinkage`",
        ),
        (
            'parameters { key: "intra_op_thread_count" value { string_value: "-1" } }',
            "parameters: intra_op_thread_count: expected a whole number >= 0; got ",
        ),
        (
            'input { name: "wrong" data_type: TYPE_FP32 dims: 4 }',
            "unexpected inference input 'wrong', allowed inputs are: x",
        ),
        (
            X + 'input { name: "z" data_type: TYPE_FP32 dims: 4 }',
            "unable to load model 'm', configuration expects 2 inputs, model provides 1",
        ),
    ],
)
def test_what_configuration_and_file_disagree_on_is_said(
    files: ModelFiles, write_onnx: Callable[..., None], text: str, says: str
) -> None:
    write_onnx(files.versions[1] / "model.onnx", (1, 4))
    with pytest.raises(ModelConfigError) as caught:
        onnxruntime.complete(files, 1, config(text))
    assert says in str(caught.value)


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


def test_one_number_for_each_of_a_batch_is_shown_as_one_element(files: ModelFiles) -> None:
    write_graph(
        files,
        [helper.make_node("Identity", ["x"], ["y"])],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])],
    )
    completed = onnxruntime.complete(files, 1, config("max_batch_size: 2"))
    assert completed.inputs[0].shape == completed.outputs[0].shape == (1,)
    assert completed.reshapes == {"x": (), "y": ()}
    assert onnxruntime.complete(files, 1, completed) == completed


def test_a_reshape_is_held_against_the_model_and_the_dims_are_shown(
    files: ModelFiles, write_onnx: Callable[..., None]
) -> None:
    write_onnx(files.versions[1] / "model.onnx", ("n", 2, 2))
    text = 'max_batch_size: 2 input { name: "x" dims: 4 reshape { shape: [%s] } }'
    completed = onnxruntime.complete(files, 1, config(text % "2, 2"))
    assert completed.inputs[0].shape == (4,)
    assert completed.reshapes == {"x": (2, 2)}
    with pytest.raises(ModelConfigError, match=r"making complete shape \[-1,4,1\]"):
        onnxruntime.complete(files, 1, config(text % "4, 1"))
