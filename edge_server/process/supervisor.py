"""The supervisor of all workers: a dead or stuck worker ends the process, and systemd restarts
it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.errors import InternalError, StageStuck

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_server.process.worker import Worker


class Supervisor:
    """Checks every worker's heartbeat. Only the main loop calls it, so that no timer thread can
    feed the watchdog while a stage is stuck."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = tuple(workers)

    def check(self, now: float) -> None:
        """Return when every worker makes progress or has ended normally.

        Args:
            now: `time.monotonic()`.

        Raises:
            StageStuck: a worker's tick passed its deadline.
            InternalError: a worker ended by an exception.
        """
        for worker in self._workers:
            if worker.failure is not None:
                raise InternalError(f"worker {worker.name}: {worker.failure!r}")
            if worker.stuck(now):
                raise StageStuck(
                    f"worker {worker.name}: no progress for more than {worker.limit_s:g} s"
                )
