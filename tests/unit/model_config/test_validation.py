"""A completed configuration keeps the rules; each fault has the contract's text."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import ModelConfigError
from edge_server.model_config.completion import complete
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.files import ModelFiles
from edge_server.model_config.validation import validate
from edge_server.tensors import DataType, TensorSpec

BACKENDS = frozenset({"identity", "onnxruntime"})
IO = (
    'input { name: "a" data_type: TYPE_FP32 dims: 4 } '
    'output { name: "b" data_type: TYPE_FP32 dims: 4 } '
)


def completed(text: str, name: str = "m") -> pb.ModelConfig:
    files = ModelFiles(name, Path("/repository") / name, {1: Path("/repository") / name / "1"})
    message = text_format.Parse(text, pb.ModelConfig())
    complete(message, files)
    validate(message, files, BACKENDS)
    return message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('backend: "identity" input { data_type: TYPE_FP32 dims: 1 }', "must specify 'name' for m"),
        ('backend: "identity" input { name: "a" dims: 1 }', "'a' must specify 'data_type' for m"),
        ('backend: "identity" input { name: "a" data_type: TYPE_FP32 }', "must specify 'dims'"),
        (
            'backend: "identity" output { name: "a" data_type: TYPE_FP32 dims: 0 }',
            "model output 'a' dimension must be integer >= 1, or -1",
        ),
        ('backend: "identity" max_batch_size: -1', "must be non-negative value for m"),
        ('backend: "nonsense"', "unable to find backend library for backend 'nonsense'"),
        ('platform: "nonsense"', "unexpected platform type 'nonsense' for m"),
        ('platform: "identity"', "platform type 'identity' for m; give backend: \"identity\" in"),
        (
            'platform: "pytorch_libtorch" backend: "tensorflow"',
            "unexpected 'platform' and 'backend' pair, got:pytorch_libtorch, tensorflow",
        ),
        (
            'backend: "identity" '
            + 'metric_tags { key: "t%d" value: "" } ' * 33 % tuple(range(33)),
            "field 'metric_tags' has 33 entries; at most 32 can be",
        ),
        (
            'backend: "identity" model_metrics { metric_control { metric_identifier '
            '{ family: "f" } '
            "histogram_options { buckets: [ " + ", ".join(map(str, range(257))) + " ] } } }",
            "field 'model_metrics.metric_control[0].histogram_options.buckets' has 257 entries; at "
            "most 256 can be",
        ),
        ('name: "other" backend: "identity"', "unexpected directory name 'm' for model 'other'"),
        (
            'backend: "identity" instance_group { kind: KIND_GPU }',
            "has kind KIND_GPU but server does not support GPUs",
        ),
        (
            'backend: "identity" ensemble_scheduling { step { model_name: "x" } }',
            "ensemble scheduling cannot be set for model 'm' whose platform is not ensemble",
        ),
        (
            'backend: "identity" default_model_filename: "../../etc/passwd"',
            "leaves the version directory",
        ),
        (
            'platform: "ensemble"',
            "ensemble scheduling must be set for ensemble m whose platform is ensemble",
        ),
        ('platform: "ensemble" ensemble_scheduling {}', "must specify 'step' for ensemble 'm'"),
        (
            'platform: "ensemble" backend: "identity" ensemble_scheduling {}',
            "Ensemble model 'm' must have platform type 'ensemble' and empty backend type",
        ),
        (
            'platform: "ensemble" ensemble_scheduling {} model_warmup {}',
            "model_warmup can not be specified for ensemble 'm'",
        ),
        (
            'platform: "ensemble" ensemble_scheduling {} optimization {}',
            "optimization should not be specified for ensemble 'm'",
        ),
        (
            'backend: "identity" platform: "tensorrt_plan"',
            "unexpected 'platform' and 'backend' pair, got:tensorrt_plan, identity",
        ),
        ('backend: "identity" platform: "foo"', "unexpected platform type 'foo' for m"),
        ('backend: "identity"' + IO + IO, "model input 'a' is given more than once for m"),
        ('backend: "identity"' + IO + IO, "model output 'b' is given more than once for m"),
        (
            'backend: "identity" input { name: "a" data_type: 99 dims: 1 }',
            "field 'input[0].data_type' has value 99, which means nothing; known: TYPE_INVALID",
        ),
        (
            'backend: "identity" input { name: "a" data_type: TYPE_FP32 dims: 1 format: 9 }',
            "field 'input[0].format' has value 9, which means nothing; known: FORMAT_NONE",
        ),
        (
            'backend: "identity" instance_group { kind: 77 }',
            "field 'instance_group[0].kind' has value 77, which means nothing; known: KIND_AUTO",
        ),
        (
            'platform: "ensemble" ensemble_scheduling { step { model_name: "x" '
            'output_map { key: "b" value: "a" } } }' + IO,
            "ensemble tensor 'a' is an input of ensemble 'm', so it cannot appear in the output "
            "map of step 0",
        ),
        (
            'platform: "ensemble" instance_group {}' + IO,
            "instance group should not be specified for ensemble 'm'",
        ),
        (
            'platform: "ensemble" ensemble_scheduling { step { } }' + IO,
            "must specify 'model_name' in step 0 of ensemble 'm'",
        ),
        (
            'platform: "ensemble" ensemble_scheduling { step { model_name: "x" } }' + IO,
            "must specify 'output_map' in step 0 of ensemble 'm'",
        ),
        (
            'platform: "ensemble" ensemble_scheduling { step { output_map { key: "b" value: "c" } }'
            ' step { output_map { key: "b" value: "c" } } }' + IO,
            "ensemble tensor 'c' can appear in an output map only once for ensemble 'm' step 1",
        ),
        (
            'platform: "ensemble" ensemble_scheduling { step { model_name: "x" } }' + IO,
            "must specify 'input_map' in step 0 of ensemble 'm'",
        ),
    ],
)
def test_each_fault_has_the_contracts_text(text: str, expected: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        completed(text)
    assert expected in str(caught.value)
    assert str(caught.value).startswith("/repository/m/config.pbtxt: ")


def test_with_io_keeps_the_settings_beside_names_types_and_shapes() -> None:
    config = ModelConfig.of(
        completed(
            'backend: "identity" '
            'input { name: "a" data_type: TYPE_FP32 dims: [3, 2, 2] format: FORMAT_NCHW } '
        )
    )
    new = config.with_io([TensorSpec("a", DataType.FP32, (3, -1, -1))], [])
    assert list(new.message.input[0].dims) == [3, -1, -1]
    assert new.message.input[0].format == pb.ModelInput.FORMAT_NCHW
    assert new.inputs == (TensorSpec("a", DataType.FP32, (3, -1, -1)),)
    assert config.inputs[0].shape == (3, 2, 2)
