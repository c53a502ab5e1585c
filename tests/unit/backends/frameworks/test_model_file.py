"""What a framework's module learns of a model, from the JSON that its process gets."""

from __future__ import annotations

from pathlib import Path

import msgspec
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends.frameworks.backend import model_file
from edge_server.backends.frameworks.runner import ModelFile
from edge_server.model_config.config import ModelConfig
from edge_server.tensors import DataType, TensorSpec

IO = (
    'input { name: "x" data_type: TYPE_FP32 dims: [ 2, 3 ] reshape { shape: 6 } } '
    'output { name: "y" data_type: TYPE_STRING dims: 1 reshape { } } '
)


def file_of(text: str) -> ModelFile:
    config = ModelConfig.of(text_format.Parse(IO + text, pb.ModelConfig()))
    sent = msgspec.json.encode(model_file(Path("model.pt"), config))
    return msgspec.json.decode(sent, type=ModelFile)


def test_shapes_are_the_models_own() -> None:
    file = file_of("max_batch_size: 4")
    assert file.inputs == (TensorSpec("x", DataType.FP32, (6,)),)
    assert file.outputs == (TensorSpec("y", DataType.BYTES, ()),)
    assert file.full_shape("x") == (-1, 6)
    assert file.full_shape("z") is None
    assert file_of("").full_shape("x") == (6,)


def test_the_instances_share_the_processors() -> None:
    alone = file_of("instance_group { count: 1 }").threads
    assert alone >= 1
    assert file_of("instance_group { count: 2 }").threads == max(1, alone // 2)
    assert file_of("instance_group { count: 1024 }").threads == 1


def test_tensors_of_the_sequence_batcher_are_the_models_too() -> None:
    file = file_of(
        'sequence_batching { control_input { name: "START" control { kind: CONTROL_SEQUENCE_START '
        'fp32_false_true: [ 0, 1 ] } } control_input { name: "ID" control { '
        "kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT64 } } "
        'state { input_name: "before" output_name: "after" data_type: TYPE_INT32 dims: 5 } }'
    )
    assert file.inputs[1:] == (
        TensorSpec("START", DataType.FP32, (1,)),
        TensorSpec("ID", DataType.INT64, (1,)),
        TensorSpec("before", DataType.INT32, (5,)),
    )
    assert file.outputs[1:] == (TensorSpec("after", DataType.INT32, (5,)),)


def test_parameters_and_accelerators_are_texts_by_name() -> None:
    file = file_of(
        'parameters { key: "INFERENCE_MODE" value { string_value: "false" } } '
        "optimization { execution_accelerators { cpu_execution_accelerator { "
        'name: "mkldnn" parameters { key: "cpu_threads" value: "2" } } } }'
    )
    assert file.parameters == {"INFERENCE_MODE": "false"}
    assert file.accelerators == {"mkldnn": {"cpu_threads": "2"}}
