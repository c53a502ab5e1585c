"""What TensorRT says while it works: told as it comes, errors kept for the text of a failure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import tensorrt as trt

from edge_server.backends.tensorrt.build.messages import TrtMessage

if TYPE_CHECKING:
    from collections.abc import Callable

_KEPT = 8


class BuildLog:
    """One for a process: TensorRT keeps the first logger that it is given for all.

    Attributes:
        logger: what TensorRT is given; it is called on threads of its own.
    """

    def __init__(self, tell: Callable[[TrtMessage], None]) -> None:
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
                    tell(TrtMessage(level, msg))

        self.logger: Any = TrtLogger()

    def errors(self) -> str:
        """The last errors; a text for people where there are none."""
        return "; ".join(self._errors) or "it gave no reason"
