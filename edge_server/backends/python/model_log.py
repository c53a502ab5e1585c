"""A model's lines in the daemon's log, and their rate limit."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

# The rate limit protects the journal, or the disk; a model that writes more than this is faulty.
PER_SECOND_BYTES = 8 << 10
AT_ONCE_BYTES = 256 << 10
LONGEST_LINE_BYTES = 8 << 10
# The minimum cost of a line, for the time, level and name that the log adds.
SHORTEST_LINE_BYTES = 64


class ModelLog:
    """Logs a model's lines, at most 8 KiB a second, 256 KiB in a burst. Thread-safe.

    Args:
        model: the model's name.
        clock: returns seconds.
    """

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._model = model
        self._clock = clock
        self._lock = threading.Lock()
        self._left_bytes = float(AT_ONCE_BYTES)
        self._at = clock()
        self._dropped = 0
        self._begun = b""

    def line(self, level: int, text: str) -> bool:
        """Log a text of the model's logger, of one line or more; return False where the text is
        dropped."""
        short = text[:LONGEST_LINE_BYTES]
        with self._lock:
            taken, dropped = self._take(max(len(short), SHORTEST_LINE_BYTES))
        if dropped:
            log.warning(
                "model %s: %d lines of its log were dropped: it writes more than %d bytes a second",
                self._model,
                dropped,
                PER_SECOND_BYTES,
            )
        if taken:
            log.log(level, "model %s: %s%s", self._model, short, "" if short == text else " …")
        return taken

    def printed(self, data: bytes) -> None:
        """Log the complete lines in `data` from the model's standard output or error."""
        *lines, self._begun = (self._begun + data).split(b"\n")
        for index, line in enumerate(lines):
            if not self.line(logging.INFO, line.decode(errors="backslashreplace")):
                # Parsing each line of a flood would delay the daemon's other threads.
                with self._lock:
                    self._dropped += len(lines) - index - 1
                break
        if len(self._begun) > LONGEST_LINE_BYTES:
            self.end()

    def end(self) -> None:
        """Log an incomplete last line."""
        begun, self._begun = self._begun, b""
        if begun:
            self.line(logging.INFO, begun.decode(errors="backslashreplace"))

    def _take(self, n_bytes: int) -> tuple[bool, int]:
        """Return whether `n_bytes` fit the limit, and how many lines before were dropped."""
        now = self._clock()
        regained = (now - self._at) * PER_SECOND_BYTES
        self._left_bytes = min(AT_ONCE_BYTES, self._left_bytes + regained)
        self._at = now
        # After a drop, lines resume a second's worth at a time, each time with a warning.
        need_bytes = max(n_bytes, PER_SECOND_BYTES) if self._dropped else n_bytes
        if need_bytes > self._left_bytes:
            self._dropped += 1
            return False, 0
        self._left_bytes -= n_bytes
        dropped, self._dropped = self._dropped, 0
        return True, dropped
