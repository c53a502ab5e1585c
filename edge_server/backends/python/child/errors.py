"""The errors that `model.py` raises and returns."""

from __future__ import annotations

from edge_server.backends.python.child.given import text
from edge_server.backends.python.codes import Code


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
