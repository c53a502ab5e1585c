"""Limits for log lines: a line that repeats is folded into a count, and no source floods the log.

The journal has a limit of its own, which drops lines of the whole service without a word about
which; a fault that repeats with every frame must not cost the line that explains it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# The same line is logged so often in this time: a state that comes and goes shows as what it is.
SAME_LINES = 3
FOLD_S = 10.0
# A source is a logger: about one file of the program. It may log so many lines at once, and so many
# per second for good; a start with many models logs some hundred.
BURST_LINES = 300
LINES_PER_S = 10.0
# Different lines that are remembered.
_MOST_LINES = 512


@dataclass
class _Repeated:
    since_s: float
    logged: int = 1
    count: int = 0


@dataclass
class _Source:
    credit: float
    at_s: float
    dropped: int = 0
    since_s: float = 0.0


class LineLimits(logging.Filter):
    """Drops repeated lines and floods of a handler, and logs how many of them were dropped.

    A line that comes more than `SAME_LINES` times within `FOLD_S` is counted; the count is logged
    once that time is over and the handler gets another line, or closes. A source beyond its limit
    is cut, and the number of its lines is logged when it logs less again. Debug lines have no
    limits.

    Args:
        handler: writes the counts.
        now_s: the monotonic clock.
    """

    def __init__(
        self, handler: logging.Handler, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._handler = handler
        self._now_s = now_s
        self._lock = threading.Lock()
        self._lines: OrderedDict[tuple[str, int, str], _Repeated] = OrderedDict()
        self._sources: dict[str, _Source] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line is logged; counts that are due are logged before it."""
        if record.levelno <= logging.DEBUG:
            return True
        now_s = self._now_s()
        with self._lock:
            due = self._ended_folds(now_s)
            passes = self._is_new(record, now_s) and self._has_credit(record, now_s, due)
        for name, level, text in due:
            self._write(name, level, text)
        return passes

    def close(self) -> None:
        """Log the counts that are still due."""
        with self._lock:
            due = self._ended_folds(float("inf"))
            due += [
                (name, logging.WARNING, _left_out(source.dropped))
                for name, source in self._sources.items()
                if source.dropped
            ]
            self._sources.clear()
        for name, level, text in due:
            self._write(name, level, text)

    # The caller of the methods below holds the lock.

    def _is_new(self, record: logging.LogRecord, now_s: float) -> bool:
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001 - the handler reports a broken record
            return True
        if record.exc_info:
            # One fault with two traces is two lines.
            text += repr(record.exc_info[1])
        key = record.name, record.levelno, text
        known = self._lines.get(key)
        if known is not None and known.logged == SAME_LINES:
            known.count += 1
            return False
        if known is not None:
            known.logged += 1
            return True
        self._lines[key] = _Repeated(now_s)
        return True

    def _has_credit(
        self, record: logging.LogRecord, now_s: float, due: list[tuple[str, int, str]]
    ) -> bool:
        source = self._sources.setdefault(record.name, _Source(BURST_LINES, now_s))
        earned = (now_s - source.at_s) * LINES_PER_S
        source.credit = min(float(BURST_LINES), source.credit + earned)
        source.at_s = now_s
        if source.credit < 1:
            source.dropped += 1
            return False
        source.credit -= 1
        # Said once the source has calmed down, not at each line that slips through.
        if source.dropped and source.credit >= BURST_LINES / 10:
            due.append((record.name, logging.WARNING, _left_out(source.dropped)))
            source.dropped = 0
        return True

    def _ended_folds(self, now_s: float) -> list[tuple[str, int, str]]:
        due = []
        while self._lines:
            key, line = next(iter(self._lines.items()))
            if now_s - line.since_s < FOLD_S and len(self._lines) <= _MOST_LINES:
                break
            del self._lines[key]
            if line.count:
                name, level, text = key
                due.append((name, level, f"{text} [{line.count} more of it]"))
        return due

    def _write(self, name: str, level: int, text: str) -> None:
        record = logging.LogRecord(name, level, "", 0, "%s", (text,), None)
        self._handler.acquire()
        try:
            self._handler.emit(record)
        finally:
            self._handler.release()


@lru_cache(maxsize=256)
def log_once(log: logging.Logger, text: str) -> None:
    """Log `text` once in the life of this process: a lost camera is opened again and again."""
    log.info("%s", text)


def _left_out(count: int) -> str:
    return f"log: {count} lines of this source were left out: too many at once"
