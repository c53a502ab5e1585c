"""JSON of requests: reading it, and its fields as Triton reads them, with Triton's texts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from edge_server.errors import InternalError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

# Limit of what is parsed at once: Python's objects take many times the memory, and no other thread
# runs meanwhile.
_LONGEST_JSON_BYTES = 4 * 1024 * 1024
_DEEPEST = 100
_MOST_UINT64 = 2**64 - 1
_MISSING = object()


def read_json(data: bytes | memoryview, longest_bytes: int = _LONGEST_JSON_BYTES) -> dict[str, Any]:
    """Return the JSON object in `data`; nothing is an empty one.

    Raises:
        InvalidRequest: it is too long, or nested too deeply.
        InternalError: it is no JSON object (Triton's status for what clients write).
    """
    if not len(data):
        return {}
    if len(data) > longest_bytes:
        raise InvalidRequest(
            f"JSON of {len(data)} bytes is not read, {longest_bytes} are at most; send large "
            "tensors as binary data"
        )
    try:
        _check_depth(data)
        try:
            found = msgspec.json.decode(data)
        except msgspec.DecodeError:
            # NaN and Infinity are no JSON, and Triton reads them.
            found = json.loads(bytes(data))
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
    depth = deepest = 0
    for part in _without_texts(text):
        for byte in part:
            if byte in b"[{":
                depth += 1
                deepest = max(deepest, depth)
            elif byte in b"]}":
                depth -= 1
        if deepest > _DEEPEST:
            raise InvalidRequest(f"JSON nesting depth exceeds maximum allowed limit ({_DEEPEST})")


def _without_texts(text: bytes) -> list[bytes]:
    """Return only the brackets outside of texts."""
    outside = text.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
    keep = bytes(set(range(256)) - set(b"[]{}"))
    return [part.translate(None, keep) for part in outside]


def field(
    table: dict[str, Any],
    name: str,
    read: Callable[[Any], Any],
    where: str = "",
    default: Any = _MISSING,
) -> Any:
    """Return the field `name` as `read` returns it.

    Args:
        where: the name in error texts, if another.
        default: where there is no such field; without it that is an error.

    Raises:
        InternalError: there is none, or of another type.
    """
    where = where or name
    if name not in table:
        if default is not _MISSING:
            return default
        raise InternalError(
            f"Unable to parse '{where}': attempt to access non-existing object member '{name}'"
        )
    try:
        return read(table[name])
    except TypeError as error:
        raise InternalError(f"Unable to parse '{where}': {error}") from None


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
