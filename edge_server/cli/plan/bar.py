"""BuildBar: a build's progress, one overwritten line on a terminal, a line per step elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

from edge_server.backends.tensorrt.build.messages import Progressed, Step, TrtMessage

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.backends.tensorrt.build.messages import Event

_WIDTH = 24
_COLUMNS = 78


class BuildBar:
    """Shows build events; TensorRT's messages are counted, and shown if `verbose`.

    Attributes:
        warnings: number of TensorRT's warnings.
    """

    def __init__(
        self,
        *,
        verbose: bool,
        file: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._verbose = verbose
        self._file = file or sys.stderr
        self._on_terminal = self._file.isatty()
        self._now = now
        self._began = now()
        self._what, self._shown = "starting", ""
        self._fraction: float | None = None
        self.warnings = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, TrtMessage):
            self._show_message(event)
            return
        if isinstance(event, Step):
            self._what, self._fraction = event.what, None
            if not self._on_terminal:
                print(f"{event.what} …", file=self._file, flush=True)
        elif isinstance(event, Progressed):
            self._fraction = event.fraction
            self._what = event.phase.lower()
        self._draw()

    def close(self) -> None:
        """Clear the line."""
        if self._on_terminal:
            print("\r\033[K", end="", file=self._file, flush=True)

    def _show_message(self, event: TrtMessage) -> None:
        self.warnings += event.level == "WARNING"
        if self._verbose:
            self.close()
            print(f"TensorRT {event.level}: {event.text}", file=self._file, flush=True)

    def _draw(self) -> None:
        if not self._on_terminal:
            return
        took_s = self._now() - self._began
        bar = "" if self._fraction is None else f"{self._bar(self._fraction)} "
        line = f"{bar}{self._what}, {took_s:.0f} s"[:_COLUMNS]
        if line != self._shown:
            self._shown = line
            print(f"\r\033[K{line}", end="", file=self._file, flush=True)

    @staticmethod
    def _bar(fraction: float) -> str:
        full = round(fraction * _WIDTH)
        return f"[{'#' * full}{'.' * (_WIDTH - full)}] {100 * fraction:3.0f} %"
