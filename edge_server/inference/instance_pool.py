"""The instance pool: lends a model's instances and measures their runs."""

from __future__ import annotations

import threading
import time
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from edge_server.errors import Cancelled, DeadlineExceeded, ModelConfigError
from edge_server.process.threads import side_by_side

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_server.backends.contract import Instance, Model
    from edge_server.inference.rate_limiter import RateLimiter, Share
    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import Cancellation


class InstancePool:
    """Lends each instance to one caller at a time; urgent callers go before the others.

    Args:
        instances: the instances that run.
        passive: instances that stay loaded and never run.
        limited: decides which of `instances` may run, and when; None where all may.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        passive: Sequence[Instance] = (),
        limited: LimitedInstances | None = None,
    ) -> None:
        self._instances = tuple(instances)
        self._passive = tuple(passive)
        self._limited = limited
        # With a limiter, an entry here is the right to some instance, not to this very one.
        self._idle = list(instances)
        self._started_at: dict[int, float] = {}
        self._lock = threading.Lock()
        self._for_urgent = threading.Condition(self._lock)
        self._for_others = threading.Condition(self._lock)
        self._urgent_waiting = 0
        self._waiting = 0

    @staticmethod
    def of(config: ModelConfig, model: Model, limiter: RateLimiter | None = None) -> InstancePool:
        """Create all instances of the configuration.

        Raises:
            ModelConfigError: no instance may run, or the limiter has too few resources for one.
            EdgeServerError: an instance cannot be made; those before it are closed again.
        """
        made = _make(config, model, limiter)
        return InstancePool(
            [each.instance for each in made if not each.passive],
            [each.instance for each in made if each.passive],
            _limited(limiter, made),
        )

    @staticmethod
    def each_of(
        config: ModelConfig, model: Model, limiter: RateLimiter | None = None
    ) -> list[InstancePool]:
        """Create one pool per running instance; passive instances are closed with the first pool.

        Raises: as `of`.
        """
        made = _make(config, model, limiter)
        passive = [each for each in made if each.passive]
        pools: list[InstancePool] = []
        for each in made:
            if not each.passive:
                kept = [] if pools else passive
                pools.append(
                    InstancePool(
                        [each.instance],
                        [other.instance for other in kept],
                        _limited(limiter, [each, *kept]),
                    )
                )
        return pools

    def __len__(self) -> int:
        """The number of instances that may run at once."""
        return len(self._instances)

    def waiting(self) -> int:
        """The number of callers that wait for an instance."""
        return self._waiting

    @property
    def any_idle(self) -> bool:
        return bool(self._idle)

    def longest_run_s(self, now: float) -> float:
        """Return the age in s of the oldest unfinished run at `now` (`time.monotonic()`)."""
        # A copy, because a run may end during the iteration.
        return max((now - started for started in list(self._started_at.values())), default=0.0)

    def close(self) -> None:
        if self._limited is not None:
            self._limited.close()
        # Closing may take long: a Python model runs `finalize`.
        side_by_side([i.close for i in (*self._instances, *self._passive)], "close-instance")

    def take(
        self, *, urgent: bool, deadline: float | None, cancellation: Cancellation | None = None
    ) -> Instance:
        """Lend an idle instance to the caller until `give_back`; wait for one until `deadline`.

        Raises:
            DeadlineExceeded: no instance was idle by `deadline` (`time.monotonic()`), or it had
                passed before the call.
            Cancelled: the caller cancelled while it waited.
        """
        instance = self._take_now(urgent=urgent, deadline=deadline)
        if instance is None:
            gone = _CancelWaiter(self._lock, self._for_urgent if urgent else self._for_others)
            if cancellation is not None:
                cancellation.when_cancelled(gone)
            instance = self._take_idle(gone, urgent=urgent, deadline=deadline)
        if self._limited is not None:
            instance = self._take_limited(self._limited, instance, deadline, cancellation)
        self._started_at[id(instance)] = time.monotonic()
        return instance

    def give_back(self, instance: Instance) -> None:
        del self._started_at[id(instance)]
        if self._limited is not None:
            self._limited.give_back(instance)
        self._make_idle(instance)

    def _take_now(self, *, urgent: bool, deadline: float | None) -> Instance | None:
        with self._lock:
            if self._idle and self._may_take(urgent=urgent) and _left_s(deadline) != 0.0:
                return self._idle.pop()
        return None

    def _take_idle(self, gone: _CancelWaiter, *, urgent: bool, deadline: float | None) -> Instance:
        with self._lock:
            self._urgent_waiting += urgent
            self._waiting += 1
            try:
                mine = gone.turn.wait_for(
                    lambda: gone.is_so or (self._idle and self._may_take(urgent=urgent)),
                    _left_s(deadline),
                )
            finally:
                gone.waits = False
                self._waiting -= 1
                self._urgent_waiting -= urgent
            if gone.is_so or not mine or _left_s(deadline) == 0.0:
                # This caller's wake-up may have been meant for another one.
                self._wake_next()
                if gone.is_so:
                    raise Cancelled("the caller took the request back")
                raise DeadlineExceeded("the request's deadline passed before an instance was idle")
            instance = self._idle.pop()
            # Two instances may have been given back while only this caller was woken.
            self._wake_next()
            return instance

    def _may_take(self, *, urgent: bool) -> bool:
        return urgent or not self._urgent_waiting

    def _take_limited(
        self,
        limited: LimitedInstances,
        right: Instance,
        deadline: float | None,
        cancellation: Cancellation | None,
    ) -> Instance:
        """Return the instance that the limiter chooses, in exchange for the right to one."""
        with self._lock:
            self._waiting += 1
        try:
            return limited.take(deadline, cancellation)
        except BaseException:
            self._make_idle(right)
            raise
        finally:
            with self._lock:
                self._waiting -= 1

    def _make_idle(self, instance: Instance) -> None:
        with self._lock:
            self._idle.append(instance)
            self._wake_next()

    def _wake_next(self) -> None:
        if self._idle and (self._waiting or self._urgent_waiting):
            (self._for_urgent if self._urgent_waiting else self._for_others).notify()


class _CancelWaiter:
    """Wakes a caller that waits for its `turn` once the caller has cancelled."""

    __slots__ = ("_lock", "is_so", "turn", "waits")

    def __init__(self, lock: threading.Lock, turn: threading.Condition) -> None:
        self._lock = lock
        self.turn = turn
        self.waits = True
        self.is_so = False

    def __call__(self) -> None:
        # Also called after a call with a response, when no caller waits any more.
        with self._lock:
            if self.waits:
                self.is_so = True
                self.turn.notify_all()


class LimitedInstances:
    """Instances by their shares in a rate limiter."""

    def __init__(
        self, limiter: RateLimiter, shares: Sequence[Share], instances: Sequence[Instance]
    ) -> None:
        self._limiter = limiter
        self._shares = shares
        self._running = [share for share in shares if not share.passive]
        self._instance_of = dict(zip(shares, instances, strict=True))
        self._share_of = {id(i): share for share, i in self._instance_of.items()}

    def take(self, deadline: float | None, cancellation: Cancellation | None) -> Instance:
        """Raises: DeadlineExceeded, Cancelled: see `RateLimiter.take`."""
        return self._instance_of[self._limiter.take(self._running, deadline, cancellation)]

    def give_back(self, instance: Instance) -> None:
        self._limiter.give_back(self._share_of[id(instance)])

    def close(self) -> None:
        self._limiter.leave(self._shares)


class _Made(NamedTuple):
    instance: Instance
    passive: bool
    share: Share | None


def _make(config: ModelConfig, model: Model, limiter: RateLimiter | None) -> list[_Made]:
    groups = config.instance_groups
    if groups and all(group.passive for group in groups):
        raise ModelConfigError(
            f"model '{config.name}' has only passive instances, which never run; let one "
            "instance_group be not passive"
        )
    shares = limiter.enrol(groups) if limiter is not None else []
    wanted = [
        (f"{group.name}_{i}", placement, group.passive)
        for group in groups
        for i, placement in enumerate(group.placements)
    ]
    made: list[_Made] = []
    try:
        # One by one, so that a failure leaves the earlier ones known.
        for (name, placement, passive), share in zip_longest(wanted, shares):
            made.append(_Made(model.make_instance(name, placement), passive, share))
    except BaseException:
        for each in made:
            each.instance.close()
        if limiter is not None:
            limiter.leave(shares)
        raise
    return made


def _limited(limiter: RateLimiter | None, made: Sequence[_Made]) -> LimitedInstances | None:
    if limiter is None:
        return None
    shares = [each.share for each in made if each.share is not None]
    return LimitedInstances(limiter, shares, [each.instance for each in made])


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
