"""Threads for ensemble branches that run side by side."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from edge_server.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.inference.line_watch import LineWatch

log = logging.getLogger(__name__)

# Threads start on first use, and stay. They mostly wait for an instance, so they outnumber the
# cores.
LIMIT = 32


class Task(NamedTuple):
    """A task for a thread.

    Attributes:
        is_over: whether the task is no longer needed.
        dropped: called where the task was not run because it was over.
    """

    do: Callable[[], None]
    is_over: Callable[[], bool]
    dropped: Callable[[], None]


class StepThreads:
    """Runs tasks on a few threads of its own, shared by all ensembles.

    No caller ever waits here for a thread: `try_run` refuses, `run` queues the task. The queue
    holds one task for each step that a request in flight can run next, and no more.

    Args:
        limit: at least 1; with 0 `try_run` always refuses and queued tasks never run.
        watch: drops ended tasks while every thread is busy; None without such a watch.
    """

    def __init__(self, limit: int = LIMIT, watch: LineWatch | None = None) -> None:
        self._limit = limit
        self._watch = watch
        self._changed = threading.Condition()
        self._tasks: deque[Task] = deque()
        self._threads: list[threading.Thread] = []
        self._free = 0
        self._closed = False

    def try_run(self, do: Callable[[], None]) -> bool:
        """Run `do` at once on an idle thread; False where there is none."""
        with self._changed:
            return self._offer(Task(do, _never, _nothing))

    def run(
        self,
        do: Callable[[], None],
        *,
        is_over: Callable[[], bool] | None = None,
        dropped: Callable[[], None] | None = None,
    ) -> None:
        """Run `do` as soon as a thread is free, never on the caller's.

        Args:
            is_over: whether `do` is no longer needed; without it `do` always is.
            dropped: called where `do` was not run because it was over.

        Raises:
            Unavailable: there is no thread, and the system gives none.
        """
        task = Task(do, is_over or _never, dropped or _nothing)
        with self._changed:
            if self._offer(task):
                return
            if not self._closed and (self._threads or not self._limit):
                # Every thread has a task, or one queued before this, and then takes this one.
                self._tasks.append(task)
                if self._watch is not None:
                    self._watch.note_waiting()
                return
        # A request that has outlived the server's stop, whose caller may still be there.
        _started(threading.Thread(target=do, name="step-late", daemon=True))

    def drop_dead(self) -> bool:
        """See `WatchedLine.drop_dead`."""
        with self._changed:
            tasks = list(self._tasks)
        # Outside the lock, because `is_over` may respond to a caller.
        over = [task for task in tasks if task.is_over()]
        dropped = []
        with self._changed:
            for task in over:
                with suppress(ValueError):
                    self._tasks.remove(task)
                    dropped.append(task)
            others_wait = bool(self._tasks)
        for task in dropped:
            task.dropped()
        return others_wait

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
        try:
            _started(thread)
        except Unavailable:
            return False
        self._threads.append(thread)
        self._tasks.append(task)
        self._free += 1
        return True

    def close(self, patience_s: float = 1.0) -> None:
        """Refuse new tasks, wait `patience_s` for the threads at most; queued tasks still run."""
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
                task.do()
            except Exception:
                log.exception("ensembles: a step raised")
            del task
            with self._changed:
                self._free += 1


def _started(thread: threading.Thread) -> None:
    """Raises: Unavailable: the system gives no thread."""
    try:
        thread.start()
    except RuntimeError as error:
        raise Unavailable(f"no thread is left for a step of the ensemble: {error}") from error


def _never() -> bool:
    return False


def _nothing() -> None:
    pass
