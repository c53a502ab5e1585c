"""What a model writes into the daemon's log, and how much of it is taken."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

# The journal, or a disk, is for all; a model that writes more than this goes wrong.
PER_SECOND_BYTES = 8 << 10
AT_ONCE_BYTES = 256 << 10
LONGEST_LINE_BYTES = 8 << 10
# A shorter line counts as this much: each costs the log a time, a level and a name.
SHORTEST_LINE_BYTES = 64


class ModelLog:
    """Passes lines on to the log, at most 8 KiB a second of them, 256 KiB at once. Thread-safe.

    Args:
        model: its name.
        clock: tells seconds.
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
        """Log a text of the model's logger, of one line or more; False where it is dropped."""
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
        """What has come on its standard output or error; lines that are complete are passed on."""
        *lines, self._begun = (self._begun + data).split(b"\n")
        for index, line in enumerate(lines):
            if not self.line(logging.INFO, line.decode(errors="backslashreplace")):
                # To look at each of a flood of lines would keep the daemon's other threads waiting.
                with self._lock:
                    self._dropped += len(lines) - index - 1
                break
        if len(self._begun) > LONGEST_LINE_BYTES:
            self.end()

    def end(self) -> None:
        """What is begun is a line."""
        begun, self._begun = self._begun, b""
        if begun:
            self.line(logging.INFO, begun.decode(errors="backslashreplace"))

    def _take(self, n_bytes: int) -> tuple[bool, int]:
        """Whether so much is taken, and how many lines before it were not."""
        now = self._clock()
        regained = (now - self._at) * PER_SECOND_BYTES
        self._left_bytes = min(AT_ONCE_BYTES, self._left_bytes + regained)
        self._at = now
        # Once lines are dropped they come a second's worth at a time, each time with a warning.
        need_bytes = max(n_bytes, PER_SECOND_BYTES) if self._dropped else n_bytes
        if need_bytes > self._left_bytes:
            self._dropped += 1
            return False, 0
        self._left_bytes -= n_bytes
        dropped, self._dropped = self._dropped, 0
        return True, dropped
