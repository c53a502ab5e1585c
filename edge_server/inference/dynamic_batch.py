"""The dynamic batcher: queues the requests of several callers and runs them together."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from bisect import insort
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from edge_server.errors import DeadlineExceeded, EdgeServerError, InternalError, Unavailable
from edge_server.inference.direct import DirectScheduler
from edge_server.inference.execution import Job, stopping
from edge_server.inference.line import MOST_WAITING
from edge_server.inference.registry import Submits
from edge_server.process.threads import Worker

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from edge_server.backends.contract import Instance
    from edge_server.inference.direct import InstancePool
    from edge_server.inference.execution import Executor
    from edge_server.inference.line import LineWatch
    from edge_server.inference.registry import Snapshot
    from edge_server.model_config.config import ModelConfig
    from edge_server.model_config.scheduling import DynamicBatching, QueuePolicy
    from edge_server.requests import InferRequest, Respond, ResponseCallback

    # A job that left the queue without a run, and its error.
    RefusedJob = tuple[Job, EdgeServerError]

log = logging.getLogger(__name__)

# The urgent level comes before the first.
_URGENT = 0


@dataclass(order=True)
class _Place:
    """A job's place in the queue; expired ones follow the others of their level (DELAY)."""

    priority: int
    late: bool
    number: int
    expires_ns: float = field(compare=False)
    job: Job = field(compare=False)


class PolicyQueue:
    """Serves urgent requests first, then level by level, each level in order of arrival. Without
    lock and clock. A cancelled or overdue job leaves the queue when the queue moves past it, and
    `take_refused` returns it; no job is lost."""

    def __init__(self, batching: DynamicBatching) -> None:
        self._most_levels = max(1, batching.priority_levels)
        self._policies = batching.priority_queue_policies
        self._default_policy = batching.default_queue_policy
        default = batching.default_priority_level
        self._default = default if 1 <= default <= self._most_levels else 1
        self._places: list[_Place] = []
        self._sizes: Counter[int] = Counter()
        self._numbers = itertools.count()
        # No time limit passes before this.
        self._limit_ns = inf
        self._refused: list[RefusedJob] = []

    def __len__(self) -> int:
        return len(self._places)

    def add(self, job: Job, now_ns: int) -> None:
        """Append `job` to its level; raise Unavailable where that is full (Triton's text)."""
        request = job.request
        priority = self._priority_of(request)
        policy = self._policy_of(priority)
        most = policy.max_queue_size or MOST_WAITING
        if self._sizes[priority] >= most:
            self.drop_dead(now_ns)
        if self._sizes[priority] >= most:
            raise Unavailable(f"{request.log_prefix}Exceeds maximum queue size")
        timeout_us = policy.default_timeout_us
        if policy.allow_timeout_override and 0 < request.timeout_us < timeout_us:
            timeout_us = request.timeout_us
        expires_ns = now_ns + 1000 * timeout_us if timeout_us else inf
        self._limit_ns = min(self._limit_ns, expires_ns)
        self._put(_Place(priority, False, next(self._numbers), expires_ns, job))

    def ahead_of(self, request: InferRequest) -> int:
        """The number of jobs served before `request`, if it joined now and none came after."""
        last = self._priority_of(request)
        return sum(size for priority, size in self._sizes.items() if priority <= last)

    def in_order(self, now_ns: int) -> Iterator[Job]:
        """The jobs to be served, the next one first; jobs dead by `now_ns` leave on the way.

        The queue must not be changed otherwise during the iteration.
        """
        at = 0
        while at < len(self._places):
            place = self._places[at]
            error = place.job.death()
            if error is None and place.expires_ns > now_ns:
                yield place.job
                at += 1
                continue
            self._remove(at)
            if error is None and self._policy_of(place.priority).delay_expired:
                self._put(_Place(place.priority, True, next(self._numbers), inf, place.job))
            else:
                self._refused.append((place.job, error or Unavailable("Request timeout expired")))

    def take(self, count: int) -> list[Job]:
        """Remove the first `count` jobs in order, right after `in_order` has passed them."""
        taken = self._places[:count]
        self._sizes.subtract(place.priority for place in taken)
        del self._places[:count]
        return [place.job for place in taken]

    def settle(self, now_ns: int) -> None:
        """Apply the time limits, also where the queue does not move."""
        if now_ns >= self._limit_ns:
            self.drop_dead(now_ns)

    def drop_dead(self, now_ns: int) -> None:
        for _ in self.in_order(now_ns):
            pass
        self._limit_ns = min((place.expires_ns for place in self._places), default=inf)

    def next_limit_at(self) -> float:
        """No time limit passes before this (`time.monotonic()`)."""
        return self._limit_ns / 1e9

    def take_refused(self) -> list[RefusedJob]:
        """Return the jobs that died in the queue, each of them once."""
        refused, self._refused = self._refused, []
        return refused

    def clear(self) -> list[Job]:
        return self.take(len(self))

    def _put(self, place: _Place) -> None:
        insort(self._places, place)
        self._sizes[place.priority] += 1

    def _remove(self, at: int) -> None:
        self._sizes[self._places.pop(at).priority] -= 1

    def _priority_of(self, request: InferRequest) -> int:
        if request.urgent:
            return _URGENT
        priority = request.priority
        return priority if 1 <= priority <= self._most_levels else self._default

    def _policy_of(self, priority: int) -> QueuePolicy:
        return (
            self._policies.get(priority, self._default_policy) if priority else self._default_policy
        )


