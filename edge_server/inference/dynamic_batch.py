"""The dynamic batcher: queues the requests of several callers and runs them together."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from edge_server.errors import DeadlineExceeded, EdgeServerError, InternalError, Unavailable
from edge_server.inference.direct import DirectScheduler
from edge_server.inference.instance_pool import ExpectedWait
from edge_server.inference.job import Job, stopping
from edge_server.inference.policy_queue import BatchRule, PolicyQueue
from edge_server.inference.schedulers import infer_by_submit
from edge_server.process.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from edge_server.backends.contract import Instance
    from edge_server.errors import EdgeServerError
    from edge_server.inference.execution import Executor
    from edge_server.inference.instance_pool import InstancePool
    from edge_server.inference.line_watch import LineWatch
    from edge_server.inference.policy_queue import RefusedJob
    from edge_server.inference.snapshot import Snapshot
    from edge_server.model_config.scheduling import DynamicBatching
    from edge_server.requests import InferRequest, InferResponse, Respond, ResponseCallback

log = logging.getLogger(__name__)

# An idle worker wakes this often, so that its heartbeat moves.
_LOOK_S = 5.0
# The time limit in which all workers together end their runs.
_STOP_S = 5.0


class DynamicBatchScheduler:
    """A queue of requests, and as many workers as instances that run them in batches.

    One worker at a time gathers: it waits until a batch is due, takes an instance, and only then
    selects the requests, so that a batch grows while every instance is busy or the rate limiter
    holds the instances back. Then the next worker gathers. `submit` never waits for a model, and
    refuses at once a request whose response would come too late.

    The workers have no supervisor: a model that hangs shows in `running_since`.

    Args:
        watch: applies the time limits of the queue, also while every worker runs a model.

    Raises:
        InternalError: the system gives no thread; the pool is closed.
    """

    def __init__(
        self,
        executor: Executor,
        pool: InstancePool,
        batching: DynamicBatching,
        watch: LineWatch,
    ) -> None:
        config = executor.config
        self._executor = executor
        self._pool = pool
        self._rule = BatchRule(config, batching)
        self._queue = PolicyQueue(batching)
        self._expected_wait = ExpectedWait(len(pool), config.max_batch_size)
        self._order = OrderedResponses() if batching.preserve_ordering else None
        lock = threading.Lock()
        self._work = threading.Condition(lock)
        self._company = threading.Condition(lock)
        self._gathering = False
        self._closed = False
        self._workers = [Worker(f"{config.name}-{i}", self._serve) for i in range(len(pool))]
        self._watch = watch
        try:
            for worker in self._workers:
                worker.start()
            self._watch.add(self)
        except RuntimeError as error:
            self.close()
            raise InternalError(f"model '{config.name}' gets no thread: {error}") from error

    def infer(self, request: InferRequest, snapshot: Snapshot) -> InferResponse:
        return infer_by_submit(self, request, snapshot)

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        job = Job(self._executor.config, request, snapshot, respond)
        with self._work:
            refusal = self._enqueue(job)
            refused = self._queue.take_refused()
        if refusal is not None:
            self._executor.refuse(job, refusal)
        self._refuse(refused)

    def without_queue(self) -> DirectScheduler:
        """Return a scheduler of the same instances that runs each request by itself, at once; it
        is not to be closed."""
        return DirectScheduler(self._executor, self._pool)

    def drop_dead(self) -> bool:
        """See `WatchedLine.drop_dead`; the queue's time limits count here, too."""
        with self._work:
            self._queue.drop_dead(time.monotonic_ns())
            refused = self._queue.take_refused()
            others_wait = len(self._queue) > 0
            if others_wait:
                self._watch.note_waiting(self._queue.next_limit_at())
        self._refuse(refused)
        if self._order is not None:
            self._order.forget_dead()
        return others_wait

    def pending(self) -> int:
        return len(self._queue)

    def running_since(self) -> float:
        return self._pool.running_since()

    def close(self) -> None:
        """Refuse the queued requests, end the workers, release the instances.

        May be called on a worker, from the response that releases the last lease on this model.
        """
        self._watch.remove(self)
        with self._work:
            self._closed = True
            waiting = self._queue.clear()
            refused = self._queue.take_refused()
            self._work.notify_all()
            self._company.notify_all()
        for job in waiting:
            self._executor.refuse(job, stopping(job.request))
        self._refuse(refused)
        until = time.monotonic() + _STOP_S
        for worker in self._workers:
            worker.stop(max(0.0, until - time.monotonic()))
        self._pool.close()

    def _enqueue(self, job: Job) -> EdgeServerError | None:
        """Queue `job` and wake the worker it concerns; return the error where it is refused."""
        if self._closed:
            return stopping(job.request)
        try:
            self._check_wait(job.request)
            self._queue.add(job, job.queued_at_ns)
        except (DeadlineExceeded, Unavailable) as error:
            return error
        if self._order is not None:
            job.respond = self._order.place(job.respond, job.gone)
        self._watch.note_waiting(self._queue.next_limit_at())
        (self._company if self._gathering else self._work).notify()
        return None

    def _check_wait(self, request: InferRequest) -> None:
        """Raises: DeadlineExceeded, Unavailable: the run would start too late."""
        now = time.monotonic()
        ahead, running_s = self._queue.ahead_of(request), self._pool.running_s(now)
        self._expected_wait.check(request, ahead=ahead, running_s=running_s, now=now)

    def _serve(self, _now: float) -> bool:
        """Run one batch, or wait a bounded time for requests; False ends the worker."""
        if self._begin_gathering():
            try:
                self._run_batch()
            except Exception:
                # An instance without its worker would never run again.
                log.exception("model %s: a batch went wrong", self._executor.config.name)
        return not self._closed

    def _begin_gathering(self) -> bool:
        """Whether requests wait and no other worker gathers; waits a bounded time for that."""
        with self._work:
            if not self._may_gather() and not self._closed:
                self._work.wait(_LOOK_S)
            if self._closed or not self._may_gather():
                return False
            self._gathering = True
            return True

    def _may_gather(self) -> bool:
        return len(self._queue) > 0 and not self._gathering

    def _run_batch(self) -> None:
        instance: Instance | None = None
        jobs: list[Job] = []
        try:
            try:
                self._wait_until_due()
                soon = time.monotonic() + _LOOK_S
                instance = self._pool.take(urgent=False, deadline=soon)
                jobs, refused = self._take_batch()
            except DeadlineExceeded:
                return
            finally:
                self._end_gathering()
            self._refuse(refused)
            if jobs:
                began = time.monotonic()
                self._executor.run(instance, jobs)
                self._expected_wait.ran(time.monotonic() - began)
        finally:
            if instance is not None:
                self._pool.give_back(instance)

    def _wait_until_due(self) -> None:
        """Return when the batch at the head of the queue is due, or the queue is empty."""
        due = False
        while not due:
            with self._company:
                now_ns = time.monotonic_ns()
                self._queue.settle(now_ns)
                due_ns = self._rule.batch(self._queue.in_order(now_ns), now_ns).due_ns
                refused = self._queue.take_refused()
                due = due_ns <= now_ns or self._closed or not self._queue
                if not due and not refused:
                    # A delay may exceed the longest timeout of a thread's wait.
                    self._company.wait(min(_LOOK_S, (due_ns - now_ns) / 1e9))
            self._refuse(refused)

    def _take_batch(self) -> tuple[list[Job], list[RefusedJob]]:
        with self._work:
            now_ns = time.monotonic_ns()
            self._queue.settle(now_ns)
            batch = self._rule.batch(self._queue.in_order(now_ns), now_ns)
            return self._queue.take(batch.count), self._queue.take_refused()

    def _end_gathering(self) -> None:
        with self._work:
            self._gathering = False
            if self._queue:
                self._work.notify()

    def _refuse(self, refused: Iterable[RefusedJob]) -> None:
        for job, error in refused:
            self._executor.refuse(job, error)


