"""The errors that `model.py` uses, and the checks of the values that it passes.

An invalid value is the model's mistake and raises at its origin; an invalid message would end the
model's process. Triton accepts the same types.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from edge_server.backends.python.messages import Code, shortened
from edge_server.process.utf8 import as_utf8

if TYPE_CHECKING:
    from edge_server.backends.python.messages import Value

_INT64 = range(-(1 << 63), 1 << 63)


class TritonModelException(Exception):
    """Raised in `execute`, this error fails the whole batch."""


class TritonError:
    """The error of one response."""

    UNKNOWN = Code.UNKNOWN
    INTERNAL = Code.INTERNAL
    NOT_FOUND = Code.NOT_FOUND
    INVALID_ARG = Code.INVALID_ARG
    UNAVAILABLE = Code.UNAVAILABLE
    UNSUPPORTED = Code.UNSUPPORTED
    ALREADY_EXISTS = Code.ALREADY_EXISTS
    CANCELLED = Code.CANCELLED

    def __init__(self, message: str, code: int = Code.INTERNAL) -> None:
        self._message = text(message, "message")
        self._code = Code(code)

    def message(self) -> str:
        return self._message

    def code(self) -> Code:
        return self._code

    def __str__(self) -> str:
        return self._message


def text(value: Any, what: str) -> str:
    """Return a `str`, or UTF-8 in `bytes` decoded: models also pass elements of BYTES tensors as
    model names.

    Raises:
        TypeError: the value is neither `str` nor `bytes`.
        UnicodeError: the text cannot be encoded as UTF-8.
    """
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, found type '{type(value)}'")
    value.encode()
    # An exact `str`: a subclass cannot be encoded.
    return "".join(value)


def whole(value: Any, what: str) -> int:
    """Return an integer of any kind, numpy's included.

    Raises:
        TypeError: the value is no integer, or exceeds 64 signed bits.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be an int, found type '{type(value)}'") from None
    if number not in _INT64:
        raise TypeError(f"{what} must fit 64 bits, found {number}")
    return number


def plain_parameters(parameters: Mapping[Any, Any] | None) -> dict[str, Value]:
    """Convert parameters to Python's own types: subclasses, like numpy's float64, cannot be
    encoded.

    Raises:
        TritonModelException: they are no dict, or a key or a value has a type that cannot be
            encoded.
    """
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping):
        raise TritonModelException(f"Expect parameters to have type dict, got {type(parameters)}")
    for key in parameters:
        if not isinstance(key, str):
            raise TritonModelException(
                f"Expect parameters keys to have type str, found type {type(key)}"
            )
    return {text(key, "parameters keys"): _plain(value) for key, value in parameters.items()}


def _plain(value: Any) -> Value:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(value, "parameters values")
    if isinstance(value, int):
        return whole(value, "parameters values")
    if isinstance(value, float):
        return float(value)
    raise TritonModelException(
        f"Expect parameters values to have type bool/int/float/str, found type {type(value)}"
    )


def printable(value: Any) -> str:
    """Return `str(value)` as text that can be sent, even where `str` fails."""
    try:
        printed = str(value)
    except Exception as error:  # noqa: BLE001 - a failing `str` must not hide the original error
        printed = f"<{type(value).__name__} that cannot be printed: {type(error).__name__}>"
    return shortened(as_utf8(printed))