@dataclass(frozen=True)
class OpenBatch:
    """The next batch: the first `count` requests of the queue, which run at `due_ns` if none joins
    before."""

    count: int
    due_ns: int


class BatchRule:
    """Requests join a batch in order until one does not fit: it must have the same inputs, with the
    same shapes except for the batch dimension and for ragged inputs, within `max_batch_size`. A
    batch is due when it reaches a preferred size, cannot grow, or its oldest request has waited for
    the maximum delay. Requests are never split."""

    def __init__(self, config: ModelConfig, batching: DynamicBatching) -> None:
        self._max_size = max(1, config.max_batch_size)
        self._preferred = frozenset(batching.preferred_batch_sizes or [self._max_size])
        self._most_preferred = max(self._preferred)
        self._delay_ns = 1000 * batching.max_queue_delay_us
        self._ragged = config.ragged_inputs
        # With fixed shapes and required inputs only, the request check has compared the requests.
        self._alike_by_config = all(
            not spec.optional and (-1 not in spec.shape or spec.name in self._ragged)
            for spec in config.inputs
        )

    def batch(self, line: Iterable[Job], now_ns: int) -> OpenBatch:
        first: Job | None = None
        count = size = preferred_count = 0
        oldest_ns = now_ns
        can_grow = True
        for job in line:
            job_size = max(1, job.batch_size)
            if first is None:
                first = job
            elif size + job_size > self._max_size or not self._alike(first, job):
                can_grow = False
                break
            count += 1
            size += job_size
            oldest_ns = min(oldest_ns, job.queued_at_ns)
            if size in self._preferred:
                preferred_count = count
            if size >= self._max_size:
                break
        due_ns = oldest_ns + self._delay_ns
        if self._delay_ns and due_ns <= now_ns:
            return OpenBatch(count, due_ns)
        if preferred_count:
            return OpenBatch(preferred_count, now_ns)
        if not can_grow or size >= self._most_preferred:
            return OpenBatch(count, now_ns)
        return OpenBatch(count, due_ns)

    def _alike(self, one: Job, other: Job) -> bool:
        ours, theirs = one.inputs, other.inputs
        return self._alike_by_config or (
            ours.keys() == theirs.keys()
            and all(
                n in self._ragged or t.shape[1:] == theirs[n].shape[1:] for n, t in ours.items()
            )
        )


# An idle worker wakes this often, so that its heartbeat moves.
_LOOK_S = 5.0
# The time limit in which all workers together end their runs.
_STOP_S = 5.0


class DynamicBatchScheduler(Submits):
    """A queue of requests, and as many workers as instances that run them in batches.

    One worker at a time gathers: it waits until a batch is due, takes an instance, and only then
    selects the requests, so that a batch grows while no instance may run. Then the next worker
    gathers. `submit` never waits for a model. A model that hangs shows in `running_since`."""

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

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        job = self._executor.job(request, snapshot, respond)
        with self._work:
            refusal = self._enqueue(job)
            refused = self._queue.take_refused()
        if refusal is not None:
            self._executor.refuse(job, refusal)
        self._refuse(refused)

    def without_queue(self) -> DirectScheduler:
        """Return a scheduler of the same instances that runs each request by itself, at once; it
        is not to be closed. A model's first runs take long, and say nothing of a client's wait."""
        return DirectScheduler(self._executor, self._pool, teaches=False)

    def drop_dead(self) -> bool:
        with self._work:
            self._queue.drop_dead(time.monotonic_ns())
            refused = self._queue.take_refused()
            others_wait = len(self._queue) > 0
            if others_wait:
                self._watch.note_waiting(self._queue.next_limit_at())
            if refused:
                # Those that are left may be due by now: a preferred size, or the first of a shape.
                (self._company if self._gathering else self._work).notify()
        self._refuse(refused)
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
            ahead = self._queue.ahead_of(job.request)
            self._pool.check(job.request, ahead, time.monotonic())
            self._queue.add(job, job.queued_at_ns)
        except (DeadlineExceeded, Unavailable) as error:
            return error
        if self._order is not None:
            job.respond = self._order.place(job.respond)
        self._watch.note_waiting(self._queue.next_limit_at())
        (self._company if self._gathering else self._work).notify()
        return None

    def _serve(self, _now: float) -> bool:
        if self._begin_gathering():
            try:
                self._run_batch()
            except Exception:
                # An instance without its worker would never run again.
                log.exception("model %s: a batch went wrong", self._executor.config.name)
        return not self._closed

    def _begin_gathering(self) -> bool:
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
                with self._work:
                    self._gathering = False
                    if self._queue:
                        self._work.notify()
            self._refuse(refused)
            if jobs:
                self._executor.run(instance, jobs)
        finally:
            if instance is not None:
                self._pool.give_back(instance, teaches=bool(jobs))

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

    def _refuse(self, refused: Iterable[RefusedJob]) -> None:
        for job, error in refused:
            self._executor.refuse(job, error)


class OrderedResponses:
    """Holds each response back until every earlier request has had its last one.

    One thread at a time sends responses, outside the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: deque[_Held] = deque()
        self._sending = False

    def place(self, respond: Respond) -> Respond:
        """Return a callback that replaces `respond` and passes its responses on in order."""
        place = _Held(respond)
        with self._lock:
            self._places.append(place)
        return partial(self._put, place)

    def _put(self, place: _Held, response: ResponseCallback, final: bool) -> None:
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
class _Held:
    respond: Respond
    responses: deque[tuple[ResponseCallback, bool]] = field(default_factory=deque)
