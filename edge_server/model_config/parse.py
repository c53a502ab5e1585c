"""Parses config.pbtxt into an `inference.ModelConfig` message, with errors that name a remedy, and
writes such a message as JSON."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, text_format
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import InvalidRequest, ModelConfigError
from edge_server.model_config.fields import is_map
from edge_server.model_config.files import reading

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

# A configuration is a page of text; a text of this size already takes 0.14 s to parse.
MAX_CONFIG_BYTES = 256 * 1024
# To unescape backslashes in a row protobuf takes the square of their number, in which no other
# thread runs: half a minute for 100 kB.
_MOST_BACKSLASHES = 64
# The message itself nests eight deep.
_MAX_JSON_DEPTH = 32

_UNKNOWN_FIELD = re.compile(r'Message type "([\w.]+)" has no field named "(\w+)"')
_UNKNOWN_VALUE = re.compile(r'Enum type "([\w.]+)" has no value named (\w+)')

# Protobuf writes 64-bit integers as strings. For these fields Triton converts them back to numbers,
# so that a model may use `dims` directly.
_INTEGERS = frozenset(
    {
        "dims",
        "shape",
        "versions",
        "model_version",
        "max_queue_delay_microseconds",
        "default_timeout_microseconds",
        "max_sequence_idle_microseconds",
    }
)


def read_model_config(path: Path) -> Any:
    """Read the message from `path`; an absent file is an empty configuration.

    Raises:
        ModelConfigError: unreadable, too large, or not a ModelConfig; names file, line and remedy.
    """
    with reading(path):
        try:
            with path.open("rb") as file:
                raw = file.read(MAX_CONFIG_BYTES + 1)
        except FileNotFoundError:
            return pb.ModelConfig()
    if len(raw) > MAX_CONFIG_BYTES:
        raise ModelConfigError(
            f"{path}: a model configuration has at most {MAX_CONFIG_BYTES} bytes; this one is "
            "larger"
        )
    if b"\\" * (_MOST_BACKSLASHES + 1) in raw:
        raise ModelConfigError(
            f"{path}: has more than {_MOST_BACKSLASHES} backslashes in a row, which no model "
            "configuration needs; remove them"
        )
    try:
        entries = text_format.Parse(raw.decode("utf-8"), _message_with_plain_entries()())
    except UnicodeDecodeError as error:
        raise ModelConfigError(
            f"{path}: not UTF-8 text at byte {error.start}; config.pbtxt is protobuf text format"
        ) from error
    except RecursionError as error:
        raise ModelConfigError(f"{path}: nested too deeply to be a model configuration") from error
    except text_format.ParseError as error:
        text = re.sub(r"^\d+:\d+ : ", "", str(error))
        raise ModelConfigError(
            f"{path}:{error.GetLine()}:{error.GetColumn()}: {text}{_suggestion(text)}"
        ) from error
    faults = "\n".join(f"{path}: {fault}" for fault in _keys_given_twice(entries, path))
    if faults:
        raise ModelConfigError(faults)
    return pb.ModelConfig.FromString(entries.SerializeToString())


def parse_model_config_json(text: str, name: str) -> Any:
    """Parse `text` in the protocol's JSON form; a message without a name gets `name`.

    Raises:
        InvalidRequest: too large, nested too deeply, or no ModelConfig (Triton's text).
    """
    if len(text) > MAX_CONFIG_BYTES:
        raise InvalidRequest(
            f"Invalid config override: {len(text)} characters; a model configuration has at most "
            f"{MAX_CONFIG_BYTES}"
        )
    if not text.lstrip().startswith("{"):
        raise InvalidRequest("Invalid config override: not a JSON object")
    try:
        fields = json.loads(text, object_pairs_hook=_without_repetition)
        # protobuf raises no error of its own for half a surrogate pair, which JSON can have.
        json.dumps(fields, ensure_ascii=False).encode()
        fields = _with_lists(fields, pb.ModelConfig.DESCRIPTOR)
        message = json_format.ParseDict(
            fields, pb.ModelConfig(), max_recursion_depth=_MAX_JSON_DEPTH
        )
    except (json_format.ParseError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"Invalid config override: {error}") from error
    message.name = message.name or name
    return message


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises: ValueError: a key is given twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = Counter(key for key, _ in pairs)
        raise ValueError(f"'{keys.most_common(1)[0][0]}' is given more than once")
    return made


def _with_lists(value: Any, message: Any) -> Any:
    """`value` with each object in a list of its own where `message` has a list of objects: Triton's
    own parser takes `{"instance_group": {"count": 2}}`."""
    if not isinstance(value, dict):
        return value
    made = {}
    for key, entry in value.items():
        field = message.fields_by_name.get(key) or message.fields_by_camelcase_name.get(key)
        inside = None if field is None else field.message_type
        if inside is not None and not inside.GetOptions().map_entry:
            if field.is_repeated and isinstance(entry, dict):
                entry = [entry]  # noqa: PLW2901 - the same entry in its own form
            if isinstance(entry, list):
                made[key] = [_with_lists(each, inside) for each in entry]
                continue
            entry = _with_lists(entry, inside)  # noqa: PLW2901
        made[key] = entry
    return made


@cache
def _message_with_plain_entries() -> Any:
    """`inference.ModelConfig` with lists of entries for maps: a map keeps the last duplicate."""
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    unseen = list(file.message_type)
    while unseen:
        message = unseen.pop()
        message.options.ClearField("map_entry")
        unseen += message.nested_type
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName(pb.ModelConfig.DESCRIPTOR.full_name))


def _keys_given_twice(entries: Any, path: Path) -> Iterator[str]:
    name = entries.name or path.parent.name
    for key in _repeated(entries.parameters):
        yield f"parameter '{key}' is given more than once for {name}"
    for level in _repeated(entries.dynamic_batching.priority_queue_policy):
        yield f"priority queue policy for level {level} is given more than once for {name}"
    for sample in entries.model_warmup:
        for key in _repeated(sample.inputs):
            yield f"input '{key}' is given more than once in warm-up '{sample.name}' for {name}"
    for index, step in enumerate(entries.ensemble_scheduling.step):
        for kind, pairs in (("input", step.input_map), ("output", step.output_map)):
            for key in _repeated(pairs):
                yield (
                    f"{kind} '{key}' in model '{step.model_name}' is mapped to multiple ensemble "
                    f"tensors for ensemble '{name}' step {index}"
                )


def _repeated(pairs: Iterable[Any]) -> list[Any]:
    return [key for key, count in Counter(pair.key for pair in pairs).items() if count > 1]


def _suggestion(text: str) -> str:
    pool = descriptor_pool.Default()
    if match := _UNKNOWN_FIELD.search(text):
        message = pool.FindMessageTypeByName(match[1])
        known, wrong = [str(field.name) for field in message.fields], match[2]
    elif match := _UNKNOWN_VALUE.search(text):
        enum = pool.FindEnumTypeByName(match[1])
        known, wrong = [str(value.name) for value in enum.values], match[2]
    else:
        return ""
    nearest = difflib.get_close_matches(wrong, known, n=1)
    return f' Did you mean "{nearest[0]}"?' if nearest else f" Known: {', '.join(known)}."


def config_json(message: Any) -> dict[str, Any]:
    """Return an `inference.ModelConfig` as the dict that Triton gives to `model.py`; unset fields
    are present with their defaults."""
    whole = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _with_integers(whole, message.DESCRIPTOR)


def _with_integers(fields: dict[str, Any], message: Any) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in fields.items():
        field = message.fields_by_name[key]
        inside = field.message_type
        if is_map(field):
            # Its keys are anybody's, such as a metric tag `model_version`.
            each = inside.fields_by_name["value"].message_type
            made[key] = {k: _with_integers(v, each) if each else v for k, v in value.items()}
        elif inside is not None and field.is_repeated:
            made[key] = [_with_integers(element, inside) for element in value]
        elif inside is not None:
            made[key] = _with_integers(value, inside)
        elif key in _INTEGERS:
            made[key] = [int(each) for each in value] if field.is_repeated else int(value)
        else:
            made[key] = value
    return made
