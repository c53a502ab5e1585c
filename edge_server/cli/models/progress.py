"""Progress: shows the progress of a large copy, on a terminal only."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_LARGE_BYTES = 16 << 20
_BETWEEN_S = 0.2


class Progress:
    """Counts bytes in one line, which is overwritten and cleared at the end.

    Args:
        total_bytes: size of the whole copy; 0 if unknown.
    """

    def __init__(self, total_bytes: int = 0, now: Callable[[], float] = time.monotonic) -> None:
        self._total_bytes = total_bytes
        self._now = now
        self._bytes = 0
        self._began = self._told = self._now()
        self._shown = False

    def __call__(self, more_bytes: int) -> None:
        self._bytes += more_bytes
        now = self._now()
        if self._bytes < _LARGE_BYTES or now - self._told < _BETWEEN_S or not sys.stderr.isatty():
            return
        self._told, self._shown = now, True
        mib = self._bytes / (1 << 20)
        of = f" of {self._total_bytes / (1 << 20):.0f}" if self._total_bytes else ""
        print(
            f"\r\033[K{mib:.0f}{of} MiB, {mib / (now - self._began):.0f} MiB/s",
            end="",
            file=sys.stderr,
            flush=True,
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
