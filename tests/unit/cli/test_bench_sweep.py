"""A sweep tries every combination once, and prints what config.pbtxt takes."""

from __future__ import annotations

from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.cli.bench import (
    ModelVariant,
    as_json,
    variants,
)
from edge_server.model_config.config import ModelConfig

BATCHING = """
name: "m" backend: "onnxruntime" platform: "onnxruntime_onnx" max_batch_size: 8
default_model_filename: "model.onnx" instance_group { count: 1 kind: KIND_CPU }
"""


def config(text: str = BATCHING) -> ModelConfig:
    return ModelConfig.of(text_format.Parse(text, pb.ModelConfig()))


def tried(model: ModelConfig, backends: tuple[str, ...] | None) -> list[tuple[object, ...]]:
    found = variants(model, (1, 2), (0, 500), backends)
    return [(each.backend, each.instances, each.delay_us) for each in found]


def test_every_combination_is_tried_once_and_the_model_as_it_is_first() -> None:
    assert tried(config(), None) == [
        (None, None, None),
        *((None, 1, 0), (None, 1, 500)),
        *((None, 2, None), (None, 2, 0), (None, 2, 500)),
    ]


def test_a_model_that_does_not_batch_has_no_delays() -> None:
    alone = config(BATCHING.replace("max_batch_size: 8", "max_batch_size: 1"))
    assert tried(alone, ("onnxruntime", "tensorrt")) == [
        (None, None, None),
        *(("onnxruntime", 2, None), ("tensorrt", 1, None), ("tensorrt", 2, None)),
    ]


def test_another_backend_gets_its_own_files_and_devices() -> None:
    changed = ModelVariant(2, 100, "tensorrt").apply(config().message)
    assert (changed.backend, changed.platform, changed.default_model_filename) == (
        "tensorrt",
        "",
        "",
    )
    assert changed.parameters["auto_build"].string_value == "true"
    (group,) = changed.instance_group
    assert (group.count, group.kind) == (2, pb.ModelInstanceGroup.KIND_AUTO)
    assert json_format.Parse(as_json(changed), pb.ModelConfig()) == changed
    assert config().message.backend == "onnxruntime"


def test_the_snippet_is_what_config_pbtxt_takes() -> None:
    variant = ModelVariant(2, 100, "onnxruntime")
    snippet = variant.snippet(config().message)
    assert snippet == (
        "instance_group { count: 2 kind: KIND_CPU } "
        "dynamic_batching { max_queue_delay_microseconds: 100 }"
    )
    parsed = text_format.Parse(snippet, pb.ModelConfig())
    assert parsed.dynamic_batching.max_queue_delay_microseconds == 100
    assert 'backend: "tensorrt"' in ModelVariant(1, None, "tensorrt").snippet(config().message)
    assert ModelVariant().snippet(config().message) == ""
