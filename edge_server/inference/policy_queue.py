"""The queue of a batching model: priority levels and limits, and which requests run together."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from edge_server.errors import Unavailable
from edge_server.inference.line_watch import MOST_WAITING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from edge_server.backends.contract import Tensors
    from edge_server.errors import EdgeServerError
    from edge_server.inference.job import Job
    from edge_server.model_config.config import ModelConfig
    from edge_server.model_config.scheduling import DynamicBatching, QueuePolicy
    from edge_server.requests import InferRequest

    # A job that left the queue without a run, and its error.
    RefusedJob = tuple[Job, EdgeServerError]

# A level of this length is searched for cancelled and overdue jobs, and again when it has doubled:
# such jobs do not pile up behind a model that hangs, whatever limit the level has.
_SEARCHED_FROM = 64
# So many empty levels are kept: making them anew takes time.
_EMPTY_LEVELS = 8
# The urgent level comes before the first.
_URGENT = 0


class PolicyQueue:
    """Serves urgent requests first, then level by level, each level in order of arrival.

    Levels are made on demand, however many of them a configuration allows.

    A plain data structure without lock and clock. A cancelled or overdue job leaves the queue when
    the queue moves past it, and `take_refused` returns it; no job is lost.
    """

    def __init__(self, batching: DynamicBatching) -> None:
        self._most_levels = max(1, batching.priority_levels)
        self._policies = batching.priority_queue_policies
        self._default_policy = batching.default_queue_policy
        default = batching.default_priority_level
        self._default = default if 1 <= default <= self._most_levels else 1
        # Keyed by priority, and in that order.
        self._levels: dict[int, _Level] = {}
        self._refused: list[RefusedJob] = []

    def __len__(self) -> int:
        """The number of queued jobs, cancelled and overdue ones included."""
        return sum(map(len, self._levels.values()))

    def add(self, job: Job, now_ns: int) -> None:
        """Append `job` to its level.

        Raises:
            Unavailable: that level is full (Triton's text).
        """
        request = job.request
        level = self._level_of(request)
        if level.full:
            # Dead jobs at the head make room; those further in wait for the queue to move.
            level.settle(now_ns, self._refused)
        elif len(level) >= level.searched_from:
            level.search(now_ns, self._refused)
        if level.full:
            raise Unavailable(f"{request.log_prefix}Exceeds maximum queue size")
        level.add(job, now_ns)

    def ahead_of(self, request: InferRequest) -> int:
        """The number of jobs served before `request`, if it joined now and none came after."""
        last = self._priority_of(request)
        return sum(len(level) for priority, level in self._levels.items() if priority <= last)

    def in_order(self, now_ns: int) -> Iterator[Job]:
        """The jobs to be served, the next one first; jobs dead by `now_ns` leave on the way.

        The queue must not be changed otherwise during the iteration.
        """
        for level in self._levels.values():
            yield from level.walk(now_ns, self._refused)

    def take(self, count: int) -> list[Job]:
        """Remove the first `count` jobs in order, right after `in_order` has passed them."""
        taken: list[Job] = []
        for level in self._levels.values():
            while level and len(taken) < count:
                taken.append(level.pop())
        self._forget_empty()
        return taken

    def settle(self, now_ns: int) -> None:
        """Apply the time limits at the head of every level, also while the queue stands still."""
        for level in self._levels.values():
            level.settle(now_ns, self._refused)
        self._forget_empty()

    def drop_dead(self, now_ns: int) -> None:
        """Drop all jobs dead by `now_ns`, at any position."""
        for level in self._levels.values():
            level.search(now_ns, self._refused)
        self._forget_empty()

    def next_limit_at(self) -> float:
        """When the first time limit at the heads of the levels passes (`time.monotonic()`)."""
        expiries_ns = [level.head_expires_ns for level in self._levels.values()]
        return min((ns / 1e9 for ns in expiries_ns if ns is not None), default=inf)

    def take_refused(self) -> list[RefusedJob]:
        """Return the jobs that died in the queue, each of them once."""
        refused, self._refused = self._refused, []
        return refused

    def clear(self) -> list[Job]:
        """Remove and return all queued jobs, in order."""
        return self.take(len(self))

    def _level_of(self, request: InferRequest) -> _Level:
        """The level of `request`, made on first use."""
        priority = self._priority_of(request)
        level = self._levels.get(priority)
        if level is None:
            policy = self._policies.get(priority) if priority != _URGENT else None
            level = _Level(self._default_policy if policy is None else policy)
            self._levels = dict(sorted({**self._levels, priority: level}.items()))
        return level

    def _priority_of(self, request: InferRequest) -> int:
        if request.urgent:
            return _URGENT
        priority = request.priority
        return priority if 1 <= priority <= self._most_levels else self._default

    def _forget_empty(self) -> None:
        if len(self._levels) > _EMPTY_LEVELS and not all(self._levels.values()):
            self._levels = {n: level for n, level in self._levels.items() if level}


class _Level:
    """One level: `_line` in order of arrival, then `_late`, the expired jobs (DELAY)."""

    __slots__ = ("_late", "_line", "_policy", "searched_from")

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy
        self._line: deque[tuple[Job, int | None]] = deque()
        self._late: deque[Job] = deque()
        self.searched_from = _SEARCHED_FROM

    def __len__(self) -> int:
        return len(self._line) + len(self._late)

    @property
    def full(self) -> bool:
        return len(self) >= (self._policy.max_queue_size or MOST_WAITING)

    @property
    def head_expires_ns(self) -> int | None:
        return self._line[0][1] if self._line else None

    def add(self, job: Job, now_ns: int) -> None:
        policy = self._policy
        timeout_us = policy.default_timeout_us
        if policy.allow_timeout_override and 0 < job.request.timeout_us < timeout_us:
            timeout_us = job.request.timeout_us
        self._line.append((job, now_ns + 1000 * timeout_us if timeout_us else None))

    def pop(self) -> Job:
        return self._line.popleft()[0] if self._line else self._late.popleft()

    def settle(self, now_ns: int, refused: list[RefusedJob]) -> None:
        next(self.walk(now_ns, refused), None)

    def search(self, now_ns: int, refused: list[RefusedJob]) -> None:
        left = sum(1 for _ in self.walk(now_ns, refused))
        self.searched_from = max(_SEARCHED_FROM, 2 * left)

    def walk(self, now_ns: int, refused: list[RefusedJob]) -> Iterator[Job]:
        at = 0
        while at < len(self._line):
            job, expires_ns = self._line[at]
            error = job.death()
            expired = expires_ns is not None and now_ns >= expires_ns
            if error is None and not expired:
                yield job
                at += 1
                continue
            del self._line[at]
            if error is None and self._policy.delay_expired:
                self._late.append(job)
            else:
                refused.append((job, error or Unavailable("Request timeout expired")))
        at = 0
        while at < len(self._late):
            job = self._late[at]
            error = job.death()
            if error is None:
                yield job
                at += 1
            else:
                del self._late[at]
                refused.append((job, error))


@dataclass(frozen=True)
class OpenBatch:
    """The next batch as of now.

    Attributes:
        count: number of requests it takes from the head of the queue; 0 for an empty batch.
        due_ns: when the batch runs if no request joins before; in the past where it is overdue.
    """

    count: int
    due_ns: int


class BatchRule:
    """Requests join a batch in order until one does not fit.

    A batch is due when it reaches a preferred size, cannot grow, or its oldest request has waited
    for the maximum delay. A request fits if it has the same inputs, with the same shapes except for
    the batch dimension and for ragged inputs, and the batch stays within `max_batch_size`. Requests
    are never split.
    """

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
        """The batch at the head of `line` at `now_ns` (`time.monotonic_ns()`)."""
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
        return self._alike_by_config or _alike(one.inputs, other.inputs, self._ragged)


def _alike(one: Tensors, other: Tensors, ragged: frozenset[str]) -> bool:
    return one.keys() == other.keys() and all(
        name in ragged or tensor.shape[1:] == other[name].shape[1:] for name, tensor in one.items()
    )
