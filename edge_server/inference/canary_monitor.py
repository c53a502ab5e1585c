"""The canary monitor: compares a new version with its predecessor while both are loaded."""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edge_server.inference.canary_window import (
    HANGS_S,
    LEAST_FOR_P99,
    UNDECIDED_S,
    WatchedScheduler,
    WatchedVersion,
    fault_shares,
)
from edge_server.inference.mirror import Mirror
from edge_server.inference.replay import ReplayTarget
from edge_server.process.awake_time import AwakeTime
from edge_server.process.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edge_server.inference.snapshot import LoadedModel

log = logging.getLogger(__name__)

# The interval at which the thread checks for runs that hang.
_CHECK_S = 0.25


@dataclass(frozen=True)
class CanaryTerms:
    """How long the canary of a new version lasts.

    A version passes when it has responded to `requests` requests, `least_s` have passed, and its
    latency is known to be slower or not; or after `longest_s`, whatever the number of responses.
    Its predecessor stays in memory until then.
    """

    requests: int = 200
    least_s: float = 30.0
    longest_s: float = 300.0


def recorded(model: LoadedModel, terms: CanaryTerms) -> LoadedModel:
    """`model` with a count of its first responses, the baseline for its successors; the count
    leads to no verdict on `model` itself."""
    if isinstance(model.scheduler, WatchedScheduler):
        return model
    scheduler = WatchedScheduler(model.scheduler, model.config, terms.requests, most=terms.requests)
    return replace(model, scheduler=scheduler)


