"""Threads for a model's nested calls, which may block."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# Further concurrent calls of a model wait for its own earlier calls.
_MOST_THREADS = 16
_MOST_WORK = 1024


class NestedCallThreads:
    """One thread per unfinished call, made on demand, at most 16.

    Args:
        name: of the instance, for the list of threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._busy = 0
        self._closed = False

    def run(self, work: Callable[[], None]) -> bool:
        """Run `work`, which must not raise, on a thread; after `close` the work is dropped.

        Returns:
            False when too many calls already wait.

        Raises:
            RuntimeError: no thread is running, and the system refuses a new one.
        """
        with self._lock:
            if self._closed:
                return True
            if self._busy >= _MOST_WORK:
                return False
            if self._busy >= len(self._threads) < _MOST_THREADS:
                self._start_one()
            self._busy += 1
        self._work.put(work)
        return True

    def close(self) -> None:
        """Start no further work; each thread ends with its current work."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._work.put(None)

    def _start_one(self) -> None:
        thread = threading.Thread(target=self._run_all, name=f"calls of {self._name}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:
                raise
            # A running thread will take the work.
            return
        self._threads.append(thread)

    def _run_all(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            with self._lock:
                self._busy -= 1
