"""ONNX models are completed from their own file, and what disagrees is said before they serve."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from google.protobuf import text_format
from onnx import TensorProto, helper
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends import onnxruntime
from edge_server.backends.contract import ExecuteRequest, untold
from edge_server.cuda.devices import Devices
from edge_server.errors import InternalError, InvalidRequest, ModelConfigError
from edge_server.model_config.config import ON_CPU, USUAL_COMPLETION, Completion, ModelConfig
from edge_server.model_config.files import ModelFiles
from edge_server.requests import InferRequest
from edge_server.serving.snapshot import Snapshot
from edge_server.tensors import DataType, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

X = ' input { name: "x" data_type: TYPE_FP32 dims: 4 }'
Y = ' output { name: "y" data_type: TYPE_FP32 dims: 4 }'


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    return ModelFiles("m", tmp_path, {1: tmp_path / "1"})


def config(text: str, completion: Completion = USUAL_COMPLETION) -> ModelConfig:
    head = 'name: "m" backend: "onnxruntime" default_model_filename: "model.onnx" '
    return ModelConfig.of(text_format.Parse(head + text, pb.ModelConfig()), completion)


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
            "parameters: Expected `int` >= 0 - at `$.intra_op_thread_count`",
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
    said = 'parameters { key: "execution_mode" value { string_value: "2" } }'
    with pytest.raises(ModelConfigError, match=r"config\.pbtxt: parameters: .*`\$.execution_mode`"):
        onnxruntime.complete(files, 1, config(said))


def test_a_parameter_of_others_is_logged_and_does_no_harm(
    files: ModelFiles, write_onnx: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    write_onnx(files.versions[1] / "model.onnx", (1, 4))
    said = 'parameters { key: "gpu_mem_limit" value { string_value: "5" } }'
    completed = onnxruntime.complete(files, 1, config(said))
    assert completed.parameters == {"gpu_mem_limit": "5"}
    assert caplog.messages[0].startswith("model m: parameter 'gpu_mem_limit' has no effect here")
    onnxruntime.load(files.versions[1], completed, Devices(), untold).close()


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


def answer(
    model_config: ModelConfig,
    directory: Path,
    array: np.ndarray | None,
    outputs: frozenset[str] = frozenset({"y"}),
    **more: np.ndarray,
) -> object:
    """What the model answers to `x` and the inputs in `more`."""
    instance = onnxruntime.load(directory, model_config, Devices(), untold).make_instance(
        "m_0", ON_CPU
    )
    answers: list[object] = []
    inputs = {name: Tensor(value) for name, value in more.items()}
    if array is not None:
        inputs["x"] = Tensor(array)
    instance.execute(
        [
            ExecuteRequest(
                inputs,
                outputs,
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


def write_graph(
    files: ModelFiles,
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    initializers: tuple[onnx.TensorProto, ...] = (),
) -> None:
    graph = helper.make_graph(nodes, "graph", inputs, outputs, list(initializers))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 8
    files.versions[1].mkdir()
    onnx.save(model, files.versions[1] / "model.onnx")


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
    assert made["y"].array.dtype == np.object_  # type: ignore[index]
    assert made["y"].array.tolist() == texts  # type: ignore[index]


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
    assert made["y"].array.tobytes() == bf16(twice).tobytes()  # type: ignore[index]
    assert made["y"].shape == (1, len(values))  # type: ignore[index]
    assert made["z"].array.tolist() == [twice]  # type: ignore[index]


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


@pytest.fixture
def default_model(files: ModelFiles) -> ModelFiles:
    """`y` is `x` plus `b`, which is 5 by default."""
    write_graph(
        files,
        [helper.make_node("Add", ["x", "b"], ["y"])],
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"]),
            helper.make_tensor_value_info("b", TensorProto.FLOAT, [1]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])],
        (helper.make_tensor("b", TensorProto.FLOAT, [1], [5.0]),),
    )
    return files


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
    assert answer(completed, directory, x)["y"].array.tolist() == [6]  # type: ignore[index]
    assert answer(completed, directory, x, b=x)["y"].array.tolist() == [2]  # type: ignore[index]
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
    assert not answer(completed, directory, None)["y"].array  # type: ignore[index]
    assert answer(completed, directory, np.float32([1]))["y"].array  # type: ignore[index]


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


def test_every_option_is_one_that_the_runtime_takes(
    files: ModelFiles, write_onnx: Callable[..., None]
) -> None:
    options = {
        "intra_op_thread_count": "1",
        "inter_op_thread_count": "2",
        "execution_mode": "1",
        "enable_mem_arena": "1",
        "enable_mem_pattern": "0",
        "memory.enable_memory_arena_shrinkage": "cpu:0",
        "allow_spinning": "true",
    }
    write_onnx(files.versions[1] / "model.onnx", (1, 4))
    for level in (-1, 1, 2):
        text = f"optimization {{ graph {{ level: {level} }} }}" + "".join(
            f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
            for key, value in options.items()
        )
        completed = onnxruntime.complete(files, 1, config(text))
        made = answer(completed, files.versions[1], np.zeros((1, 4), np.float32))
        assert made["y"].array.tolist() == [[1, 1, 1, 1]]  # type: ignore[index]


def test_a_directory_of_the_models_name_holds_it(
    files: ModelFiles, write_onnx: Callable[..., None]
) -> None:
    write_onnx(files.versions[1] / "model.onnx" / "model.onnx", (1, 4))
    completed = onnxruntime.complete(files, 1, config(""))
    made = answer(completed, files.versions[1], np.zeros((1, 4), np.float32))
    assert made["y"].array.tolist() == [[1, 1, 1, 1]]  # type: ignore[index]


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
    assert made["y"].array.tolist() == [3.5]  # type: ignore[index]


def test_a_type_that_the_protocol_lacks_is_named(files: ModelFiles) -> None:
    write_graph(
        files,
        [helper.make_node("SequenceConstruct", ["x"], ["y"])],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None)],
    )
    with pytest.raises(ModelConfigError, match=r"tensor 'y' has type seq\(tensor\(float\)\)"):
        onnxruntime.complete(files, 1, config(""))


def test_the_sequence_batcher_does_not_fill_in_what_has_a_default(
    default_model: ModelFiles,
) -> None:
    text = SEQUENCES.replace('"start"', '"b"') % ("fp32_false_true", "1")
    with pytest.raises(ModelConfigError, match="unexpected inference input 'b'"):
        onnxruntime.complete(default_model, 1, config(text))


SESSION = """
import sys
from edge_server.backends.onnxruntime import ort
ort.InferenceSession(sys.argv[1])
"""


def test_nobody_is_told_what_it_is_used_for(
    tmp_path: Path, write_onnx: Callable[..., None]
) -> None:
    path = tmp_path / "model.onnx"
    write_onnx(path, (3,))
    home = tmp_path / "home"
    home.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "ORT_"))}
    subprocess.run(
        [sys.executable, "-c", SESSION, str(path)],
        env={**environment, "HOME": str(home)},
        check=True,
    )
    # What is to be sent later would be kept there till then.
    assert not list(home.rglob("*onnxruntime*"))
