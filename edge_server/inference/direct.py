"""Direct scheduling: the instance pool lends a model's instances, and the caller runs one."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from edge_server.errors import DeadlineExceeded, EdgeServerError, Unavailable
from edge_server.inference.line import Waiter
from edge_server.inference.registry import Submits
from edge_server.model_config.parse import PROCESS_BACKENDS
from edge_server.process.threads import run_parallel, side_by_side

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_server.backends.contract import Instance, Model
    from edge_server.inference.execution import Executor
    from edge_server.inference.line import RateLimiter, Share
    from edge_server.inference.registry import Snapshot
    from edge_server.model_config.config import ModelConfig, Placement
    from edge_server.requests import Cancellation, InferRequest, InferResponse, Respond

# A typical run is the median of so many: one run that hangs does not close the queue.
_RUNS = 15
# The share of the time left that the forecast may use up. In a simulated queue with runs that vary
# by a third, 3/4 came within 4 % of the best of 1/2 to 1, at any load and deadline; a share of 1
# left 40 % of the goodput at ten times the load, as the last request admitted is late.
_FORESEEN = 0.75
# After so many urgent callers in a row one of the others is next: cameras that keep a model busy
# leave a quarter of its runs to clients.
_URGENT_IN_A_ROW = 3
# Processes of a model that start at the same time.
_STARTS_AT_ONCE = 4
_TOO_LATE = "the request's deadline passed before an instance was idle"


class ExpectedWait:
    """Refuses at once a request whose response would come too late.

    Without this check a first-come queue serves no request in time once the load exceeds the
    throughput: the model works for callers who have gone.

    The forecast is the rest of the current run, the runs of the requests before it, `together` in
    each, and its own. A request without a deadline, an urgent one, or one that finds an instance
    idle is never refused, so that quick runs correct what slow runs have taught. No lock is
    needed."""

    def __init__(self, instances: int, together: int = 1) -> None:
        self._instances = max(1, instances)
        self._together = max(1, together)
        self.runs_s: deque[float] = deque(maxlen=_RUNS)

    def check(self, request: InferRequest, *, ahead: int, running_s: float, now: float) -> None:
        """Return where `request` may join the queue behind `ahead` others; raise DeadlineExceeded
        where its deadline has passed already, Unavailable where the response would come after
        it."""
        if request.deadline is None:
            return
        left_s = request.deadline - now
        if left_s <= 0:
            raise DeadlineExceeded("the request's deadline passed before it was begun")
        runs_s = sorted(self.runs_s)
        if not runs_s or request.urgent or not (ahead or running_s):
            return
        run_s = runs_s[len(runs_s) // 2]
        rest_s = max(0.0, run_s - running_s) if running_s else 0.0
        runs = ahead // self._together / self._instances + 1
        if rest_s + runs * run_s > _FORESEEN * left_s:
            raise Unavailable(
                f"{request.log_prefix}Exceeds maximum queue size: behind {ahead} others it would "
                "have no response before its deadline"
            )


class InstancePool:
    """Lends each instance to one caller at a time: urgent callers before the others, but every
    fourth run is one of the others' who wait. A `limiter` decides which may run, and when.

    Attributes:
        expected: the forecast, from how long the instances were lent.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        passive: Sequence[Instance] = (),
        limiter: RateLimiter | None = None,
        shares: Sequence[Share] = (),
        together: int = 1,
    ) -> None:
        self.expected = ExpectedWait(len(instances), together)
        self._instances = tuple(instances)
        self._by_id = {id(instance): instance for instance in instances}
        self._passive = tuple(passive)
        self._limiter = limiter
        self._shares = tuple(shares)
        self._instance_of = dict(zip(shares, instances, strict=False))
        self._share_of = {id(instance): share for share, instance in self._instance_of.items()}
        # With a limiter, an entry here is the right to some instance, not to this very one.
        self._idle = list(instances)
        self._started_at: dict[int, float] = {}
        self._lock = threading.Lock()
        self._urgent: deque[Waiter[Instance]] = deque()
        self._others: deque[Waiter[Instance]] = deque()
        # Those that have the right to an instance, and wait for the limiter.
        self._limited = 0
        # Urgent callers since one of the others was served, or did not wait.
        self._urgent_in_a_row = 0

    @staticmethod
    def of(config: ModelConfig, model: Model, limiter: RateLimiter | None = None) -> InstancePool:
        """Create all instances of the configuration, or raise and close those that were made."""
        together = config.max_batch_size if config.dynamic_batching is not None else 1
        return _pool_of(_make(config, model, limiter), limiter, together)

    @staticmethod
    def each_of(
        config: ModelConfig, model: Model, limiter: RateLimiter | None = None
    ) -> list[InstancePool]:
        """One pool per running instance; passive instances are closed with the first. Raises as
        `of`."""
        made = _make(config, model, limiter)
        running = [each for each in made if not each.passive]
        passive = [each for each in made if each.passive]
        return [
            _pool_of([each, *(passive if each is running[0] else ())], limiter) for each in running
        ]

    def __len__(self) -> int:
        return len(self._instances)

    def waiting(self) -> int:
        return len(self._urgent) + len(self._others) + self._limited

    def running_since(self) -> float:
        """See `Scheduler.running_since`; the run of an instance with an attribute `progressed_at`,
        which limits its runs by itself, counts from that time.
        """
        since = inf
        # A copy, because a run may end during the iteration.
        for key, started in list(self._started_at.items()):
            progressed_at = getattr(self._by_id[key], "progressed_at", 0.0)
            since = min(since, max(started, progressed_at))
        return since

    def running_s(self, now: float) -> float:
        """For how long the oldest run lasts; 0 while an instance is idle."""
        return 0.0 if self._idle else max(0.0, now - self.running_since())

    def close(self) -> None:
        if self._limiter is not None:
            self._limiter.leave(self._shares)
        # Closing may take long: a Python model runs `finalize`.
        side_by_side([i.close for i in (*self._instances, *self._passive)], "close-instance")

    def take(
        self,
        *,
        urgent: bool,
        deadline: float | None,
        cancellation: Cancellation | None = None,
        request: InferRequest | None = None,
    ) -> Instance:
        """Lend an idle instance to the caller until `give_back`; wait for one until `deadline`.

        Args: request: what it is for, where that is one request; refused where the forecast says
            that it would wait too long.

        Raises: DeadlineExceeded, Cancelled: see `Waiter.wait`; Unavailable: see `ExpectedWait`."""
        now = time.monotonic()
        if deadline is not None and (now >= deadline or self._limited or not self._idle):
            if request is not None:
                self.check(request, self.waiting(), now)
            if now >= deadline:
                raise DeadlineExceeded(_TOO_LATE)
        with self._lock:
            instance = self._idle.pop() if self._idle else None
        if instance is None:
            instance = self._wait(urgent, deadline, cancellation)
            now = time.monotonic()
        if self._limiter is not None:
            instance = self._take_limited(self._limiter, instance, deadline, cancellation)
            now = time.monotonic()
        self._started_at[id(instance)] = now
        return instance

    def check(self, request: InferRequest, ahead: int, now: float) -> None:
        """See `ExpectedWait.check`."""
        self.expected.check(request, ahead=ahead, running_s=self.running_s(now), now=now)

    def give_back(self, instance: Instance, *, teaches: bool = True) -> None:
        """Args: teaches: how long it was lent counts in the forecast."""
        lent_s = time.monotonic() - self._started_at.pop(id(instance))
        if teaches:
            self.expected.runs_s.append(lent_s)
        if self._limiter is not None:
            self._limiter.give_back(self._share_of[id(instance)])
        with self._lock:
            if self._urgent or self._others:
                self._hand_on(instance)
            else:
                self._urgent_in_a_row = 0
                self._idle.append(instance)

    def _wait(
        self, urgent: bool, deadline: float | None, cancellation: Cancellation | None
    ) -> Instance:
        waiter: Waiter[Instance] = Waiter(self._lock, cancellation)
        line = self._urgent if urgent else self._others
        with self._lock:
            if self._idle:
                return self._idle.pop()
            line.append(waiter)
            try:
                instance = waiter.wait(deadline, _TOO_LATE)
            except EdgeServerError:
                line.remove(waiter)
                raise
            if deadline is not None and time.monotonic() >= deadline:
                self._hand_on(instance)
                raise DeadlineExceeded(_TOO_LATE)
            return instance

    def _hand_on(self, instance: Instance) -> None:
        """Give `instance` to the caller whose turn it is."""
        others_first = self._urgent_in_a_row >= _URGENT_IN_A_ROW or not self._urgent
        line = self._others if self._others and others_first else self._urgent
        self._urgent_in_a_row = (
            self._urgent_in_a_row + 1 if line is self._urgent and self._others else 0
        )
        if line:
            line.popleft().give(instance)
        else:
            self._idle.append(instance)

    def _take_limited(
        self,
        limiter: RateLimiter,
        right: Instance,
        deadline: float | None,
        cancellation: Cancellation | None,
    ) -> Instance:
        """The instance that the limiter chooses, in exchange for the right to one."""
        with self._lock:
            self._limited += 1
        try:
            share = limiter.take(tuple(self._instance_of), deadline, cancellation)
            return self._instance_of[share]
        except BaseException:
            with self._lock:
                self._hand_on(right)
            raise
        finally:
            with self._lock:
                self._limited -= 1


