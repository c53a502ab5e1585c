"""JSON of requests: reading it, and its fields as Triton reads them, with Triton's texts."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from edge_server.errors import InternalError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

# Limit of what is parsed at once: Python's objects take many times the memory, and no other thread
# runs meanwhile.
_LONGEST_JSON_BYTES = 4 * 1024 * 1024
_DEEPEST = 100
_MOST_UINT64 = 2**64 - 1
_MISSING = object()
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class _Load(msgspec.Struct):
    parameters: dict[str, str] = {}


def read_load_parameters(data: bytes | memoryview, longest_bytes: int) -> dict[str, str]:
    """Return the parameters of a load; its files are long, and what it does not know is skipped.

    Raises:
        InvalidRequest, InternalError: see `read_json`.
    """
    if len(data) <= longest_bytes:
        with suppress(ValueError, RecursionError):
            return msgspec.json.decode(data, type=_Load).parameters if len(data) else {}
    parameters = field(read_json(data), "parameters", table, default={})
    return {key: field(parameters, key, text) for key in parameters}


def read_json(data: bytes | memoryview) -> dict[str, Any]:
    """Return the JSON object in `data`; nothing is an empty one.

    Raises:
        InvalidRequest: it is too long, or nested too deeply.
        InternalError: it is no JSON object (Triton's status for what clients write).
    """
    if not len(data):
        return {}
    if len(data) > _LONGEST_JSON_BYTES:
        raise InvalidRequest(
            f"JSON of {len(data)} bytes is not read, {_LONGEST_JSON_BYTES} are at most; send large "
            "tensors as binary data"
        )
    try:
        _check_depth(data)
        try:
            found = msgspec.json.decode(data)
        except msgspec.DecodeError:
            found = _not_quite_json(str(data, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise InternalError(f"failed to parse the request JSON buffer: {error}") from error
    if not isinstance(found, dict):
        raise InternalError("failed to parse the request JSON buffer: it is no object")
    return found


def _check_depth(data: bytes | memoryview) -> None:
    """Raises: InvalidRequest: the nesting is deeper than Triton reads. Brackets in texts count
    neither here nor there: only where there are many brackets is the JSON walked."""
    text = bytes(data)
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


def field(
    table: dict[str, Any],
    name: str,
    read: Callable[[Any], Any],
    default: Any = _MISSING,
) -> Any:
    """Return the field `name` as `read` returns it.

    Args:
        default: where there is no such field; without it that is an error.

    Raises:
        InternalError: there is none, or of another type.
    """
    if name not in table:
        if default is not _MISSING:
            return default
        raise InternalError(
            f"Unable to parse '{name}': attempt to access non-existing object member '{name}'"
        )
    try:
        return read(table[name])
    except TypeError as error:
        raise InternalError(f"Unable to parse '{name}': {error}") from None


def array(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("attempt to access existing non-array as array")
    return value


def table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("attempt to access existing non-object as object")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("attempt to access JSON non-string as string")
    return value


def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("attempt to access JSON non-boolean as boolean")
    return value


def unsigned(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST_UINT64:
        raise TypeError("attempt to access JSON non-unsigned-integer as unsigned-integer")
    return value
