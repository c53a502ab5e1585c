"""TensorRT's log in this process, its version, and the NVDLA cores that it can use."""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import TYPE_CHECKING, Any

import tensorrt as trt

from edge_server.backends.tensorrt.build.side_car import version_of

if TYPE_CHECKING:
    from collections.abc import Callable

_KEPT = 64
_SHOWN = 3


class TrtLog:
    """The last errors that TensorRT logged in this process.

    Attributes:
        logger: the logger that TensorRT writes to.
        on_message: called with the level (ERROR, WARNING or INFO) and the text of each message, on
            any thread, also within TensorRT's own calls.
    """

    def __init__(self) -> None:
        self._errors: deque[tuple[int, str]] = deque(maxlen=_KEPT)
        self._number = 0
        self.on_message: Callable[[str, str], None] | None = None
        self.logger = _Logger(self)

    @property
    def mark(self) -> int:
        """Return the current position, for `since`."""
        return self._errors[-1][0] + 1 if self._errors else 0

    def since(self, mark: int, shown: int = _SHOWN) -> str:
        """Return the errors since `mark` as one text; errors of other threads may be among them."""
        texts = [text for number, text in list(self._errors) if number >= mark]
        return "; ".join(texts[-shown:]) or "TensorRT gave no reason"

    def add(self, level: str, text: str) -> None:
        """Take a message of TensorRT."""
        if level == "ERROR":
            self._errors.append((self._number, text))
            self._number += 1
        if self.on_message is not None:
            self.on_message(level, text)


@cache
def trt_log() -> TrtLog:
    """Return the log of this process: TensorRT keeps its first logger."""
    return TrtLog()


class _Logger(trt.ILogger):  # type: ignore[misc]
    """TensorRT calls it on any thread, also within its own calls."""

    def __init__(self, log: TrtLog) -> None:
        super().__init__()
        self._log = log
        self._levels = {
            trt.ILogger.INTERNAL_ERROR: "ERROR",
            trt.ILogger.ERROR: "ERROR",
            trt.ILogger.WARNING: "WARNING",
            trt.ILogger.INFO: "INFO",
        }

    def log(self, severity: Any, msg: str) -> None:
        level = self._levels.get(severity)
        if level is not None:
            self._log.add(level, msg)


def version_here() -> tuple[int, int]:
    """Return TensorRT's major and minor version."""
    return version_of(trt.__version__)


def dla_cores() -> int:
    """Return the number of NVDLA cores that TensorRT can use here, which decides rather than the
    board's name; a CUDA driver must be there: a Runtime made without one crashes."""
    runtime: trt.Runtime = trt.Runtime(trt_log().logger)
    return int(runtime.num_DLA_cores)
