"""One instance with a thread of its own."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from edge_server.process.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edge_server.inference.execution import Executor
    from edge_server.inference.instance_pool import InstancePool
    from edge_server.inference.job import Job

log = logging.getLogger(__name__)

# Pause after an unforeseen error, so that a repeating one does not fill the log.
_REST_S = 0.1


class InstanceThread:
    """Calls `tick` until it is stopped, whatever `tick` raises, then closes the instance.

    Args:
        name: the thread's name.
        pool: holds the one instance.
        tick: checks once for work, given `time.monotonic()`; without work it waits on `wake` for a
            bounded time.
        lock: the scheduler's; `wake` belongs to it.
    """

    def __init__(
        self, name: str, pool: InstancePool, tick: Callable[[float], None], lock: threading.Lock
    ) -> None:
        self.wake = threading.Condition(lock)
        self._pool = pool
        self._tick = tick
        self._ident: int | None = None
        self._closed = False
        self._worker = Worker(name, self._note_and_tick, on_end=self._close)

    def start(self) -> None:
        self._worker.start()

    def run(self, executor: Executor, jobs: Sequence[Job]) -> None:
        """Run `jobs` as one batch; to be called by `tick`."""
        instance = self._pool.take(urgent=False, deadline=None)
        try:
            executor.run(instance, jobs)
        finally:
            self._pool.give_back(instance)

    def running_since(self) -> float:
        """When the unfinished run began (`time.monotonic()`); infinity where nothing runs."""
        return self._pool.running_since()

    def ask_to_stop(self) -> None:
        """Let the thread close the instance and end; returns at once."""
        with self.wake:
            self._worker.ask_to_stop()
            self.wake.notify()

    def stop(self) -> None:
        """Return when the instance is closed, unless its run hangs.

        The thread itself may call this too: the last response of a replaced model ends the lease
        on that model. The current tick is then the last one.
        """
        if self._ident == threading.get_ident():
            self._worker.ask_to_stop()
            self._close()
            return
        self.ask_to_stop()
        self._worker.stop()
        if not self._worker.alive:
            # The thread may never have been started.
            self._close()

    def _note_and_tick(self, now: float) -> None:
        self._ident = threading.get_ident()
        try:
            self._tick(now)
        except Exception:
            # An instance without its thread would never run again.
            log.exception("instance %s: a run went wrong", self._worker.name)
            self._worker.wait(_REST_S)

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._pool.close()
