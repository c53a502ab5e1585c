"""One thread that removes cancelled requests from every queue."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Protocol

from edge_server.process.worker import Worker

log = logging.getLogger(__name__)

# While requests wait, every queue is searched this often, and when a time limit passes.
PERIOD_S = 0.05
# The shortest time between two searches.
_LEAST_S = 0.001
# The limit of a queue that no configuration bounds: more than all the calls that the gRPC server
# admits together, so that only a model's own flood of responses reaches it.
MOST_WAITING = 4096


class WatchedLine(Protocol):
    """A queue that the watch searches."""

    def drop_dead(self) -> bool:
        """Refuse and remove the cancelled and overdue requests; True where others wait."""
        ...


class LineWatch:
    """Searches all queues while a request waits in one of them, and when its time limit passes.

    A queue removes such requests by itself when it moves. This thread covers the time in which a
    queue stands still: every instance runs, or hangs, and callers come, give up and leave their
    tensors behind.
    """

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._lock = threading.Lock()
        self._lines: tuple[WatchedLine, ...] = ()
        self._changed = threading.Condition()
        self._search_at = math.inf
        self._worker = Worker("lines", self._tick, deadline_s=math.inf)
        self._started = False

    def add(self, line: WatchedLine) -> None:
        """Search `line`, too, from now on."""
        with self._lock:
            self._lines = (*self._lines, line)

    def remove(self, line: WatchedLine) -> None:
        """Stop searching `line`."""
        with self._lock:
            self._lines = tuple(each for each in self._lines if each is not line)

    def note_waiting(self, limit_at: float = math.inf) -> None:
        """Have the queues searched, as a request waits in one of them; returns at once.

        Args:
            limit_at: when the first time limit in that queue passes (`time.monotonic()`).
        """
        now = time.monotonic()
        at = min(now + self._period_s, max(limit_at, now + _LEAST_S))
        if at < self._search_at:
            with self._changed:
                self._search_at = min(at, self._search_at)
                self._changed.notify()
        if not self._started:
            self._start()

    def close(self) -> None:
        self._worker.ask_to_stop()
        with self._changed:
            self._search_at = 0.0
            self._changed.notify()
        self._worker.stop(timeout_s=1.0)

    def _start(self) -> None:
        with self._lock:
            if self._started:
                return
            try:
                self._worker.start()
            except RuntimeError as error:
                log.warning("requests whose callers have gone wait on for now: %s", error)
                return
            self._started = True

    def _tick(self, _now: float) -> None:
        with self._changed:
            while (left_s := self._search_at - time.monotonic()) > 0:
                self._changed.wait(None if left_s == math.inf else left_s)
            # Before the search, so that a request that joins during this one has the next.
            self._search_at = math.inf
        for line in self._lines:
            if _drop_dead(line):
                self.note_waiting()


def _drop_dead(line: WatchedLine) -> bool:
    try:
        return line.drop_dead()
    except Exception:
        log.exception("a line of requests could not be searched")
        return True
