"""One thread that sees to it that who is not waited for any more leaves every line."""

from __future__ import annotations

import logging
import math
import threading
from typing import Protocol

from edge_server.process.worker import Worker

log = logging.getLogger(__name__)

# As long as somebody waits, every line is looked at this often.
PERIOD_S = 0.05
# A line that no configuration bounds takes no more than this: more than all the calls that the
# gRPC server lets in together, so that only a model's own flood of responses meets it.
MOST_WAITING = 4096


class Line(Protocol):
    """Requests that wait for something."""

    def drop_dead(self) -> bool:
        """Answer those that nobody waits for, and forget them; whether any others wait."""
        ...


class LineWatch:
    """Looks at all lines while somebody waits in one of them.

    A line looks at who stands in it when it moves. This is for the time in which it does not move:
    every instance runs, or hangs, and callers come, give up and leave their tensors behind.
    """

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._lock = threading.Lock()
        self._lines: tuple[Line, ...] = ()
        self._somebody_waits = threading.Event()
        self._worker = Worker("lines", self._tick, deadline_s=math.inf)
        self._started = False

    def add(self, line: Line) -> None:
        """Look at `line`, too, from now on."""
        with self._lock:
            self._lines = (*self._lines, line)

    def remove(self, line: Line) -> None:
        """Look at it no more."""
        with self._lock:
            self._lines = tuple(each for each in self._lines if each is not line)

    def somebody_waits(self) -> None:
        """To be called by a line that somebody joins; returns at once."""
        if not self._somebody_waits.is_set():
            self._somebody_waits.set()
        if not self._started:
            self._start()

    def close(self) -> None:
        self._worker.ask_to_stop()
        self._somebody_waits.set()
        self._worker.stop(timeout_s=1.0)

    def _start(self) -> None:
        with self._lock:
            if self._started:
                return
            try:
                self._worker.start()
            except RuntimeError as error:
                log.warning("nobody looks at the lines for now: %s", error)
                return
            self._started = True

    def _tick(self, _now: float) -> None:
        self._somebody_waits.wait()
        # Before the look: who joins during it is looked at the next time.
        self._somebody_waits.clear()
        for line in self._lines:
            if _drop_dead(line):
                self._somebody_waits.set()
        self._worker.wait(self._period_s)


def _drop_dead(line: Line) -> bool:
    try:
        return line.drop_dead()
    except Exception:
        log.exception("a line could not be looked at")
        return True
