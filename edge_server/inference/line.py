"""The watch over all waiting lines, the threads and slots of ensembles' steps, and the limiter
of which instances of all models may run at once, by resources and priority."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from edge_server.errors import (
    Cancelled,
    DeadlineExceeded,
    EdgeServerError,
    ModelConfigError,
    Unavailable,
)
from edge_server.process.threads import ThreadPool, Worker, start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from edge_server.model_config.config import InstanceGroup
    from edge_server.requests import Cancellation


log = logging.getLogger(__name__)

T = TypeVar("T")

# While requests wait, every queue is searched this often, and when a time limit passes.
PERIOD_S = 0.05
# The shortest time between two searches.
_LEAST_S = 0.001
# The limit of a queue that no configuration bounds: more than all the calls that the gRPC server
# admits together, so that only a model's own flood of responses reaches it.
MOST_WAITING = 4096


class Waiter(Generic[T]):
    """A thread that waits in a line, whose `lock` is held while it is `given` something, until its
    deadline, or until its caller cancels."""

    __slots__ = ("_cancelled", "_turn", "_waits", "given")

    def __init__(self, lock: threading.Lock, cancellation: Cancellation | None = None) -> None:
        self.given: T | None = None
        self._turn = threading.Condition(lock)
        self._waits = True
        self._cancelled = False
        if cancellation is not None:
            cancellation.when_cancelled(self._cancel)

    def give(self, value: T) -> None:
        self.given = value
        self._turn.notify()

    def wait(self, deadline: float | None, too_late: str) -> T:
        """Return what was given; raise DeadlineExceeded with `too_late` after `deadline`, Cancelled
        where the caller cancelled before."""
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        self._turn.wait_for(lambda: self._cancelled or self.given is not None, left_s)
        self._waits = False
        if self.given is not None:
            return self.given
        if self._cancelled:
            raise Cancelled("the caller cancelled the request")
        raise DeadlineExceeded(too_late)

    def _cancel(self) -> None:
        # Also called after a call with a response, when no caller waits any more.
        with self._turn:
            if self._waits:
                self._cancelled = True
                self._turn.notify()


class WatchedLine(Protocol):
    def drop_dead(self) -> bool:
        """Refuse and remove the cancelled and overdue requests; True where others wait."""
        ...


class LineWatch:
    """Searches all queues while a request waits in one of them, and when its time limit passes. A
    queue removes such requests when it moves; this thread covers the time in which it stands still,
    as every instance runs, or hangs, and callers give up and leave their tensors behind."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._lock = threading.Lock()
        self._lines: tuple[WatchedLine, ...] = ()
        self._changed = threading.Condition()
        self._search_at = math.inf
        self._worker = Worker("lines", self._tick, deadline_s=math.inf)
        self._started = False

    def add(self, line: WatchedLine) -> None:
        with self._lock:
            self._lines = (*self._lines, line)

    def remove(self, line: WatchedLine) -> None:
        with self._lock:
            self._lines = tuple(each for each in self._lines if each is not line)

    def note_waiting(self, limit_at: float = math.inf) -> None:
        """Have the queues searched while a request waits in one of them, and when a time limit
        passes (`limit_at`, of `time.monotonic()`); returns at once.
        """
        now = time.monotonic()
        at = min(now + self._period_s, max(limit_at, now + _LEAST_S))
        if at < self._search_at:
            with self._changed:
                self._search_at = min(at, self._search_at)
                self._changed.notify()
        if not self._started:
            self._start()

    def close(self) -> None:
        self._worker.ask_to_stop()
        with self._changed:
            self._search_at = 0.0
            self._changed.notify()
        self._worker.stop(timeout_s=1.0)

    def _start(self) -> None:
        with self._lock:
            if self._started:
                return
            try:
                self._worker.start()
            except RuntimeError as error:
                log.warning("requests whose callers have gone wait on for now: %s", error)
                return
            self._started = True

    def _tick(self, _now: float) -> None:
        with self._changed:
            while (left_s := self._search_at - time.monotonic()) > 0:
                self._changed.wait(None if left_s == math.inf else left_s)
            # Before the search, so that a request that joins during this one has the next.
            self._search_at = math.inf
        for line in self._lines:
            try:
                others_wait = line.drop_dead()
            except Exception:
                log.exception("a line of requests could not be searched")
                others_wait = True
            if others_wait:
                self.note_waiting()


# Threads start on first use, and stay. They mostly wait for an instance, so they outnumber the
# cores.
LIMIT = 32


class Task(Protocol):
    def run(self) -> None: ...

    def run_later(self) -> None:
        """Run the step on a step thread, as a slot may be free; return at once."""
        ...

    def is_over(self) -> bool:
        """Whether the request has ended; its caller then has its response."""
        ...

    def dropped(self) -> None:
        """The task was over before it got a thread."""
        ...


