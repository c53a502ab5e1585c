"""Whatever stands in config.pbtxt: it is understood, or refused with a ModelConfigError."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf import json_format, text_format
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import InvalidRequest, ModelConfigError
from edge_server.model_config.completion import complete
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.files import ModelFiles, select_versions
from edge_server.model_config.parse import (
    is_map,
    parse_model_config_json,
    read_model_config,
    without_effect,
)
from edge_server.model_config.validation import validate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BACKENDS = frozenset({"identity", "onnxruntime", "tensorrt", "python"})
TEXTS = st.sampled_from(
    [
        "",
        "m",
        "a",
        "identity",
        "onnxruntime",
        "onnxruntime_onnx",
        "ensemble",
        "..",
        "/",
        "\0",
        "\u00fc",
    ]
)
SMALL = st.sampled_from([0, 1, 2, 4, 7])
SIGNED = st.one_of(SMALL, st.sampled_from([-1, -2, 2**31 - 1]))
REAL = st.sampled_from([0.0, 0.5, 1.5, -1.0])
NUMBERS = {
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_FLOAT: REAL,
    FieldDescriptor.TYPE_DOUBLE: REAL,
    FieldDescriptor.TYPE_INT32: SIGNED,
    FieldDescriptor.TYPE_INT64: SIGNED,
}


@st.composite
def messages(draw: Callable[..., Any], descriptor: Any, depth: int = 0) -> dict[str, Any]:
    """The JSON form of a message of any fields, shallow and small."""
    fields = {}
    names = [field.name for field in descriptor.fields]
    for name in draw(st.lists(st.sampled_from(names), max_size=6, unique=True)) if names else ():
        field = descriptor.fields_by_name[name]
        oneof = field.containing_oneof
        if oneof is not None and any(other.name in fields for other in oneof.fields):
            continue
        if is_map(field):
            value_field = field.message_type.fields_by_name["value"]
            keys = st.sampled_from(["0", "1", "2"])
            value = draw(st.dictionaries(keys, values(value_field, depth), max_size=2))
        elif field.is_repeated:
            value = draw(st.lists(values(field, depth), max_size=3))
        else:
            value = draw(values(field, depth))
        fields[field.name] = value
    return fields


def values(field: Any, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type, depth + 1)
    if field.enum_type is not None:
        return st.sampled_from([*field.enum_type.values_by_number, 99])
    if field.type == field.TYPE_STRING:
        return TEXTS
    return NUMBERS.get(field.type, SMALL)


def message_of(fields: dict[str, Any]) -> Any:
    return json_format.ParseDict(fields, pb.ModelConfig())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("repository") / "m"
    (path / "1").mkdir(parents=True)
    return path


def understand(directory: Path) -> None:
    """All that happens to a configuration before a backend sees it."""
    files = ModelFiles("m", directory, {1: directory / "1"})
    message = read_model_config(files.config_path)
    complete(message, files)
    validate(message, files, BACKENDS)
    without_effect(message)
    ModelConfig.of(message)
    select_versions(message, files)


@contextmanager
def refused_only_by(kind: type[Exception], start: str) -> Iterator[None]:
    """Nothing is raised inside, or that kind of error and no other."""
    try:
        yield
    except kind as error:
        if not str(error).startswith(start):
            raise AssertionError(f"{error!r} does not start with {start}") from error


CONFIGS = messages(pb.ModelConfig.DESCRIPTOR)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fields=CONFIGS)
def test_what_is_written_as_text_is_read_back_equal(
    directory: Path, fields: dict[str, Any]
) -> None:
    message = message_of(fields)
    path = directory / "config.pbtxt"
    path.write_text(text_format.MessageToString(message))
    assert read_model_config(path) == message
    text = json_format.MessageToJson(message, preserving_proto_field_name=True)
    named = pb.ModelConfig()
    named.CopyFrom(message)
    named.name = named.name or "m"
    assert parse_model_config_json(text, "m") == named


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fields=CONFIGS, head=st.sampled_from(["", 'backend: "identity"', 'platform: "ensemble"']))
def test_any_message_is_understood_or_refused(
    directory: Path, fields: dict[str, Any], head: str
) -> None:
    message = message_of(
        {k: v for k, v in fields.items() if k not in ("backend", "platform", "name")}
    )
    (directory / "config.pbtxt").write_text(head + "\n" + text_format.MessageToString(message))
    with refused_only_by(ModelConfigError, str(directory)):
        understand(directory)


SOUND = """name: "m" platform: "onnxruntime_onnx" max_batch_size: 4
input [ { name: "a" data_type: TYPE_FP32 dims: [ -1, 3 ] reshape { shape: [ 3, -1 ] } } ]
output [ { name: "b" data_type: TYPE_BF16 dims: 1 } ]
instance_group [ { kind: KIND_CPU count: 2 profile: "0" } ]
sequence_batching { control_input { name: "s" control { kind: CONTROL_SEQUENCE_START
  fp32_false_true: [ 0, 1 ] } }
  state { input_name: "i" output_name: "o" data_type: TYPE_INT8 dims: 1
  initial_state { data_type: TYPE_INT8 dims: 1 data_file: "f" } } }
parameters { key: "k" value { string_value: "v" } }
model_warmup { name: "w"
  inputs { key: "a" value { data_type: TYPE_FP32 dims: 1 zero_data: true } } }
"""


@settings(deadline=None)
@given(
    at=st.integers(0, len(SOUND)),
    cut=st.integers(0, 12),
    put=st.one_of(
        st.text(max_size=6),
        st.sampled_from(
            ["-1", "99", "{", "}", '"', "TYPE_STRING", "\\x00", "\\377", "nan", "1e99"]
        ),
    ),
)
def test_any_change_of_a_sound_text_is_understood_or_refused(
    directory: Path, at: int, cut: int, put: str
) -> None:
    text = SOUND[:at] + put + SOUND[at + cut :]
    (directory / "config.pbtxt").write_bytes(text.encode("utf-8", "surrogatepass"))
    with refused_only_by(ModelConfigError, str(directory)):
        understand(directory)


@given(text=st.text(max_size=60).map(lambda inside: "{" + inside))
def test_any_text_as_json_is_a_configuration_or_the_callers_fault(text: str) -> None:
    with refused_only_by(InvalidRequest, "Invalid config override: "):
        parse_model_config_json(text, "m")
