"""A sweep tries every combination once, and prints what config.pbtxt takes."""

from __future__ import annotations

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.cli.bench import ModelVariant, variants
from edge_server.model_config.config import ModelConfig

BATCHING = """
name: "m" backend: "onnxruntime" platform: "onnxruntime_onnx" max_batch_size: 8
default_model_filename: "model.onnx" instance_group { count: 1 kind: KIND_CPU }
"""


def config(text: str = BATCHING) -> ModelConfig:
    return ModelConfig.of(text_format.Parse(text, pb.ModelConfig()))


def tried(model: ModelConfig) -> list[tuple[object, ...]]:
    return [(each.instances, each.delay_us) for each in variants(model, (1, 2), (0, 500))]


def test_every_combination_is_tried_once_and_the_model_as_it_is_first() -> None:
    assert tried(config()) == [
        (None, None),
        *((1, 0), (1, 500)),
        *((2, None), (2, 0), (2, 500)),
    ]


def test_a_model_that_does_not_batch_has_no_delays() -> None:
    alone = config(BATCHING.replace("max_batch_size: 8", "max_batch_size: 1"))
    assert tried(alone) == [(None, None), (2, None)]


def test_devices_and_the_file_stay() -> None:
    changed = ModelVariant(2, 100).apply(config().message)
    (group,) = changed.instance_group
    assert (group.count, group.kind) == (2, pb.ModelInstanceGroup.KIND_CPU)
    assert changed.default_model_filename == "model.onnx"
    assert config().message.instance_group[0].count == 1


def test_the_snippet_is_what_config_pbtxt_takes() -> None:
    variant = ModelVariant(2, 100)
    snippet = variant.snippet(config().message)
    assert snippet == (
        "instance_group { count: 2 kind: KIND_CPU } "
        "dynamic_batching { max_queue_delay_microseconds: 100 }"
    )
    parsed = text_format.Parse(snippet, pb.ModelConfig())
    assert parsed.dynamic_batching.max_queue_delay_microseconds == 100
    assert ModelVariant().snippet(config().message) == ""