class _Made(NamedTuple):
    instance: Instance
    passive: bool
    share: Share | None


def _make(config: ModelConfig, model: Model, limiter: RateLimiter | None) -> list[_Made]:
    groups = config.instance_groups
    shares = limiter.enrol(groups) if limiter is not None else []
    # Several groups may have one name.
    numbers: Counter[str] = Counter()
    wanted: list[tuple[str, Placement, bool]] = []
    for group in groups:
        for placement in group.placements:
            wanted.append((f"{group.name}_{numbers[group.name]}", placement, group.passive))
            numbers[group.name] += 1
    made: dict[int, _Made] = {}

    def make(index: int) -> None:
        name, placement, passive = wanted[index]
        instance = model.make_instance(name, placement)
        made[index] = _Made(instance, passive, shares[index] if shares else None)

    # Only instances of their own process share nothing while they start.
    at_once = _STARTS_AT_ONCE if config.backend in PROCESS_BACKENDS else 1
    try:
        run_parallel(f"start-{config.name}", at_once, make, range(len(wanted)), all_or_none=True)
    except BaseException:
        side_by_side([each.instance.close for each in made.values()], "close-instance")
        if limiter is not None:
            limiter.leave(shares)
        raise
    return [made[index] for index in range(len(wanted))]


def _pool_of(made: Sequence[_Made], limiter: RateLimiter | None, together: int = 1) -> InstancePool:
    running = [each for each in made if not each.passive]
    passive = [each for each in made if each.passive]
    return InstancePool(
        [each.instance for each in running],
        [each.instance for each in passive],
        limiter,
        [each.share for each in (*running, *passive) if each.share is not None],
        together,
    )