class OrderedResponses:
    """Holds each response back until every earlier request has had its last one.

    One thread at a time sends responses, outside the lock. A callback that raises delays no other
    response.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: deque[_Place] = deque()
        self._sending = False

    def place(
        self, respond: Respond, gone: Callable[[], EdgeServerError | None] = lambda: None
    ) -> Respond:
        """Return a callback that replaces `respond` and passes its responses on in order.

        Args:
            gone: the error of a cancelled or overdue request; None while its caller waits.
        """
        place = _Place(respond, gone)
        with self._lock:
            self._places.append(place)
        return partial(self._put, place)

    def forget_dead(self) -> None:
        """Drop held responses whose callers have gone; their places in the order stay."""
        with self._lock:
            for place in self._places:
                if place.responses and (gone := place.gone()) is not None:
                    final = place.responses[-1][1]
                    place.responses = deque([(gone, True)] if final else ())

    def _put(self, place: _Place, response: ResponseCallback, final: bool) -> None:
        """Send this response and those it held back, unless an earlier request is unfinished."""
        with self._lock:
            place.responses.append((response, final))
            if self._sending:
                return
            self._sending = True
        while (turn := self._next()) is not None:
            respond, response, final = turn
            try:
                respond(response, final)
            except Exception:
                log.exception("a response could not be given")

    def _next(self) -> tuple[Respond, ResponseCallback, bool] | None:
        with self._lock:
            if not self._places or not self._places[0].responses:
                self._sending = False
                return None
            place = self._places[0]
            response, final = place.responses.popleft()
            if final:
                self._places.popleft()
            return place.respond, response, final


@dataclass(eq=False)
class _Place:
    """One request's place in the order, with the responses that are held back."""

    respond: Respond
    gone: Callable[[], EdgeServerError | None]
    responses: deque[tuple[ResponseCallback, bool]] = field(default_factory=deque)
