"""A new version of a model is held against its predecessor while it serves its first requests."""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from edge_server.appliance.worker import Worker
from edge_server.serving.statistics import Failure
from edge_server.serving.watch import Seen, Watch, WatchedScheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.serving.snapshot import LoadedModel, Scheduler

log = logging.getLogger(__name__)

# A latency is compared where at least so many requests show it, on either side.
_LEAST_REQUESTS = 50
# One bad request, or two, may be chance.
_LEAST_BAD = 3
# How many bad ones there may be, beside three times what the predecessor had.
_MAY_FAIL = 0.05
_MAY_NOT_BE_FINITE = 0.01
_MAY_BE_SLOW = 0.01
# A run, or an absence, of this time is none that a request waits for.
_HANGS_S = 1.0
# What does not come with an answer is looked for this often.
_LOOK_S = 0.25


@dataclass(frozen=True)
class ProbationTerms:
    """How long a new version is watched.

    It passes when it has answered `requests`, and `least_s` have gone; or after `longest_s`,
    however many it has answered. What served before it stays in memory till then.
    """

    requests: int = 200
    least_s: float = 30.0
    longest_s: float = 300.0


def recorded(model: LoadedModel, terms: ProbationTerms) -> LoadedModel:
    """`model`, which nothing judges; but what is seen of its first answers, unless it has been
    already, its successors are compared with."""
    if isinstance(model.scheduler, WatchedScheduler):
        return model
    watch = Watch(terms.requests, most=terms.requests)
    return replace(model, scheduler=WatchedScheduler(model.scheduler, watch))


