"""JSON of requests: reading it, and its fields as Triton reads them, with Triton's texts."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from edge_server.api.admission import COUNTED_FROM_BYTES
from edge_server.errors import InternalError, InvalidRequest, Unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.api.admission import Call

_Value = TypeVar("_Value", str, bytes)
_Kind = TypeVar("_Kind")
# Limit of what is parsed at once: Python's objects take many times the memory, and no other thread
# runs meanwhile.
_LONGEST_JSON_BYTES = 4 * 1024 * 1024
_DEEPEST = 100
# What Python's objects take, measured: four bytes for each letter of a text with one rare letter,
# beside the text; a number and its places in lists; a list or a table; half of a text.
_TIMES_TEXT = 5
_VALUE_BYTES = 48
_TABLE_BYTES = 256
_TEXT_BYTES = 64
# A load has a configuration, with some hundred quotation marks, and a file for every four.
_MOST_QUOTES_OF_LOAD = 2**16
_QUOTE = ord('"')
_PART_BYTES = 1024 * 1024
_MISSING = object()
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class _Load(msgspec.Struct):
    parameters: dict[str, msgspec.Raw] = {}


def read_load_parameters(data: memoryview, longest_bytes: int) -> dict[str, msgspec.Raw]:
    """Return the parameters of a load, as JSON: views on `data`, whose files are long; what it does
    not know is skipped.

    Raises:
        InvalidRequest: it has more parameters than any load; and see `read_json`.
        InternalError: see `read_json`.
    """
    if not len(data):
        return {}
    quotes = 0
    for start in range(0, len(data), _PART_BYTES):
        quotes += int(
            np.count_nonzero(np.frombuffer(data[start : start + _PART_BYTES], "u1") == _QUOTE)
        )
        if quotes > _MOST_QUOTES_OF_LOAD:
            raise InvalidRequest(
                f"a load with more than {_MOST_QUOTES_OF_LOAD} quotation marks is not read; bring "
                "a model of many files into the repository instead"
            )
    if len(data) <= longest_bytes:
        with suppress(ValueError, RecursionError):
            return msgspec.json.decode(data, type=_Load).parameters
    parameters = field(read_json(data), "parameters", dict, default={})
    return {key: msgspec.Raw(msgspec.json.encode(value)) for key, value in parameters.items()}


def load_value(key: str, value: msgspec.Raw, kind: type[_Value]) -> _Value:
    """Return a parameter of a load: text, or bytes that came in base64.

    Errors have Triton's texts and status.
    """
    try:
        return msgspec.json.decode(value, type=kind)
    except msgspec.ValidationError as error:
        if kind is bytes and memoryview(value)[:1] == b'"':
            raise InvalidRequest(f"load parameter '{key}' is not base64: {error}") from error
        return field({key: None}, key, kind)
    except ValueError as error:
        raise InternalError(f"failed to parse the request JSON buffer: {error}") from error


def read_json(data: bytes | memoryview, call: Call | None = None) -> dict[str, Any]:
    """Return the JSON object in `data`; nothing is an empty one.

    Args:
        call: counts what becomes of long JSON; None counts nothing.

    Raises:
        InvalidRequest: it is too long, or nested too deeply.
        InternalError: it is no JSON object (Triton's status for what clients write).
        Unavailable: there is no room for what becomes of it.
    """
    if not len(data):
        return {}
    if len(data) > _LONGEST_JSON_BYTES:
        raise InvalidRequest(
            f"JSON of {len(data)} bytes is not read, {_LONGEST_JSON_BYTES} are at most; send large "
            "tensors as binary data"
        )
    json_text = bytes(data)
    if call is not None and len(data) >= COUNTED_FROM_BYTES:
        try:
            call.count(_made_of(json_text))
        except Unavailable as error:
            raise Unavailable(
                f"{error} once its JSON is read; send tensors as binary data"
            ) from error
    try:
        _check_depth(json_text)
        try:
            found = msgspec.json.decode(json_text)
        except msgspec.DecodeError:
            found = _not_quite_json(str(data, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise InternalError(f"failed to parse the request JSON buffer: {error}") from error
    if not isinstance(found, dict):
        raise InternalError("failed to parse the request JSON buffer: it is no object")
    return found


def _made_of(json_text: bytes) -> int:
    """Return the most bytes that Python's objects of this JSON take, those of its tensors' raw
    contents included."""
    return (
        _TIMES_TEXT * len(json_text)
        + _VALUE_BYTES * json_text.count(b",")
        + _TABLE_BYTES * (json_text.count(b"[") + json_text.count(b"{"))
        + _TEXT_BYTES * json_text.count(b'"')
    )


def _check_depth(text: bytes) -> None:
    """Raises: InvalidRequest: the nesting is deeper than Triton reads. Brackets in texts count
    neither here nor there: only where there are many brackets is the JSON walked."""
    if text.count(b"[") + text.count(b"{") <= _DEEPEST:
        return
    outside = text.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
    # Arrays, as a loop over some million brackets would take the time of all other threads.
    brackets = np.frombuffer(b"".join(outside).translate(None, _NO_BRACKETS), np.uint8)
    steps = np.where((brackets == ord("[")) | (brackets == ord("{")), np.int8(1), np.int8(-1))
    if np.any(np.cumsum(steps, dtype=np.int32) > _DEEPEST):
        raise InvalidRequest(f"JSON nesting depth exceeds maximum allowed limit ({_DEEPEST})")


def _not_quite_json(text: str) -> Any:
    """Return what is in JSON with NaN and Infinity, which Triton reads.

    Raises:
        ValueError: it is no JSON, or has half of a pair of surrogates, which is no text.
    """
    found = json.loads(text)
    if _SURROGATE.search(text):
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("The surrogate pair in string is invalid.") from None
    return found


# What a field may be, and Triton's words for one that is something else. An int is unsigned.
_OTHERWISE: Mapping[type, str] = {
    list: "existing non-array as array",
    dict: "existing non-object as object",
    str: "JSON non-string as string",
    bytes: "JSON non-string as string",  # in base64
    bool: "JSON non-boolean as boolean",
    int: "JSON non-unsigned-integer as unsigned-integer",
}


def field(table: Mapping[str, Any], name: str, kind: type[_Kind], default: Any = _MISSING) -> _Kind:
    """Return the field `name`, which is of that kind, or `default`.

    Raises:
        InternalError: there is none and no default, or it is of another type.
    """
    value: Any = table.get(name, default)
    if value is _MISSING:
        raise InternalError(
            f"Unable to parse '{name}': attempt to access non-existing object member '{name}'"
        )
    is_kind = type(value) is kind  # a bool is no int here
    if name in table and not (is_kind and (kind is not int or 0 <= value < 2**64)):
        raise InternalError(f"Unable to parse '{name}': attempt to access {_OTHERWISE[kind]}")
    found: _Kind = value
    return found
