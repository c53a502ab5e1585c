"""Request parameters: the protocol's by name and type, the caller's own passed on."""

from __future__ import annotations

import pytest
from tritonclient.grpc import service_pb2 as pb

from edge_server.api.parameters import read_parameters, write_parameter
from edge_server.errors import InvalidRequest
from edge_server.requests import SequencePlace


def parameters(**values: dict[str, object]) -> object:
    message = pb.ModelInferRequest()
    for key, value in values.items():
        message.parameters[key].CopyFrom(pb.InferParameter(**value))
    return message.parameters


def test_the_protocols_parameters_are_separate_from_the_callers() -> None:
    read = read_parameters(
        parameters(
            sequence_id={"int64_param": -1},
            sequence_start={"bool_param": True},
            priority={"uint64_param": 2},
            timeout={"int64_param": 1000},
            triton_enable_empty_final_response={"bool_param": True},
            lane={"string_param": "left"},
            n={"int64_param": -3},
            wide={"bool_param": False},
            gain={"double_param": 0.5},
            most={"uint64_param": 2**64 - 1},
        )
    )
    assert read.sequence == SequencePlace(2**64 - 1, start=True, end=False)
    assert (read.priority, read.timeout_us) == (2, 1000)
    custom = {"lane": "left", "n": -3, "wide": False, "gain": 0.5, "most": 2**64 - 1}
    assert read.custom == custom
    written = pb.ModelInferResponse().parameters
    for name, value in custom.items():
        write_parameter(written[name], value)
    assert read_parameters(written).custom == custom


def test_a_sequence_may_be_named() -> None:
    read = read_parameters(parameters(sequence_id={"string_param": "front"}))
    assert read.sequence == SequencePlace("front")
    assert read_parameters(parameters(priority={"int64_param": 1})).sequence is None


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        (
            "sequence_id",
            {"uint64_param": 1},
            "invalid value type for 'sequence_id' parameter, expected int64_param or string_param.",
        ),
        (
            "sequence_start",
            {"int64_param": 1},
            "invalid value type for 'sequence_start' parameter, expected bool_param.",
        ),
        (
            "sequence_end",
            {"string_param": "x"},
            "invalid value type for 'sequence_end' parameter, expected bool_param.",
        ),
        (
            "priority",
            {"bool_param": True},
            "invalid value type for 'priority' parameter, expected int64_param or uint64_param.",
        ),
        ("priority", {"int64_param": -1}, "invalid value for 'priority', expected value >= 0."),
        (
            "timeout",
            {"double_param": 1.0},
            "invalid value type for 'timeout' parameter, expected int64_param.",
        ),
        (
            "own",
            {},
            "invalid value type for 'own' parameter, expected int64_param, bool_param, or "
            "string_param.",
        ),
        ("sequence_id", {"string_param": "x" * 129}, "at most 128 are allowed"),
    ],
)
def test_a_value_that_cannot_be_is_refused_in_the_contracts_words(
    key: str, value: dict[str, object], says: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_parameters(parameters(**{key: value}))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("value", "field"),
    [(True, "bool_param"), (7, "int64_param"), (0.5, "double_param"), ("x", "string_param")],
)
def test_a_parameter_is_written_in_the_field_for_its_type(value: object, field: str) -> None:
    message = pb.InferParameter()
    write_parameter(message, value)
    assert message.WhichOneof("parameter_choice") == field
    assert getattr(message, field) == value
