"""TensorRT's log during a build: each message is an event, and errors are kept for error texts."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import tensorrt as trt

from edge_server.backends.tensorrt.build.messages import TrtMessage

if TYPE_CHECKING:
    from collections.abc import Callable

_KEPT = 8


class BuildLog:
    """The log of a process: TensorRT keeps its first logger for all objects.

    Attributes:
        logger: the logger that TensorRT writes to, on threads of its own.
    """

    def __init__(self, on_event: Callable[[TrtMessage], None]) -> None:
        self._errors: deque[str] = deque(maxlen=_KEPT)
        levels = {
            trt.ILogger.INTERNAL_ERROR: "ERROR",
            trt.ILogger.ERROR: "ERROR",
            trt.ILogger.WARNING: "WARNING",
            trt.ILogger.INFO: "INFO",
        }
        errors = self._errors

        class TrtLogger(trt.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()

            def log(self, severity: Any, msg: str) -> None:
                level = levels.get(severity)
                if level == "ERROR":
                    errors.append(msg)
                if level is not None:
                    on_event(TrtMessage(level, msg))

        self.logger: Any = TrtLogger()

    def errors(self) -> str:
        """Return the last errors; a default text if none was logged."""
        return "; ".join(self._errors) or "it gave no reason"
