"""The direct scheduler: no batching, no queue."""

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
    """Runs the model on the caller's own thread with an idle instance: no queue, no thread hop.

    Where every instance is busy the caller waits for one until its deadline; a request whose
    expected wait exceeds its deadline is refused at once.
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
        """Raises: DeadlineExceeded, Unavailable: an instance would be free too late."""
        if request.deadline is None:
            return
        now = time.monotonic()
        running_s = 0.0 if self._pool.any_idle else self._pool.longest_run_s(now)
        ahead = self._pool.waiting()
        self._expected_wait.check(request, ahead=ahead, running_s=running_s, now=now)

    def _take(self, job: Job) -> Instance:
        """Raises: EdgeServerError: the request is cancelled or past its deadline."""
        request = job.request
        instance = self._pool.take(
            urgent=request.urgent, deadline=request.deadline, cancellation=request.cancellation
        )
        death = job.death()
        if death is not None:
            self._pool.give_back(instance)
            raise death
        return instance
