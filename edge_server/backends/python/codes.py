"""Map the protocol's error codes, as `model.py` uses them, to and from our errors."""

from __future__ import annotations

from enum import IntEnum

from edge_server import errors

# The maximum length of an error text, in characters.
LONGEST_TEXT = 8192


class Code(IntEnum):
    """Numbers as in Triton's C API."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


_ERRORS = {
    Code.INTERNAL: errors.InternalError,
    Code.NOT_FOUND: errors.NotFound,
    Code.INVALID_ARG: errors.InvalidRequest,
    Code.UNAVAILABLE: errors.Unavailable,
    Code.UNSUPPORTED: errors.Unsupported,
    Code.ALREADY_EXISTS: errors.AlreadyExists,
    Code.CANCELLED: errors.Cancelled,
}
_CODES = {error: code for code, error in _ERRORS.items()} | {
    # The nearest code that the protocol has.
    errors.DeadlineExceeded: Code.UNAVAILABLE,
}


def error_of(code: int, text: str) -> errors.EdgeServerError:
    """Return the error for a model's code; an unknown code becomes the model's own failure."""
    kind = _ERRORS.get(Code(code) if code in set(Code) else Code.UNKNOWN, errors.InternalError)
    return kind(shortened(text))


def shortened(text: str) -> str:
    """Return `text`, cut to the limit: a model's text goes into logs, topics and headers."""
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT]} … ({len(text) - LONGEST_TEXT} characters more)"


def code_of(error: errors.EdgeServerError) -> Code:
    return _CODES.get(type(error), Code.INTERNAL)
