"""config.pbtxt is read with errors that name file, line, field and remedy."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import InvalidRequest, ModelConfigError
from edge_server.model_config.parse import (
    MAX_CONFIG_BYTES,
    parse_model_config_json,
    read_model_config,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    return tmp_path / "m" / "config.pbtxt"


def test_unknown_field_names_file_line_and_the_nearest_field(path: Path) -> None:
    path.write_text('name: "x"\nmax_batchsize: 3\n')
    with pytest.raises(ModelConfigError) as caught:
        read_model_config(path)
    text = str(caught.value)
    assert text.startswith(f"{path}:2:1: ")
    assert '"max_batchsize"' in text
    assert 'Did you mean "max_batch_size"?' in text


def test_unknown_enum_value_names_the_nearest_value(path: Path) -> None:
    path.write_text('input { name: "a" data_type: TYPE_FP33 }')
    with pytest.raises(ModelConfigError, match=r'Did you mean "TYPE_FP32"\?'):
        read_model_config(path)


def test_absent_file_is_an_empty_configuration(path: Path) -> None:
    assert not read_model_config(path).ListFields()


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"\xff\xfe", "not UTF-8"),
        (b"name: 'x" + b" " * MAX_CONFIG_BYTES, "at most"),
        (b"{", "config.pbtxt:1:1"),
        (b"name: '" + b"\\" * 200_000 + b"'", "more than 64 backslashes in a row"),
    ],
)
def test_files_that_are_no_configuration_are_refused_in_words(
    path: Path, raw: bytes, expected: str
) -> None:
    path.write_bytes(raw)
    with pytest.raises(ModelConfigError, match=expected):
        read_model_config(path)


def test_a_file_that_is_no_configuration_at_all_is_not_read_into_memory(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(ModelConfigError, match="at most 262144 bytes; this one is larger"):
        read_model_config(path)


STEP = 'name: "e" ensemble_scheduling { step { model_name: "m" %s } }'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            STEP % 'input_map { key: "a" value: "x" } input_map { key: "a" value: "y" }',
            "input 'a' in model 'm' is mapped to multiple ensemble tensors for ensemble 'e' step 0",
        ),
        (
            STEP % 'output_map [ { key: "b" value: "x" }, { key: "b" value: "x" } ]',
            "output 'b' in model 'm' is mapped to multiple ensemble tensors",
        ),
        (
            'parameters { key: "scale" value { string_value: "1" } } '
            'parameters { key: "scale" value { string_value: "2" } }',
            "parameter 'scale' is given more than once for m",
        ),
        (
            "dynamic_batching { priority_queue_policy [ { key: 1 }, { key: 1 } ] }",
            "priority queue policy for level 1 is given more than once for m",
        ),
        (
            'model_warmup { name: "w" inputs { key: "a" } inputs { key: "a" } }',
            "input 'a' is given more than once in warm-up 'w' for m",
        ),
    ],
)
def test_a_key_given_twice_is_refused_where_a_map_would_keep_the_last(
    path: Path, text: str, expected: str
) -> None:
    path.write_text(text)
    with pytest.raises(ModelConfigError) as caught:
        read_model_config(path)
    assert str(caught.value).startswith(f"{path}: {expected}")


def test_maps_are_read_as_the_published_message_has_them(path: Path) -> None:
    path.write_text(
        STEP % 'input_map { key: "a" value: "x" } input_map { key: "b" value: "x" }'
        + 'parameters { key: "scale" value { string_value: "1" } }'
    )
    message = read_model_config(path)
    assert dict(message.ensemble_scheduling.step[0].input_map) == {"a": "x", "b": "x"}
    assert message.parameters["scale"].string_value == "1"


def test_the_json_form_is_read_and_the_name_may_be_left_out() -> None:
    message = pb.ModelConfig(name="m", max_batch_size=3)
    message.version_policy.specific.versions.extend([1, 2**40])
    message.parameters["scale"].string_value = "1"
    text = json_format.MessageToJson(message, preserving_proto_field_name=True)
    assert parse_model_config_json(text, "m") == message
    assert parse_model_config_json("{}", "m") == pb.ModelConfig(name="m")


def test_an_object_stands_for_a_list_of_one_wherever_the_json_form_has_objects_in_a_list() -> None:
    text = '{"instanceGroup": {"count": 2}, "model_warmup": [{"inputs": {"a": {"dims": [1]}}}]}'
    message = parse_model_config_json(text, "m")
    assert [group.count for group in message.instance_group] == [2]
    assert list(message.model_warmup[0].inputs["a"].dims) == [1]
    steps = parse_model_config_json('{"ensemble_scheduling": {"step": {"model_name": "n"}}}', "m")
    assert [step.model_name for step in steps.ensemble_scheduling.step] == ["n"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "[]",
        "null",
        '"x"',
        "{",
        '{"max_batchsize": 1}',
        '{"max_batch_size": "x"}',
        '{"name": "a", "name": "b"}',
        '{"name": "\\ud800"}',
        '{"\\ud800": 1}',
        '{"version_policy": "\\ud800"}',
        '{"parameters": {"a": 1}}',
        '{"input": [{"data_type": "TYPE_FP33"}]}',
        '{"max_batch_size": ' + "9" * 5000 + "}",
        '{"a":' * 10_000,
        '{"input": [' + "[" * 10_000,
        "{}" + " " * MAX_CONFIG_BYTES,
    ],
)
def test_what_is_no_configuration_in_json_is_the_callers_fault(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^Invalid config override: .+"):
        parse_model_config_json(text, "m")
