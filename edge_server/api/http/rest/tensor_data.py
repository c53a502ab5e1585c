"""The data of tensors in JSON: nested lists → raw contents, arrays → lists."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from edge_server.api.contents import joined, to_array
from edge_server.errors import InternalError, InvalidRequest, Unavailable
from edge_server.tensors import DataType

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.api.admission import Call

_MISMATCH = "Unable to parse 'data': Shape does not match true shape of 'data' field"
_ONLY_BINARY = frozenset({DataType.FP16, DataType.BF16})
_INTEGER = frozenset({int})
_NUMBER = frozenset({int, float})
_DEEPEST = 100
_ELEMENTS_AT_ONCE = 2**14


def to_raw_contents(name: str, datatype: DataType, count: int, data: Any) -> bytes | memoryview:
    """Return `data`, nested in any way, as the raw contents of the input `name`.

    Args:
        count: of the elements, by the input's shape.

    Raises:
        InvalidRequest: the type does not travel in JSON, or a value does not fit it.
        InternalError: the number of elements, or the type of one, is another (Triton's status).
    """
    if datatype in _ONLY_BINARY:
        raise InvalidRequest(
            f"receiving {datatype.value} data via JSON is not supported. Please use the binary "
            f"data format for input {name}"
        )
    values = _flat(data)
    if len(values) != count:
        raise InternalError(_MISMATCH)
    kinds = set(map(type, values))
    if datatype is DataType.BYTES:
        if kinds - {str}:
            raise InternalError(
                "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
            )
        return joined([text.encode() for text in values])
    if datatype is DataType.BOOL:
        if kinds - {bool}:
            raise _wrong_type("boolean as boolean")
    elif datatype.numpy.kind == "f":
        if kinds - _NUMBER:
            raise _wrong_type("number as double")
    elif kinds - _INTEGER:
        word = "signed-integer" if datatype.numpy.kind == "i" else "unsigned-integer"
        raise _wrong_type(f"{word} as {word}")
    try:
        with np.errstate(over="ignore"):
            return to_array(values, datatype.numpy).tobytes()
    except OverflowError as error:
        raise InvalidRequest(
            f"a value of input '{name}' does not fit {datatype.value}: {error}"
        ) from error


def to_json(
    name: str, tensor: NDArray[Any], datatype: DataType, call: Call | None = None
) -> list[bytes]:
    """Return the elements of an output as JSON, flat and without brackets, in parts.

    Objects exist for one part at a time, and between two parts other threads run.

    Args:
        call: counts the parts of a long output; None counts nothing.

    Raises:
        InvalidRequest: the type, or a text, does not travel in JSON.
        Unavailable: there is no room for the next part.
    """
    if datatype in _ONLY_BINARY:
        raise InvalidRequest(
            f"sending {datatype.value} data via JSON is not supported. Please use the binary data "
            "format for output"
        )
    flat = tensor.reshape(-1)
    parts: list[bytes] = []
    for start in range(0, flat.size, _ELEMENTS_AT_ONCE):
        some = flat[start : start + _ELEMENTS_AT_ONCE]
        elements: list[Any] = some.tolist()
        if datatype is DataType.BYTES:
            try:
                elements = [element.decode() for element in elements]
            except UnicodeDecodeError as error:
                raise InvalidRequest(
                    f"output '{name}' holds bytes that are no UTF-8 text, which JSON cannot carry; "
                    "request it as binary data"
                ) from error
        part = _encode(elements, is_finite=some.dtype.kind != "f" or bool(np.isfinite(some).all()))
        if call is not None and flat.size > _ELEMENTS_AT_ONCE:
            try:
                call.count(len(part))
            except Unavailable as error:
                raise Unavailable(f"{error}; request '{name}' as binary data") from error
        parts += (b",", part[1:-1]) if parts else (part[1:-1],)
    return parts


def _encode(elements: list[Any], *, is_finite: bool) -> bytes:
    """Return JSON, with NaN and Infinity as Triton writes them."""
    if is_finite:
        return msgspec.json.encode(elements)
    import json  # noqa: PLC0415 - msgspec writes null for what is no JSON

    return json.dumps(elements, separators=(",", ":")).encode()


def _flat(data: Any) -> list[Any]:
    values = data if isinstance(data, list) else [data]
    for _ in range(_DEEPEST + 1):
        if not any(isinstance(value, list) for value in values):
            break
        values = list(
            chain.from_iterable(value if isinstance(value, list) else (value,) for value in values)
        )
    return values


def _wrong_type(words: str) -> InternalError:
    return InternalError(f"Unable to parse 'data': attempt to access JSON non-{words}")
