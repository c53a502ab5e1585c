"""One thread that removes cancelled requests from every queue."""

from __future__ import annotations

import logging
import math
import threading
from typing import Protocol

from edge_server.process.worker import Worker

log = logging.getLogger(__name__)

# While requests wait, every queue is searched this often.
PERIOD_S = 0.05
# The limit of a queue that no configuration bounds: more than all the calls that the gRPC server
# admits together, so that only a model's own flood of responses reaches it.
MOST_WAITING = 4096


class WatchedLine(Protocol):
    """A queue that the watch searches."""

    def drop_dead(self) -> bool:
        """Refuse and remove the cancelled and overdue requests; True where others wait."""
        ...


class LineWatch:
    """Searches all queues while a request waits in one of them.

    A queue removes such requests by itself when it moves. This thread covers the time in which a
    queue stands still: every instance runs, or hangs, and callers come, give up and leave their
    tensors behind.
    """

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._lock = threading.Lock()
        self._lines: tuple[WatchedLine, ...] = ()
        self._requests_wait = threading.Event()
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

    def note_waiting(self) -> None:
        """Wake the watch when a request joins a queue; returns at once."""
        if not self._requests_wait.is_set():
            self._requests_wait.set()
        if not self._started:
            self._start()

    def close(self) -> None:
        self._worker.ask_to_stop()
        self._requests_wait.set()
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
        self._requests_wait.wait()
        # Before the search, so that the next one finds a request that joins during this one.
        self._requests_wait.clear()
        for line in self._lines:
            if _drop_dead(line):
                self._requests_wait.set()
        self._worker.wait(self._period_s)


def _drop_dead(line: WatchedLine) -> bool:
    try:
        return line.drop_dead()
    except Exception:
        log.exception("a line of requests could not be searched")
        return True
