"""Threads for the branches of ensembles that run side by side."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    Task = Callable[[], None]

log = logging.getLogger(__name__)

# Threads start when they are first needed, and stay. They mostly wait for an instance, so they
# are more than the cores.
LIMIT = 32


class StepThreads:
    """Runs tasks on a few threads of its own, shared by all ensembles.

    Nobody ever waits here for a thread: who asks is told that there is none, or leaves its task
    in line, where there is one for each step that a request in flight can run next and no more.

    Args:
        limit: at least 1; with 0 `try_run` finds nobody, and nobody takes what is in line.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        self._tasks: deque[Task] = deque()
        self._threads: list[threading.Thread] = []
        self._free = 0
        self._closed = False

    def try_run(self, task: Task) -> bool:
        """Run `task` at once on a thread that has nothing to do; False where there is none."""
        with self._changed:
            return self._offer(task)

    def run(self, task: Task) -> None:
        """Run `task` as soon as a thread is free, never on the caller's."""
        with self._changed:
            if self._offer(task):
                return
            if not self._closed:
                # Every thread has a task, or one before this in line, and looks here after it.
                self._tasks.append(task)
                return
        # A request that has outlived the server's stop; its caller may still be there.
        threading.Thread(target=task, name="step-late", daemon=True).start()

    def _offer(self, task: Task) -> bool:
        if self._closed:
            return False
        if self._free > len(self._tasks):
            self._tasks.append(task)
            self._changed.notify()
            return True
        if len(self._threads) >= self._limit:
            return False
        name = f"step-{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)
        self._tasks.append(task)
        self._free += 1
        return True

    def close(self, patience_s: float = 1.0) -> None:
        """Take no more; what is in line still runs. Waits so long for the threads to end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            threads = list(self._threads)
        until = time.monotonic() + patience_s
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._tasks:
                    if self._closed:
                        return
                    self._changed.wait()
                task = self._tasks.popleft()
                self._free -= 1
            try:
                task()
            except Exception:
                log.exception("ensembles: a step raised")
            del task
            with self._changed:
                self._free += 1