class DirectScheduler(Submits):
    """Runs the model on the caller's own thread with an idle instance: no queue, no thread hop.

    Args: teaches: its runs count in the pool's forecast."""

    def __init__(self, executor: Executor, pool: InstancePool, *, teaches: bool = True) -> None:
        self._executor = executor
        self._pool = pool
        self._teaches = teaches

    def infer(self, request: InferRequest, snapshot: Snapshot) -> InferResponse:
        if self._executor.config.decoupled:
            return super().infer(request, snapshot)
        job = self._executor.job(request, snapshot)
        try:
            instance = self._lend(request)
        except EdgeServerError as error:
            self._executor.count_failure(job, error)
            raise
        try:
            return self._executor.infer(instance, job)
        finally:
            self._pool.give_back(instance, teaches=self._teaches)

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        job = self._executor.job(request, snapshot, respond)
        try:
            instance = self._lend(request)
        except EdgeServerError as error:
            self._executor.refuse(job, error)
            return
        try:
            self._executor.run(instance, (job,))
        finally:
            self._pool.give_back(instance, teaches=self._teaches)

    def _lend(self, request: InferRequest) -> Instance:
        return self._pool.take(
            urgent=request.urgent,
            deadline=request.deadline,
            cancellation=request.cancellation,
            request=request,
        )

    def pending(self) -> int:
        return self._pool.waiting()

    def running_since(self) -> float:
        return self._pool.running_since()

    def close(self) -> None:
        self._pool.close()
