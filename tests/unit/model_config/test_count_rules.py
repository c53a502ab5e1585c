"""A page of configuration does not make the server build things until its memory is gone."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import ModelConfigError
from edge_server.model_config.completion import complete
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.files import ModelFiles
from edge_server.model_config.parse import MOST_DIMS, MOST_ENTRIES
from edge_server.model_config.validation import MAX_INSTANCES, validate

BACKENDS = frozenset({"identity", "python", "tensorrt"})
IO = (
    'backend: "identity" input { name: "a" data_type: TYPE_FP32 dims: 4 } '
    'output { name: "b" data_type: TYPE_FP32 dims: 4 } '
)
HUGE = 2**31 - 1
STATE = f'state {{ input_name: "i%d" output_name: "o%d" data_type: TYPE_FP32 dims: {2**25} }}'


def faults(text: str) -> list[str]:
    files = ModelFiles("m", Path("/repository/m"), {1: Path("/repository/m/1")})
    message = text_format.Parse(text, pb.ModelConfig())
    complete(message, files)
    try:
        validate(message, files, BACKENDS)
    except ModelConfigError as error:
        return str(error).split("\n")
    ModelConfig.of(message)
    return []


def sample(rest: str, dims: str = "4", data_type: str = "TYPE_FP32") -> str:
    return (
        f'model_warmup {{ name: "s" {rest} inputs {{ key: "a" value {{ data_type: {data_type} '
        f"dims: [{dims}] zero_data: true }} }} }}"
    )


def state(dims: str, initial: str = "", data_type: str = "TYPE_FP32") -> str:
    return (
        f'sequence_batching {{ state {{ input_name: "i" output_name: "o" data_type: {data_type} '
        f"dims: [{dims}] {initial} }} }}"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f'backend: "identity" input {{ name: "a" data_type: TYPE_FP32 '
            f"dims: [{', '.join(['9'] * (MOST_DIMS + 1))}] }}",
            f"field 'input[0].dims' has {MOST_DIMS + 1} entries; at most {MOST_DIMS} can be",
        ),
        (
            IO + f"dynamic_batching {{ preferred_batch_size: {[1] * (MOST_ENTRIES + 1)} }}",
            f"field 'dynamic_batching.preferred_batch_size' has {MOST_ENTRIES + 1} entries",
        ),
        (
            'platform: "ensemble" ensemble_scheduling {'
            + 'step { model_name: "x" }' * (MOST_ENTRIES + 1)
            + "}",
            f"field 'ensemble_scheduling.step' has {MOST_ENTRIES + 1} entries",
        ),
        (
            IO + 'instance_group { rate_limiter { resources { name: "r" count: 1 } '
            f"{'resources { }' * 64} }} }}",
            "field 'instance_group[0].rate_limiter.resources' has 65 entries; at most 64 can be",
        ),
        (
            IO + f"optimization {{ cuda {{ {'graph_spec { batch_size: 1 }' * 65} }} }}",
            "field 'optimization.cuda.graph_spec' has 65 entries; at most 64 can be",
        ),
        (IO + sample("") * 65, "field 'model_warmup' has 65 entries; at most 64 can be"),
        (
            IO + sample(f"count: {2**32 - 1}"),
            "warm-up sample 's' for m has count 4294967295; at most 10000 can be",
        ),
        (
            IO + f"max_batch_size: {HUGE} " + sample(f"batch_size: {HUGE}"),
            f"the warm-up samples for m take {16 * HUGE} bytes",
        ),
        (IO + sample("", "65536, 65536"), f"the warm-up samples for m take {2**34} bytes"),
        (IO + sample("", str(2**30), "TYPE_STRING"), f"for m take {2**36} bytes"),
        (IO + state("65536, 65536"), f"the sequence batching states for m take {2**34} bytes"),
        (
            IO + "sequence_batching {" + "".join(STATE % (i, i) for i in range(4)) + "}",
            f"the sequence batching states for m take {2**29} bytes; together they can have",
        ),
        (
            IO
            + state(
                "-1",
                f'initial_state {{ name: "z" data_type: TYPE_FP32 dims: {2**40} zero_data: true }}',
            ),
            f"the sequence batching states for m take {2**42} bytes",
        ),
        (
            IO + f"instance_group {{ count: {MAX_INSTANCES} gpus: [0, 0] kind: KIND_GPU }}",
            f"model m has {2 * MAX_INSTANCES} instances; at most {MAX_INSTANCES} can be",
        ),
        (
            IO.replace("identity", "python") + "instance_group { count: 65 }",
            "model m has 65 instances; at most 64 can be",
        ),
        (
            'platform: "tensorrt_plan" instance_group { count: 1 profile: "' + "9" * 5000 + '" }',
            "specifies invalid profile 999",
        ),
    ],
)
def test_what_is_too_much_is_refused_by_name(text: str, expected: str) -> None:
    assert any(expected in fault for fault in faults(text)), faults(text)


@pytest.mark.parametrize(
    "text",
    [
        f"dynamic_batching {{ priority_levels: {2**64 - 1} default_priority_level: {2**64 - 1} }}",
        f"dynamic_batching {{ default_queue_policy {{ max_queue_size: {2**32 - 1} }} }}",
        f"dynamic_batching {{ max_queue_delay_microseconds: {2**64 - 1} }}",
        f"sequence_batching {{ oldest {{ max_candidate_sequences: {HUGE} }} }}",
        f"max_batch_size: {HUGE} sequence_batching {{ }}",
        f"version_policy {{ latest {{ num_versions: {2**32 - 1} }} }}",
        sample("count: 10000"),
    ],
)
def test_what_is_made_only_as_it_is_used_may_be_as_much_as_can_be_written(text: str) -> None:
    assert faults(IO + text) == []


def test_of_very_many_faults_the_first_are_listed() -> None:
    listed = faults('backend: "identity" ' + "input { }" * 1000)
    assert len(listed) == 33
    assert listed[-1].endswith(" more faults of the same configuration")
