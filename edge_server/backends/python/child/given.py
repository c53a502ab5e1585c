"""What a model gives, in the form in which it travels: Triton's own types take the same.

What does not fit is the model's mistake, told where it was made; once on its way it would cost
the model its process.
"""

from __future__ import annotations

import operator
from typing import Any

from edge_server.backends.python.codes import shortened

_INT64 = range(-(1 << 63), 1 << 63)


def text(value: Any, what: str) -> str:
    """A `str`, or UTF-8 in `bytes`: elements of BYTES tensors are names of models, too.

    Raises:
        TypeError: it is neither.
        UnicodeError: it cannot be UTF-8.
    """
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, found type '{type(value)}'")
    value.encode()
    # Of the type itself: one that is made from it does not travel.
    return "".join(value)


def whole(value: Any, what: str) -> int:
    """An integer of any kind, numpy's too.

    Raises:
        TypeError: it is none, or more than 64 bits with a sign hold.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be an int, found type '{type(value)}'") from None
    if number not in _INT64:
        raise TypeError(f"{what} must fit 64 bits, found {number}")
    return number


def printable(value: Any) -> str:
    """What `value` says of itself, whatever that is, as text that can travel."""
    try:
        said = str(value)
    except Exception as error:  # noqa: BLE001 - a fault in telling must not hide what happened
        said = f"<{type(value).__name__} that cannot be printed: {type(error).__name__}>"
    return shortened(said.encode("utf-8", "backslashreplace").decode())