class Probation:
    """Watches the new versions of one model, and says once whether they are worse than what served
    before.

    Worse is, with three such requests at least: more failures of the model than 5 % and three times
    the predecessor's share; more answers with infinities or NaN than 1 % and three times its share
    in its own first requests; more than 1 % that take longer than three times its p99 and 5 ms. A
    run of 1 s and of ten times that, and a model that is away for 1 s, are worse too.

    Args:
        name: of the model.
        on_failed: called with the reason, at most once, on a thread of this probation's own.
        on_passed: likewise; never both.
        on_over: called last, whatever the end.
    """

    def __init__(
        self,
        name: str,
        terms: ProbationTerms,
        *,
        on_failed: Callable[[str], object],
        on_passed: Callable[[], None],
        on_over: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._terms = terms
        self._on_failed = on_failed
        self._on_passed = on_passed
        self.watched: list[Watched] = []
        self._began_s = math.inf
        self._hanging = _Lasting()
        self._away = _Lasting()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._over = False
        # What it calls may take its time.
        self._worker = Worker(
            f"probation-{name}", self._wait_and_look, deadline_s=math.inf, on_end=on_over
        )

    def watch(self, model: LoadedModel, predecessor: LoadedModel) -> LoadedModel:
        """`model` as it is to be published; to be called for each new version, before `start`.

        `predecessor` is looked at only now.
        """
        p99_ns = predecessor.statistics.p99_ns(_LEAST_REQUESTS)
        slow_ns = 3 * p99_ns + 5_000_000 if p99_ns else 0
        watch = Watch(self._terms.requests, slow_ns=slow_ns, changed=self._wake.set)
        scheduler = WatchedScheduler(_unwatched(model), watch)
        shares = _failed_share(predecessor), _not_finite_share(predecessor)
        self.watched.append(Watched(model, scheduler, watch, *shares))
        return replace(model, scheduler=scheduler)

    def start(self) -> None:
        """From now on a thread looks; returns at once."""
        self.begin(time.monotonic())
        self._worker.start()

    def begin(self, now: float) -> None:
        """Its time counts from `now` (`time.monotonic()`)."""
        self._began_s = now

    def stop(self) -> None:
        """No verdict is wanted any more: none is given once this has returned, but that one which
        is being given may not have returned yet."""
        self._end()
        self._worker.ask_to_stop()
        self._wake.set()

    def wait_over(self, timeout_s: float) -> None:
        """Wait, after `stop`, that long at most until `on_over` has returned."""
        self._worker.stop(timeout_s)

    def look(self, now: float) -> bool:
        """Give the verdict where there is one at `now`; whether it is still to come."""
        reason = self._reason(now)
        if not (reason or self._has_passed(now)):
            return True
        if not self._end():
            return False
        if reason:
            log.error("model %s: probation: failed: %s", self._name, reason)
            self._on_failed(reason)
        else:
            requests = sum(each.watch.all.requests for each in self.watched)
            log.info("model %s: probation: passed with %d requests", self._name, requests)
            self._on_passed()
        return False

    def _wait_and_look(self, now: float) -> bool:
        del now
        self._wake.wait(_LOOK_S)
        self._wake.clear()
        return self.look(time.monotonic())

    def _end(self) -> bool:
        """Whether it was not over yet."""
        with self._lock:
            if self._over:
                return False
            self._over = True
        for each in self.watched:
            each.scheduler.end()
        return True

    def _has_passed(self, now: float) -> bool:
        seconds = now - self._began_s
        # Of versions that few ask for the others tell.
        seen = sum(each.watch.all.requests for each in self.watched)
        enough = seen >= self._terms.requests and seconds >= self._terms.least_s
        return enough or seconds >= self._terms.longest_s

    def fault(self) -> str:
        """What its answers so far show to be worse; empty where they do not."""
        for each in self.watched:
            reason = each.reason()
            if reason:
                return f"version {each.model.version}: {reason}"
        return ""

    def _reason(self, now: float) -> str:
        return self.fault() or self._hang(now) or self._absence(now)

    def _hang(self, now: float) -> str:
        hangs = [hang for each in self.watched if (hang := each.hang(now))]
        # Seen twice, so that a moment in which the whole machine stood still is none.
        return hangs[0] if self._hanging.since_s(now, there=bool(hangs)) >= _LOOK_S else ""

    def _absence(self, now: float) -> str:
        troubles = [trouble for each in self.watched if (trouble := each.model.trouble())]
        if self._away.since_s(now, there=bool(troubles)) < _HANGS_S:
            return ""
        return f"away for more than {_HANGS_S:g} s: {troubles[0]}"


class _Lasting:
    """For how long something has been there, look by look."""

    def __init__(self) -> None:
        self._since: float | None = None

    def since_s(self, now: float, *, there: bool) -> float:
        if not there:
            self._since = None
            return 0.0
        if self._since is None:
            self._since = now
        return now - self._since


class Watched(NamedTuple):
    """One new version, and what was usual before it."""

    model: LoadedModel
    scheduler: WatchedScheduler
    watch: Watch
    failed_share: float
    not_finite_share: float

    def reason(self) -> str:
        n, failed, not_finite, slow = self.watch.recent
        if _is_worse(failed, n, _MAY_FAIL + 3 * self.failed_share):
            return f"{failed} of {n} requests failed; before it {self.failed_share:.1%} did"
        if _is_worse(not_finite, n, _MAY_NOT_BE_FINITE + 3 * self.not_finite_share):
            return (
                f"{not_finite} of {n} answers were not finite; before it "
                f"{self.not_finite_share:.1%} were not"
            )
        if n >= _LEAST_REQUESTS and _is_worse(slow, n, _MAY_BE_SLOW):
            return (
                f"{slow} of {n} requests took longer than {self.watch.slow_ns / 1e6:.1f} ms, three "
                "times the p99 before it and 5 ms"
            )
        return ""

    def hang(self, now: float) -> str:
        run_s = self.scheduler.longest_run_s(now)
        slow_s = self.watch.slow_ns / 1e9
        if not slow_s or run_s < max(_HANGS_S, 10 * slow_s):
            return ""
        return f"version {self.model.version}: a run takes {run_s:.1f} s and does not end"


def _is_worse(bad: int, requests: int, may: float) -> bool:
    return bad >= _LEAST_BAD and bad > may * requests


def _failed_share(model: LoadedModel) -> float:
    if model.config.is_ensemble:
        # Its statistics do not tell whose fault it was.
        seen = _seen(model)
        return seen.failed / max(1, seen.requests)
    counts = model.statistics.counts()
    failed = counts.failures[Failure.BACKEND]
    return failed / (failed + counts.success.count) if failed else 0.0


def _not_finite_share(model: LoadedModel) -> float:
    seen = _seen(model)
    return seen.not_finite / max(1, seen.requests)


def _seen(model: LoadedModel) -> Seen:
    return model.scheduler.seen if isinstance(model.scheduler, WatchedScheduler) else Seen()


def _unwatched(model: LoadedModel) -> Scheduler:
    scheduler = model.scheduler
    return scheduler.beneath if isinstance(scheduler, WatchedScheduler) else scheduler
