"""TensorRT's last errors, kept for error texts."""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import Any

import tensorrt as trt

_KEPT = 64
_SHOWN = 3


class TrtLog:
    """The last errors that TensorRT logged in this process.

    Attributes:
        logger: the logger that TensorRT writes to.
    """

    def __init__(self) -> None:
        self._errors: deque[tuple[int, str]] = deque(maxlen=_KEPT)
        self.logger = _Logger(self._errors)

    @property
    def mark(self) -> int:
        """Return the current position, for `since`."""
        return self._errors[-1][0] + 1 if self._errors else 0

    def since(self, mark: int) -> str:
        """Return the errors since `mark` as one text; errors of other threads may be among them."""
        texts = [text for number, text in list(self._errors) if number >= mark]
        return "; ".join(texts[-_SHOWN:]) or "TensorRT gave no reason"


@cache
def trt_log() -> TrtLog:
    """Return the log of this process: TensorRT keeps its first logger."""
    return TrtLog()


class _Logger(trt.ILogger):  # type: ignore[misc]
    """TensorRT calls it on any thread, also within its own calls, so `log` only appends."""

    def __init__(self, errors: deque[tuple[int, str]]) -> None:
        super().__init__()
        self._errors = errors
        self._kept = (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR)
        self._number = 0

    def log(self, severity: Any, msg: str) -> None:
        if severity in self._kept:
            self._errors.append((self._number, msg))
            self._number += 1