class StepThreads(ThreadPool[Task]):
    """Runs tasks on a few threads, shared by all ensembles. No caller ever waits here for a thread:
    `try_run` refuses, `run` queues the task. The queue holds one task for each step that a request
    in flight can run next, and no more."""

    def __init__(self, limit: int = LIMIT, watch: LineWatch | None = None) -> None:
        super().__init__(limit, "step")
        self.watch = watch or LineWatch()

    def run(self, task: Task) -> None:
        """Run `task` as soon as a thread is free, never on the caller's, unless it is over then.

        Raises: Unavailable: there is no thread, and the system gives none.
        """
        with self.lock:
            if self._offer(task):
                return
            if not self._closed and (self._threads or not self._most):
                # Every thread has a task, or one queued before this, and then takes this one.
                self.waiting.append(task)
                self.watch.note_waiting()
                return
        # A request that has outlived the server's stop, whose caller may still be there.
        if not start_thread("step-late", task.run):
            raise Unavailable(
                "no thread is left for a step of the ensemble: the system gives no more"
            )

    def drop_dead(self) -> bool:
        for task in _drop_over(self.waiting, self.lock):
            task.dropped()
        return bool(self.waiting)


class StepSlots:
    """Limits how many requests one step of an ensemble has at its model, over all callers:
    `max_inflight_requests`. Only a request at the model holds a slot, so a caller that waits for
    one waits for models only."""

    def __init__(self, limit: int, watch: LineWatch) -> None:
        self._limit = limit
        self._watch = watch
        self._taken = 0
        self._parked: deque[Task] = deque()
        self._held: list[Task] = []
        self._changed = threading.Condition()

    def take(self, task: Task, *, urgent: bool) -> bool:
        """Take a slot; where none is left, `task` is run later once one may be free.

        Raises: Unavailable: too many tasks are parked.
        """
        with self._changed:
            if self._taken < self._limit:
                self._taken += 1
                return True
            if len(self._parked) >= MOST_WAITING:
                raise Unavailable(
                    f"Exceeds maximum queue size: {MOST_WAITING} requests wait for a step already"
                )
            (self._parked.appendleft if urgent else self._parked.append)(task)
            self._watch.note_waiting()
            return False

    def wait(self, deadline: float | None, held: Task, given_up: Callable[[], bool]) -> bool:
        """Wait for a slot and take it; False after `deadline`, or once `given_up` is true, as
        `held.is_over`, which is called now and then, may make it.
        """
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        with self._changed:
            self._held.append(held)
            self._watch.note_waiting()
            try:
                free = self._changed.wait_for(
                    lambda: given_up() or self._taken < self._limit, left_s
                )
            finally:
                self._held.remove(held)
            if not free or given_up():
                return False
            self._taken += 1
            return True

    def drop_dead(self) -> bool:
        """Drop the tasks of ended requests; whether any others are parked or held."""
        for task in tuple(self._held):
            task.is_over()
        _drop_over(self._parked, self._changed)
        return bool(self._parked or self._held)

    def give_back(self) -> None:
        with self._changed:
            self._taken -= 1
            self._changed.notify_all()
        self.wake_next()

    def wake_next(self) -> None:
        """Wake one parked task where a slot is free that its intended taker did not take."""
        with self._changed:
            free = self._taken < self._limit
            parked = self._parked.popleft() if free and self._parked else None
        if parked is not None:
            parked.run_later()

    def look_again(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _drop_over(tasks: deque[Task], lock: threading.Lock | threading.Condition) -> list[Task]:
    with lock:
        waiting = tuple(tasks)
    # Outside the lock, because `is_over` may respond to a caller.
    over = [task for task in waiting if task.is_over()]
    dropped = []
    with lock:
        for task in over:
            with suppress(ValueError):
                tasks.remove(task)
                dropped.append(task)
    return dropped


# The device of all instances on the CPU, as Triton counts it.
_CPU_DEVICE = 0


@dataclass(frozen=True)
class ResourceLimit:
    name: str
    count: int
    device: int | None = None  # every device, and globally


class Resource(NamedTuple):
    name: str
    device: int | None  # None: all devices share it


class Share:
    """The resources that one instance needs to run, and its turn: its executions so far, each
    weighted with its priority; the fewest go first."""

    __slots__ = ("needs", "passive", "priority", "running", "turn")

    def __init__(self, group: InstanceGroup, gpu: int | None) -> None:
        device = _CPU_DEVICE if gpu is None else gpu
        self.needs: Mapping[Resource, int] = {
            Resource(each.name, device if each.per_device else None): each.count
            for each in group.resources
            if each.count
        }
        self.priority = group.priority
        self.passive = group.passive
        self.turn = 0
        self.running = False


class RateLimiter:
    """Lets an instance run while the resources that it needs are free.

    Among the waiting instances the one with the fewest executions goes first, each weighted by the
    priority, so that priority n gets 1/n of the chances. One that is first and does not fit
    reserves its resources against those behind it; instances that need other resources go on. Idle
    time earns no chances.

    Args: limits: the amounts. Without any, each resource has the largest need of any instance, plus
        what passive instances hold; with some, an unnamed resource has none."""

    def __init__(self, limits: Sequence[ResourceLimit] = ()) -> None:
        self._limits = tuple(limits)
        self._lock = threading.Lock()
        self._shares: list[Share] = []
        self._totals: Mapping[Resource, int] = {}
        self._used: Counter[Resource] = Counter()
        self._claims: list[_Claim] = []
        # The last turn granted per resource: new and returning instances join there.
        self._turns: dict[Resource, int] = {}

    def enrol(self, groups: Sequence[InstanceGroup]) -> list[Share]:
        """Make a share for each instance of `groups`, in order; passive ones hold theirs from now.
        Raises ModelConfigError where the instances need more than there is (Triton's texts).
        """
        joining = [Share(group, place.gpu) for group in groups for place in group.placements]
        with self._lock:
            shares = [*self._shares, *joining]
            self._totals = self._totals_for(shares)
            self._shares = shares
            for share in joining:
                if share.passive:
                    self._used.update(share.needs)
        return joining

    def leave(self, shares: Sequence[Share]) -> None:
        """Forget `shares`; one that still runs is given back as usual."""
        with self._lock:
            for share in shares:
                self._shares.remove(share)
                if share.passive:
                    self._used.subtract(share.needs)
            self._totals = self._totals_for(self._shares)
            self._grant()

    def take(
        self,
        shares: Sequence[Share],
        deadline: float | None,
        cancellation: Cancellation | None = None,
    ) -> Share:
        """Grant one of `shares`, none of them passive, all its resources until `give_back`.

        Raises: DeadlineExceeded, Cancelled: see `Waiter.wait`.
        """
        claim = _Claim(shares, self._lock, cancellation)
        with self._lock:
            for share in shares:
                if not share.running and share.needs:
                    share.turn = max(share.turn, min(self._turns.get(r, 0) for r in share.needs))
            self._claims.append(claim)
            self._grant()
            try:
                return claim.wait(
                    deadline, "the request's deadline passed before an instance had its resources"
                )
            except EdgeServerError:
                self._claims.remove(claim)
                # The resources reserved for this caller are free for those behind.
                self._grant()
                raise

    def give_back(self, share: Share) -> None:
        with self._lock:
            share.running = False
            self._used.subtract(share.needs)
            self._grant()

    def _grant(self) -> None:
        candidates = sorted(
            (
                (share, claim)
                for claim in self._claims
                for share in claim.shares
                if not share.running
            ),
            key=lambda candidate: candidate[0].turn,
        )
        kept: dict[Resource, _Claim] = {}
        for share, claim in candidates:
            if share.running or claim.given is not None:
                continue
            mine = all(kept.get(resource, claim) is claim for resource in share.needs)
            if mine and self._fits(share):
                self._used.update(share.needs)
                self._turns.update(dict.fromkeys(share.needs, share.turn))
                share.turn += share.priority
                share.running = True
                claim.give(share)
            else:
                for resource in share.needs:
                    kept.setdefault(resource, claim)
        self._claims = [claim for claim in self._claims if claim.given is None]

    def _fits(self, share: Share) -> bool:
        return all(
            self._used[r] + count <= self._totals.get(r, 0) for r, count in share.needs.items()
        )

    def _totals_for(self, shares: Sequence[Share]) -> dict[Resource, int]:
        """The amount of each resource; raises as `enrol`."""
        needed = _largest_needs(shares)
        for name in sorted({resource.name for resource in needed}):
            if len({device is None for other, device in needed if other == name}) == 2:
                raise ModelConfigError(
                    f'Resource "{name}" is present as both global and device-specific resource in '
                    "the model configuration."
                )
        if not self._limits:
            return needed
        totals = {resource: self._limit(resource) for resource in needed}
        for resource, count in needed.items():
            if totals[resource] < count:
                raise ModelConfigError(
                    f'Resource count for "{resource.name}" is limited to {totals[resource]} which '
                    "will prevent scheduling of one or more model instances, the minimum required "
                    f"count is {count}; raise its limit, or lower the need in instance_group"
                )
        return totals

    def _limit(self, resource: Resource) -> int:
        return max(
            (
                limit.count
                for limit in self._limits
                if limit.name == resource.name
                and (resource.device is None or limit.device in {None, resource.device})
            ),
            default=0,
        )


class _Claim(Waiter[Share]):
    """Of a caller that wants one of `shares` to run."""

    __slots__ = ("shares",)

    def __init__(
        self, shares: Sequence[Share], lock: threading.Lock, cancellation: Cancellation | None
    ) -> None:
        super().__init__(lock, cancellation)
        self.shares = shares


def _largest_needs(shares: Sequence[Share]) -> dict[Resource, int]:
    """Per resource: the most that one instance needs, plus the amounts of all passive ones."""
    largest: Counter[Resource] = Counter()
    held: Counter[Resource] = Counter()
    for share in shares:
        if share.passive:
            held.update(share.needs)
        else:
            largest |= Counter(share.needs)
    return {resource: largest[resource] + held[resource] for resource in {**largest, **held}}
