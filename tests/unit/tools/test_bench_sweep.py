"""A sweep tries every combination once, and recommends a change only where it is worth it."""

from __future__ import annotations

from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.model_config.config import ModelConfig
from edge_server.tools.bench import (
    Latency,
    Measurement,
    ModelVariant,
    VariantResult,
    as_json,
    recommend,
    variants,
)

BATCHING = """
name: "m" backend: "onnxruntime" platform: "onnxruntime_onnx" max_batch_size: 8
default_model_filename: "model.onnx" instance_group { count: 1 kind: KIND_CPU }
"""


def config(text: str = BATCHING) -> ModelConfig:
    return ModelConfig.of(text_format.Parse(text, pb.ModelConfig()))


def test_every_combination_is_tried_once_and_the_model_as_it_is_first() -> None:
    found = [str(each) for each in variants(config(), (1, 2), (0, 500), None)]
    assert found == [
        "as it is",
        "1 instance, batches wait 0 us",
        "1 instance, batches wait 500 us",
        "2 instances",
        "2 instances, batches wait 0 us",
        "2 instances, batches wait 500 us",
    ]


def test_a_model_that_does_not_batch_has_no_delays() -> None:
    alone = config(BATCHING.replace("max_batch_size: 8", "max_batch_size: 1"))
    found = [str(each) for each in variants(alone, (1, 2), (0, 500), ("onnxruntime", "tensorrt"))]
    assert found == [
        "as it is",
        "onnxruntime, 2 instances",
        "tensorrt, 1 instance",
        "tensorrt, 2 instances",
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


def test_an_accelerator_stands_after_its_backend() -> None:
    changed = ModelVariant(2, None, "onnxruntime+cuda").apply(config().message)
    assert (changed.backend, changed.default_model_filename) == ("onnxruntime", "model.onnx")
    (group,) = changed.instance_group
    assert (group.count, group.kind) == (2, pb.ModelInstanceGroup.KIND_GPU)
    snippet = ModelVariant(1, None, "onnxruntime+openvino").snippet(config().message)
    parsed = text_format.Parse(snippet, pb.ModelConfig())
    (accelerator,) = parsed.optimization.execution_accelerators.cpu_execution_accelerator
    assert accelerator.name == "openvino"


def test_the_snippet_is_what_config_pbtxt_takes() -> None:
    variant = ModelVariant(2, 100, "onnxruntime")
    snippet = variant.snippet(config().message)
    assert snippet == (
        "instance_group [ { kind: KIND_CPU count: 2 } ]\n"
        "dynamic_batching { max_queue_delay_microseconds: 100 }"
    )
    parsed = text_format.Parse(snippet, pb.ModelConfig())
    assert parsed.dynamic_batching.max_queue_delay_microseconds == 100
    assert 'backend: "tensorrt"' in ModelVariant(1, None, "tensorrt").snippet(config().message)
    assert ModelVariant().snippet(config().message) == ""


def result(
    variant: ModelVariant, per_s: float, p99: float = 30.0, failed: int = 0
) -> VariantResult:
    latency = Latency(10.0, p99, {50: 10.0, 90: 10.0, 95: 10.0, 99: p99})
    return VariantResult(variant, (Measurement(1, per_s, 100, failed, latency, True, 3),))


AS_IT_IS, TWO, FOUR = ModelVariant(), ModelVariant(2), ModelVariant(4)


def test_the_fastest_is_recommended_with_its_gain() -> None:
    best = recommend([result(AS_IT_IS, 100), result(TWO, 150), result(FOUR, 140)], None)
    assert best is not None
    assert (best.result.variant, best.gain) == (TWO, 0.5)


def test_nothing_is_changed_for_what_may_be_noise_and_fewer_instances_are_preferred() -> None:
    best = recommend([result(AS_IT_IS, 100), result(TWO, 104)], None)
    assert best is not None
    assert best.result.variant == AS_IT_IS
    best = recommend([result(AS_IT_IS, 50), result(FOUR, 104), result(TWO, 100)], None)
    assert best is not None
    assert best.result.variant == TWO


def test_what_is_beyond_the_budget_or_fails_is_not_recommended() -> None:
    results = [result(AS_IT_IS, 50), result(TWO, 90, p99=80.0), result(FOUR, 99, failed=1)]
    best = recommend(results, 40.0)
    assert best is not None
    assert best.result.variant == AS_IT_IS
    assert recommend(results, 5.0) is None
