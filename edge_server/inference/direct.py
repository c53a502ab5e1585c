"""The direct scheduler: no batching, no queue."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from edge_server.errors import EdgeServerError
from edge_server.inference.instance_pool import ExpectedWait
from edge_server.inference.job import Job
from edge_server.inference.schedulers import infer_by_submit

if TYPE_CHECKING:
    from edge_server.backends.contract import Instance
    from edge_server.inference.execution import Executor
    from edge_server.inference.instance_pool import InstancePool
    from edge_server.inference.snapshot import Snapshot
    from edge_server.requests import InferRequest, InferResponse, Respond


class DirectScheduler:
    """Runs the model on the caller's own thread with an idle instance: no queue, no thread hop.

    Where every instance is busy the caller waits for one until its deadline; a request whose
    expected wait exceeds its deadline is refused at once.
    """

    def __init__(self, executor: Executor, pool: InstancePool) -> None:
        self._executor = executor
        self._pool = pool
        self._expected_wait = ExpectedWait(len(pool))

    def infer(self, request: InferRequest, snapshot: Snapshot) -> InferResponse:
        if self._executor.config.decoupled:
            return infer_by_submit(self, request, snapshot)
        job = Job(self._executor.config, request, snapshot)
        try:
            instance = self._take(job)
        except EdgeServerError as error:
            self._executor.count_failure(job, error)
            raise
        try:
            return self._executor.infer(instance, job)
        finally:
            self._expected_wait.ran(self._pool.give_back(instance))

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        job = Job(self._executor.config, request, snapshot, respond)
        try:
            instance = self._take(job)
        except EdgeServerError as error:
            self._executor.refuse(job, error)
            return
        try:
            self._executor.run(instance, (job,))
        finally:
            self._expected_wait.ran(self._pool.give_back(instance))

    def pending(self) -> int:
        return self._pool.waiting()

    def running_since(self) -> float:
        return self._pool.running_since()

    def close(self) -> None:
        self._pool.close()

    def _take(self, job: Job) -> Instance:
        """Take an instance for `job`.

        Raises:
            DeadlineExceeded, Unavailable: an instance would be free too late.
            DeadlineExceeded, Cancelled: see `InstancePool.take`.
        """
        request = job.request
        if request.deadline is not None:
            now = time.monotonic()
            ahead, running_s = self._pool.waiting(), self._pool.running_s(now)
            self._expected_wait.check(request, ahead=ahead, running_s=running_s, now=now)
        return self._pool.take(
            urgent=request.urgent, deadline=request.deadline, cancellation=request.cancellation
        )
