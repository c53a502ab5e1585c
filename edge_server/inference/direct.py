"""Direct scheduling: nothing is batched, nothing is queued."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from edge_server.errors import EdgeServerError
from edge_server.inference.expected_wait import ExpectedWait
from edge_server.inference.job import Job

if TYPE_CHECKING:
    from edge_server.backends.contract import Instance
    from edge_server.inference.execution import Executor
    from edge_server.inference.instance_pool import InstancePool
    from edge_server.inference.snapshot import Snapshot
    from edge_server.requests import InferRequest, Respond


class DirectScheduler:
    """The caller's own thread takes an idle instance and runs: no queue, no hop.

    Where every instance is busy the caller waits for its turn, or for its deadline; it is turned
    away at once where its turn would come too late.
    """

    def __init__(self, executor: Executor, pool: InstancePool) -> None:
        self._executor = executor
        self._pool = pool
        self._expected_wait = ExpectedWait(len(pool))

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        job = Job(self._executor.config, request, snapshot, respond)
        try:
            self._check_wait(request)
            instance = self._take(job)
        except EdgeServerError as error:
            self._executor.refuse(job, error)
            return
        began = time.monotonic()
        try:
            self._executor.run(instance, (job,))
        finally:
            self._pool.give_back(instance)
        self._expected_wait.ran(time.monotonic() - began)

    def pending(self) -> int:
        return self._pool.waiting()

    def longest_run_s(self, now: float) -> float:
        return self._pool.longest_run_s(now)

    def close(self) -> None:
        self._pool.close()

    def _check_wait(self, request: InferRequest) -> None:
        """Raises: DeadlineExceeded, Unavailable: its turn would come too late."""
        if request.deadline is None:
            return
        now = time.monotonic()
        running_s = 0.0 if self._pool.any_idle else self._pool.longest_run_s(now)
        ahead = self._pool.waiting()
        self._expected_wait.check(request, ahead=ahead, running_s=running_s, now=now)

    def _take(self, job: Job) -> Instance:
        """Raises: EdgeServerError: nobody waits for it any more."""
        request = job.request
        instance = self._pool.take(
            urgent=request.urgent, deadline=request.deadline, cancellation=request.cancellation
        )
        death = job.death()
        if death is not None:
            self._pool.give_back(instance)
            raise death
        return instance
