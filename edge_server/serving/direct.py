"""Direct scheduling: nothing is batched, nothing is queued."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.errors import EdgeServerError
from edge_server.serving.execution import Job

if TYPE_CHECKING:
    from edge_server.requests import InferRequest, Respond
    from edge_server.serving.execution import Executor
    from edge_server.serving.instance_pool import InstancePool
    from edge_server.serving.snapshot import Snapshot


class DirectScheduler:
    """The caller's own thread takes an idle instance and runs: no queue, no hop.

    Where every instance is busy the caller waits for its turn, or for its deadline.
    """

    def __init__(self, executor: Executor, pool: InstancePool) -> None:
        self._executor = executor
        self._pool = pool

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        job = Job(self._executor.config, request, snapshot, respond)
        try:
            instance = self._pool.take(urgent=request.urgent, deadline=request.deadline)
        except EdgeServerError as error:
            self._executor.refuse(job, error)
            return
        try:
            death = job.death()
            if death is None:
                self._executor.run(instance, (job,))
            else:
                self._executor.refuse(job, death)
        finally:
            self._pool.give_back(instance)

    def pending(self) -> int:
        return self._pool.waiting()

    def longest_run_s(self, now: float) -> float:
        return self._pool.longest_run_s(now)

    def close(self) -> None:
        self._pool.close()
