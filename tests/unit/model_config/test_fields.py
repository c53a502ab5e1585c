"""Every field of the published message, at every depth, is acted on, accepted or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.model_config.parse import (
    ACCEPTED,
    ACTED_ON,
    REFUSED,
    field_faults,
    is_map,
    without_effect,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


def leaves(descriptor: Any, path: str = "") -> Iterator[str]:
    for field in descriptor.fields:
        here = f"{path}.{field.name}" if path else field.name
        inner = field.message_type
        if inner is not None and is_map(field):
            inner = inner.fields_by_name["value"].message_type
        if inner is None or not inner.fields:
            yield here
        else:
            yield from leaves(inner, here)


def above(path: str) -> set[str]:
    """The path itself and all that it is under."""
    parts = path.split(".")
    return {".".join(parts[: i + 1]) for i in range(len(parts))}


def test_each_field_has_exactly_one_fate() -> None:
    for path in leaves(pb.ModelConfig.DESCRIPTOR):
        fates = [
            path in ACTED_ON,
            bool(above(path) & ACCEPTED.keys()),
            bool(above(path) & REFUSED.keys()),
        ]
        assert fates.count(True) == 1, path


def test_the_tables_name_no_field_that_does_not_exist() -> None:
    every = {prefix for path in leaves(pb.ModelConfig.DESCRIPTOR) for prefix in above(path)}
    assert every >= ACTED_ON
    assert every >= ACCEPTED.keys()
    assert every >= REFUSED.keys()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            'model_repository_agents { agents { name: "checksum" } }',
            "field 'model_repository_agents' is not supported by this server",
        ),
        (
            "dynamic_batching { priority_queue_policy { key: 3 value { timeout_action: 9 } } }",
            "field 'dynamic_batching.priority_queue_policy[3].timeout_action' has value 9, which "
            "means nothing; known: REJECT, DELAY",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_place_and_the_reason(
    text: str, expected: str
) -> None:
    (fault,) = field_faults(text_format.Parse(text, pb.ModelConfig()))
    assert fault.startswith(expected)


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ('backend: "identity" runtime: "x"', ["runtime"]),
        (
            'model_metrics { metric_control { metric_identifier { family: "other" } } '
            "metric_control { metric_identifier { family: "
            '"nv_inference_first_response_histogram_ms" } histogram_options { buckets: 1 } } }',
            ["model_metrics.metric_control[0]"],
        ),
        ('backend: "identity" optimization { graph { level: 1 } }', ["optimization.graph"]),
        ('backend: "onnxruntime" optimization { graph { level: 1 } }', []),
        ('backend: "identity" default_model_filename: "x"', ["default_model_filename"]),
        ('backend: "identity" optimization { cuda { graphs: true } }', ["optimization.cuda"]),
        (
            'backend: "tensorrt" optimization { cuda { graphs: true graph_spec { batch_size: 1 '
            'input { key: "x" value { dim: 1 } } } } priority: PRIORITY_MAX }',
            [],
        ),
        ('backend: "tensorrt" cc_model_filenames { key: "8.7" value: "x" }', []),
        ('backend: "identity" optimization { input_pinned_memory { enable: true } }', []),
        ('backend: "identity" parameters { key: "a" value { string_value: "b" } }', []),
        ('platform: "ensemble" parameters { key: "a" }', ["parameters"]),
        ('platform: "ensemble" parameters { key: "allow_interface_change" }', []),
        ('platform: "ensemble" parameters { key: "score_threshold" }', []),
        ('platform: "ensemble" input { reshape { shape: 1 } }', ["input.reshape"]),
        (
            'backend: "identity" dynamic_batching { default_priority_level: 1 }',
            ["dynamic_batching.priority_queue_policy"],
        ),
        (
            'backend: "identity" cc_model_filenames { key: "8.7" value: "x" } '
            'instance_group { host_policy: "big" }',
            ["cc_model_filenames", "instance_group.host_policy"],
        ),
    ],
)
def test_what_changes_nothing_here_is_named_with_the_reason(text: str, paths: list[str]) -> None:
    message = text_format.Parse(text, pb.ModelConfig())
    found = without_effect(message)
    assert sorted(found) == paths
    assert list(field_faults(message)) == []
    assert all(found.values())
