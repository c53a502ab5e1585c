"""A plan and its configuration are held against each other; the texts are Triton's."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends.tensorrt.plan_config import PlanIO, agreed, profiles_of
from edge_server.backends.tensorrt.plan_options import PlanTensor, Range
from edge_server.errors import ModelConfigError
from edge_server.model_config.completion import complete
from edge_server.model_config.config import Completion, ModelConfig
from edge_server.model_config.files import ModelFiles

FILES = ModelFiles("m", Path("/models/m"), {1: Path("/models/m/1")})
X = PlanTensor("x", True, "FP32", (-1, 4))
Y = PlanTensor("y", False, "FP32", (-1, 4))


def profile(most: int, name: str = "x") -> dict[str, Range]:
    return {name: Range((1, 4), (1, 4), (most, 4))}


BATCHING = PlanIO((X, Y), (profile(8), profile(16)))
FIXED = PlanIO((PlanTensor("x", True, "FP32", (1, 4)), PlanTensor("y", False, "FP32", (1, 4))))


def config(text: str, *, auto: bool = True) -> ModelConfig:
    completion = Completion(auto, gpus=1)
    message = text_format.Parse('name: "m" platform: "tensorrt_plan" ' + text, pb.ModelConfig())
    complete(message, FILES, completion)
    return ModelConfig.of(message, completion)


def completed(text: str, io: PlanIO = BATCHING, *, auto: bool = True) -> ModelConfig:
    return agreed(FILES, config(text, auto=auto), io)


def test_a_plan_that_batches_gets_the_largest_batch_that_a_profile_takes() -> None:
    made = completed("")
    assert (made.max_batch_size, [s.shape for s in made.inputs]) == (8, [(4,)])
    assert made.dynamic_batching is not None
    assert made.dynamic_batching.preferred_batch_sizes == (8,)


def test_only_the_profiles_that_instances_may_use_count() -> None:
    text = 'instance_group { profile: ["1"] } instance_group { profile: ["0"] }'
    assert profiles_of(config(text)) == (0, 1)
    assert completed(text).max_batch_size == 16
    assert completed('instance_group { profile: ["1"] }').max_batch_size == 16


def test_the_smallest_input_decides_on_the_batch() -> None:
    z = PlanTensor("z", True, "FP32", (-1, 4))
    io = PlanIO((X, z, Y), ({**profile(8), **profile(4, "z")},))
    assert completed("", io).max_batch_size == 4


def test_a_plan_of_fixed_shapes_does_not_batch_but_may_go_for_a_batch_of_one() -> None:
    made = completed("", FIXED)
    assert (made.max_batch_size, made.inputs[0].shape) == (0, (1, 4))
    assert completed("max_batch_size: 1", FIXED).inputs[0].shape == (4,)


def test_a_completed_configuration_agrees_with_its_plan() -> None:
    for io in (BATCHING, FIXED):
        made = completed("", io)
        again = ModelConfig.of(made.message, Completion(auto=False, gpus=1))
        assert agreed(FILES, again, io) == made


def test_what_holds_a_shape_is_marked_and_keeps_its_dims() -> None:
    sizes = PlanTensor("sizes", True, "INT32", (2,), holds_shape=True)
    io = PlanIO(
        (PlanTensor("x", True, "FP32", (4,)), sizes, PlanTensor("y", False, "FP32", (-1, -1)))
    )
    made = completed("", io)
    assert [t.is_shape_tensor for t in made.message.input] == [False, True]
    assert made.inputs[1].shape == (2,)


IO = (
    'input { name: "x" data_type: TYPE_FP32 dims: [4] } '
    'output { name: "y" data_type: TYPE_FP32 dims: [4] } '
)
SHAPED = PlanIO((X, PlanTensor("s", True, "INT32", (1,), holds_shape=True), Y), (profile(8),))
FAULTS = [
    (
        'instance_group { profile: ["2"] }',
        BATCHING,
        "unable to autofill for 'm', configuration specified invalid profile 2 . Number of "
        "profiles supported by TensorRT engine: 2",
    ),
    ('input { name: "z" }', BATCHING, "unexpected inference input 'z', allowed inputs are: x"),
    ('output { name: "z" }', BATCHING, "unexpected inference output 'z', allowed outputs are: y"),
    (
        'input { name: "x" data_type: TYPE_FP16 }',
        BATCHING,
        "unexpected datatype TYPE_FP32 for inference input 'x', expecting TYPE_FP16 for m_0",
    ),
    (
        "max_batch_size: 9",
        BATCHING,
        "autofill failed for model 'm': configuration specified max-batch 9 but TensorRT engine "
        "only supports max-batch 8",
    ),
    (
        "max_batch_size: 2",
        FIXED,
        "autofill failed for model 'm': configuration specified max-batch 2 but TensorRT engine "
        "only supports max-batch 1",
    ),
    (
        'input { name: "x" dims: [4] }',
        FIXED,
        "autofill failed for model 'm': model tensor shape configuration hints for dynamic "
        "batching but the underlying engine doesn't support batching.",
    ),
    (
        'input { name: "x" dims: [4] } output { name: "y" dims: [-1, 4] }',
        BATCHING,
        "unable to autofill for 'm', model tensor configurations are contradicting each other in "
        "terms of whether batching is supported",
    ),
    (
        'max_batch_size: 8 input { name: "x" dims: [5] }',
        BATCHING,
        "model 'm', tensor 'x': the model expects 2 dimensions (shape [-1,4]) but the model "
        "configuration specifies 2 dimensions (an initial batch dimension because max_batch_size > "
        "0 followed by the explicit tensor shape, making complete shape [-1,5])",
    ),
    (
        'input { name: "x" dims: [1, 5] }',
        FIXED,
        "model 'm', tensor 'x': the model expects 2 dimensions (shape [1,4]) but the model "
        "configuration specifies 2 dimensions (shape [1,5])",
    ),
    (
        "max_batch_size: 1",
        PlanIO((PlanTensor("x", True, "FP32", ()), Y)),
        "model 'm', tensor 'x': for the model to support batching the shape should have at least 1 "
        "dimension; but shape expected by the model is []",
    ),
    (
        "",
        PlanIO((PlanTensor("x", True, "FP8", (1,)), Y)),
        "unsupported datatype FP8 for input 'x' for model 'm'",
    ),
    ("max_batch_size: 8", SHAPED, "tensor 's' holds a shape, which a model that batches"),
    (
        'input { name: "x" is_non_linear_format_io: true dims: [1, 4] }',
        FIXED,
        "input 'x' for model 'm' uses a linear IO format, but 'is_non_linear_format_io' is "
        "incorrectly set to true in the model configuration.",
    ),
    (
        'input { name: "x" dims: [1, 4] }',
        PlanIO((PlanTensor("x", True, "INT8", (1, 4), "Channel major CHW32"), Y)),
        "input 'x' for model 'm' uses a non-linear IO format, but 'is_non_linear_format_io' is "
        "incorrectly set to false in the model configuration.",
    ),
    (
        'input { name: "x" is_non_linear_format_io: true }',
        PlanIO((PlanTensor("x", True, "INT8", (1, 4), "Channel major CHW32"), Y)),
        "which this server does not take apart",
    ),
    (
        'input { name: "x" is_shape_tensor: true }',
        BATCHING,
        "input 'x' for model 'm' is not a shape tensor but the model configuration marks it",
    ),
]


@pytest.mark.parametrize(("text", "io", "expected_text"), FAULTS)
def test_what_disagrees_is_told_in_tritons_words(text: str, io: PlanIO, expected_text: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        completed(text, io)
    assert str(caught.value).startswith("/models/m/config.pbtxt: ")
    assert expected_text in str(caught.value)


@pytest.mark.parametrize(
    ("text", "io", "expected_text"),
    [
        ('input { name: "x" data_type: TYPE_FP32 dims: [4] }', BATCHING, "for output 'y' for m_0"),
        ('output { name: "y" data_type: TYPE_FP32 dims: [4] }', BATCHING, "for input 'x' for m_0"),
        (
            IO + 'input { name: "s" data_type: TYPE_INT32 dims: [1] }',
            SHAPED,
            "input 's' for model 'm' is a shape tensor but the model configuration doesn't mark it "
            "as a shape tensor.",
        ),
    ],
)
def test_without_completion_everything_must_be_said(
    text: str, io: PlanIO, expected_text: str
) -> None:
    with pytest.raises(ModelConfigError) as caught:
        completed("max_batch_size: 8 " + text, io, auto=False)
    assert expected_text in str(caught.value)


def test_a_tensor_of_a_sequence_batcher_needs_no_configuration_of_its_own() -> None:
    start = PlanTensor("start", True, "FP32", (-1, 1))
    io = PlanIO((X, start, Y), ({**profile(8), "start": Range((1, 1), (1, 1), (8, 1))},))
    text = (
        "max_batch_size: 8 sequence_batching { control_input { name: 'start' control { kind: "
        "CONTROL_SEQUENCE_START fp32_false_true: [0, 1] } } } "
    )
    assert [spec.name for spec in completed(text + IO, io, auto=False).inputs] == ["x"]