class CanaryMonitor:
    """Watches the new versions of one model and gives one verdict: worse than their predecessor, or
    not.

    A request that fails or is refused, or whose response is not finite, is replayed on the
    predecessor, and counts only where the predecessor's response is good (see `Mirror`). With at
    least three such requests a version is worse: when its failures exceed 5 % and three times the
    failures that only the predecessor has; when its responses with infinities or NaN exceed 1 % and
    three times likewise. A version is also worse when a run takes more than 1 s and ten times as
    long as the predecessor needs for the same request (times the rows that its batch may have), and
    when its model is away for 1 s while the predecessor is not. A standstill of the whole process
    counts for neither (see `AwakeTime`). A request that the predecessor refuses or fails at shows
    nothing of its time: the run hangs after 5 s and 30 times the predecessor's p99, or after 30 s.
    So long may the model be away after a request that the predecessor failed at.

    A request that is cancelled, misses its deadline or finds the queue full counts neither as good
    nor as bad.

    Requests of a model that keeps state, is decoupled or has another interface than its predecessor
    cannot be replayed: for these the shares are compared with those of the predecessor's own first
    requests, non-finite responses count only where the request was finite, and a run hangs as one
    whose request the predecessor refuses.

    A version that is only slower, in the same minutes and for the same requests, is not worse, be
    it for all of them or for some: the monitor reports the latency, and the version stays. The team
    that pushes the model sets its allowed latency, and a busy machine must not take good lanes
    away.

    Args:
        name: the model's name.
        on_failed: called with the reason, at most once, on the thread of this monitor.
        on_passed: likewise; never both.
        on_over: called last, whatever the verdict.
        on_news: called whenever the news of a serving version changes; empty where there is none
            any more.
    """

    def __init__(
        self,
        name: str,
        terms: CanaryTerms,
        *,
        on_failed: Callable[[str], object],
        on_passed: Callable[[], None],
        on_over: Callable[[], None] = lambda: None,
        on_news: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._name = name
        self._terms = terms
        self._on_failed = on_failed
        self._on_passed = on_passed
        self._on_over = on_over
        self._on_news = on_news
        self._news = ""
        self.watched: list[WatchedVersion] = []
        self._began_s = math.inf
        self._awake = AwakeTime(2 * _CHECK_S)
        # Version → since when it is away, and the failures of its predecessor that excuse it.
        self._away_since: dict[int, tuple[float, int]] = {}
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._over = False
        # A replay, and the callbacks, may take arbitrarily long.
        self._worker = Worker(f"canary-{name}", self._tick, deadline_s=math.inf, on_end=self._close)

    def watch(
        self, model: LoadedModel, predecessor: LoadedModel, members: Sequence[LoadedModel] = ()
    ) -> LoadedModel:
        """Return `model` with a watched scheduler, to be published.

        To be called for each new version, before `start`.

        Args:
            predecessor: stays open for as long as the canary lasts.
            members: the members of a predecessor that is an ensemble; open likewise.
        """
        target = ReplayTarget.of(model, predecessor, members)
        mirror = None if target is None else Mirror(target, self._wake.set)
        scheduler = model.scheduler
        if isinstance(scheduler, WatchedScheduler):
            scheduler = scheduler.beneath
        scheduler = WatchedScheduler(
            scheduler, model.config, self._terms.requests, mirror, wake=self._wake.set
        )
        hangs_s = 30 * predecessor.statistics.p99_ns(LEAST_FOR_P99) / 1e9
        shares = fault_shares(predecessor)
        self.watched.append(WatchedVersion(model, scheduler, mirror, shares, hangs_s))
        return replace(model, scheduler=scheduler)

    def start(self) -> None:
        """Start the monitor's thread; returns at once.

        Where the system gives no thread the versions serve unwatched, and `on_over` is called.
        """
        self.begin(time.monotonic())
        try:
            self._worker.start()
        except RuntimeError as error:
            log.warning("model %s: not compared with its predecessor: %s", self._name, error)
            self._end()
            self._close()

    def begin(self, now: float) -> None:
        """Start the canary's clock at `now` (`time.monotonic()`)."""
        self._began_s = now
        self._awake.look(now)

    def stop(self) -> None:
        """Prevent any verdict after this returns; the callback of an earlier one may still run."""
        self._end()
        self._worker.ask_to_stop()
        self._wake.set()

    def wait_over(self, timeout_s: float) -> None:
        """Wait, after `stop`, at most `timeout_s` until `on_over` has returned."""
        self._worker.stop(timeout_s)

    def look(self, now: float) -> bool:
        """Give the verdict that is due at `now`; True while there is none."""
        self._awake.look(now)
        reason = self.fault() or self._hang() or self._absence(now)
        requests = sum(each.scheduler.seen.total() for each in self.watched)
        # Requests of all versions count together: single versions may get few.
        seconds = now - self._began_s
        enough = requests >= self._terms.requests and seconds >= self._terms.least_s
        unclear = next((text for each in self.watched if (text := each.unclear())), "")
        passed = (enough and not unclear) or seconds >= self._terms.longest_s
        if not reason and not passed:
            news = f"watched for longer than {self._terms.least_s:g} s: {unclear}"
            self._set_news(self._slower() or (news if enough else ""))
            return True
        if not self._end():
            return False
        if reason:
            log.error("model %s: canary: failed: %s", self._name, reason)
            self._on_failed(reason)
        else:
            log.info("model %s: canary: passed with %d requests", self._name, requests)
            self._set_news(self._slower())
            self._on_passed()
        return False

    def fault(self) -> str:
        """The fault that makes a version worse, from the responses so far; empty where none is."""
        found = ((each.model.version, each.fault()) for each in self.watched)
        return next((f"version {version}: {text}" for version, text in found if text), "")

    @property
    def is_comparing(self) -> bool:
        """Whether requests with a fault still wait for their replay."""
        mirrors = [each.mirror for each in self.watched]
        return not self._over and any(m is not None and m.is_comparing for m in mirrors)

    def _tick(self, now: float) -> bool:
        mirrors = [each.mirror for each in self.watched if each.mirror is not None]
        self._wake.wait(min([_CHECK_S, *(mirror.wait_s(now) for mirror in mirrors)]))
        self._wake.clear()
        for mirror in mirrors:
            if not self._over and mirror.wait_s(time.monotonic()) == 0:
                mirror.step()
        return self.look(time.monotonic())

    def _end(self) -> bool:
        """End the canary; False where it had ended before."""
        with self._lock:
            if self._over:
                return False
            self._over = True
        for each in self.watched:
            each.scheduler.end()
        return True

    def _close(self) -> None:
        for each in self.watched:
            if each.mirror is not None:
                each.mirror.target.close()
        self._on_over()

    def _slower(self) -> str:
        """The version that is slower than its predecessor, as text; empty where none is."""
        found = ((each.model.version, each.slower()) for each in self.watched)
        return next((f"version {version} is {text}" for version, text in found if text), "")

    def _set_news(self, news: str) -> None:
        # Logged once per kind: the figures change with every request.
        if news.partition(":")[0] != self._news.partition(":")[0]:
            if news:
                log.warning("model %s: %s", self._name, news)
            self._on_news(news)
            self._news = news

    def _hang(self) -> str:
        return next((text for each in self.watched if (text := each.hang(self._awake))), "")

    def _absence(self, now: float) -> str:
        for each in self.watched:
            version, reason = each.model.version, each.absence()
            if not reason:
                self._away_since.pop(version, None)
                continue
            excuses = each.excuses()
            since, known = self._away_since.get(version, (now, -1))
            if known != excuses:
                since = now
                self._away_since[version] = now, excuses
            limit_s = UNDECIDED_S if excuses else HANGS_S
            if self._awake.since(since) >= limit_s:
                return f"away for more than {limit_s:g} s: {reason}"
        return ""
