"""Validate a model's values and convert them for the channel; Triton accepts the same types.

An invalid value is the model's mistake and raises at its origin; an invalid message would end the
model's process.
"""

from __future__ import annotations

import operator
from typing import Any

from edge_server.backends.python.codes import shortened

_INT64 = range(-(1 << 63), 1 << 63)


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


def printable(value: Any) -> str:
    """Return `str(value)` as text that can be sent, even where `str` fails."""
    try:
        said = str(value)
    except Exception as error:  # noqa: BLE001 - a failing `str` must not hide the original error
        said = f"<{type(value).__name__} that cannot be printed: {type(error).__name__}>"
    return shortened(said.encode("utf-8", "backslashreplace").decode())
