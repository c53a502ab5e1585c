"""The canary monitor: compares a new version with its predecessor while both are loaded."""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from edge_server.inference.canary_window import CanaryWindow, Fault, WatchedScheduler, WindowCounts
from edge_server.inference.mirror import Mirror, Pairs
from edge_server.inference.statistics import FailureReason
from edge_server.process.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edge_server.inference.snapshot import LoadedModel, Scheduler

log = logging.getLogger(__name__)

# One or two bad requests may be chance.
_LEAST_BAD = 3
# The tolerated shares of bad requests, beside three times those of the predecessor.
_MAY_FAIL = 0.05
_MAY_NOT_BE_FINITE = 0.01
# The minimum number of pairs for a comparison of times. A version is slower where this share of its
# requests is, not slower where at most half are; between the two the canary goes on.
_LEAST_PAIRS = 30
_SLOWER_SHARE = 0.75
_UNCLEAR_SHARE = 0.5
# After this many replays of doubtful requests a version passes without more of them.
_ENOUGH_DOUBTS = 20
# A run, or an absence of the model, of this length counts as a hang for any request.
_HANGS_S = 1.0
# Without a replay on the predecessor, a run hangs when it exceeds both this (more than a busy
# machine needs) and 30 times the predecessor's p99, taken over at least _LEAST_FOR_P99 requests.
_HANGS_UNCOMPARED_S = 5.0
_LEAST_FOR_P99 = 50
# The interval at which the thread checks for runs that hang.
_LOOK_S = 0.25


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
    watch = CanaryWindow(terms.requests, most=terms.requests)
    return replace(model, scheduler=WatchedScheduler(model.scheduler, watch, model.config))


class CanaryMonitor:
    """Watches the new versions of one model and gives one verdict: worse than their predecessor, or
    not.

    A request that fails or is refused, or whose response is not finite, is doubtful: the mirror
    replays it on the predecessor, and it counts only where the predecessor's response is good (see
    `Mirror`). With at least three such requests a version is worse: when its failures exceed 5 %
    and three times the failures that only the predecessor has; when its responses with infinities
    or NaN exceed 1 % and three times likewise. A version is also worse when a run takes more than
    1 s and ten times as long as the predecessor needs for the same request (times the rows that
    its batch may have), and when its model is away for 1 s while the predecessor is not.

    A request that is cancelled, misses its deadline or finds the queue full counts neither as good
    nor as bad.

    Requests of a model that keeps state, is decoupled or has another interface than its predecessor
    cannot be replayed: for these the shares are compared with those of the predecessor's own first
    requests, non-finite responses count only where the request was finite, and a run hangs after
    5 s at the earliest.

    A version that is only slower, in the same minutes and for the same requests, is not worse: the
    monitor reports the latency, and the version stays. The team that pushes the model sets its
    allowed latency, and a busy machine must not take good lanes away.

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
        self.watched: list[Watched] = []
        self._began_s = math.inf
        self._hanging = _Lasting()
        self._away = _Lasting()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._over = False
        # The callbacks may take arbitrarily long.
        self._worker = Worker(
            f"probation-{name}", self._wait_and_look, deadline_s=math.inf, on_end=self._close
        )

    def watch(
        self, model: LoadedModel, predecessor: LoadedModel, members: Sequence[LoadedModel] = ()
    ) -> LoadedModel:
        """Return `model` with a watched scheduler, to be published.

        To be called for each new version, before `start`.

        Args:
            predecessor: stays open for as long as the canary lasts.
            members: the members of a predecessor that is an ensemble; open likewise.
        """
        mirror = Mirror.of(model, predecessor, members, changed=self._wake.set)
        watch = CanaryWindow(self._terms.requests, changed=self._wake.set)
        scheduler = WatchedScheduler(_unwatched(model), watch, model.config, mirror)
        shares = _failed_share(predecessor), _not_finite_share(predecessor)
        hangs_s = 30 * predecessor.statistics.p99_ns(_LEAST_FOR_P99) / 1e9
        self.watched.append(Watched(model, scheduler, watch, mirror, *shares, hangs_s))
        return replace(model, scheduler=scheduler)

    def start(self) -> None:
        """Start the monitor's thread; returns at once.

        Where the system gives no thread the versions serve unwatched, and `on_over` is called.
        """
        self.begin(time.monotonic())
        try:
            for each in self.watched:
                if each.mirror is not None:
                    each.mirror.start()
            self._worker.start()
        except RuntimeError as error:
            log.warning("model %s: not compared with its predecessor: %s", self._name, error)
            self._end()
            self._close()

    def begin(self, now: float) -> None:
        """Start the canary's clock at `now` (`time.monotonic()`)."""
        self._began_s = now

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
        reason = self._reason(now)
        if not (reason or self._has_passed(now)):
            self._report(now)
            return True
        if not self._end():
            return False
        if reason:
            log.error("model %s: probation: failed: %s", self._name, reason)
            self._on_failed(reason)
        else:
            requests = sum(each.watch.all.requests for each in self.watched)
            log.info("model %s: probation: passed with %d requests", self._name, requests)
            self._set_news(self._slower())
            self._on_passed()
        return False

    def _wait_and_look(self, now: float) -> bool:
        del now
        self._wake.wait(_LOOK_S)
        self._wake.clear()
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
                each.mirror.stop()
        self._on_over()

    def _has_passed(self, now: float) -> bool:
        seconds = now - self._began_s
        enough = self._has_seen_enough(seconds) and not self._unclear()
        return enough or seconds >= self._terms.longest_s

    def _has_seen_enough(self, seconds: float) -> bool:
        # Requests of all versions count together: single versions may get few.
        seen = sum(each.watch.all.requests for each in self.watched)
        return seen >= self._terms.requests and seconds >= self._terms.least_s

    def _unclear(self) -> str:
        """Why a version needs more requests despite enough responses; empty where all can pass."""
        return next((text for each in self.watched if (text := each.unclear())), "")

    def _slower(self) -> str:
        """The version that is slower than its predecessor, as text; empty where none is."""
        found = ((each.model.version, each.slower()) for each in self.watched)
        return next((f"version {version} is {text}" for version, text in found if text), "")

    def _report(self, now: float) -> None:
        news = self._slower()
        if not news and self._has_seen_enough(now - self._began_s):
            news = f"watched for longer than {self._terms.least_s:g} s: {self._unclear()}"
        if news and not (self._news and news.startswith("watched")):
            self._set_news(news)

    def _set_news(self, news: str) -> None:
        # Logged once per kind: the figures change with every request.
        if news.partition(":")[0] != self._news.partition(":")[0]:
            if news:
                log.warning("model %s: %s", self._name, news)
            self._on_news(news)
            self._news = news

    def fault(self) -> str:
        """The fault that makes a version worse, from the responses so far; empty where none is."""
        for each in self.watched:
            reason = each.reason()
            if reason:
                return f"version {each.model.version}: {reason}"
        return ""

    @property
    def has_doubts(self) -> bool:
        """Whether doubtful requests still wait for their replay."""
        return any(each.mirror is not None and each.mirror.has_doubts for each in self.watched)

    def _reason(self, now: float) -> str:
        return self.fault() or self._hang(now) or self._absence(now)

    def _hang(self, now: float) -> str:
        hangs = [hang for each in self.watched if (hang := each.hang(now))]
        # A hang must show in two looks, so that a standstill of the whole machine is none.
        return hangs[0] if self._hanging.since_s(now, there=bool(hangs)) >= _LOOK_S else ""

    def _absence(self, now: float) -> str:
        reasons = [reason for each in self.watched if (reason := each.absence())]
        if self._away.since_s(now, there=bool(reasons)) < _HANGS_S:
            return ""
        return f"away for more than {_HANGS_S:g} s: {reasons[0]}"


class _Lasting:
    """Measures how long a condition has held, from look to look."""

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
    """One new version, and the figures of its predecessor.

    Attributes:
        mirror: None where the predecessor cannot replay the version's requests.
        failed_share, not_finite_share: of the predecessor's own requests.
        hangs_s: 30 times the p99 of the predecessor; 0 where that has too few requests.
    """

    model: LoadedModel
    scheduler: WatchedScheduler
    watch: CanaryWindow
    mirror: Mirror | None
    failed_share: float
    not_finite_share: float
    hangs_s: float

    @property
    def compared(self) -> Mirror | None:
        """The mirror, while the mirror can compare."""
        return self.mirror if self.mirror is not None and self.mirror.comparable else None

    def reason(self) -> str:
        mirror = self.compared
        return self._by_shares() if mirror is None else self._by_replays(mirror)

    def unclear(self) -> str:
        """Why the version needs more requests before it can pass; empty where it needs none."""
        mirror = self.compared
        if mirror is None:
            return ""
        replayed = sum(mirror.better(fault)[1] for fault in Fault)
        # A client may send requests for ever that every version fails.
        if mirror.has_doubts and replayed < _ENOUGH_DOUBTS:
            return "its predecessor is still to be asked what it failed to answer"
        if not mirror.timed or self._well() < _LEAST_PAIRS:
            return ""
        # A cached response took no time, so it counts as a sample and not as a pair.
        sampled, pairs = mirror.sampled, mirror.pairs()
        if sampled < _LEAST_PAIRS:
            return f"its predecessor was given {sampled} of {_LEAST_PAIRS} requests so far"
        if _UNCLEAR_SHARE * pairs.requests < pairs.slower < _SLOWER_SHARE * pairs.requests:
            return "whether it is slower than its predecessor is not clear"
        return ""

    def slower(self) -> str:
        """How much slower the version is in the same minutes; empty where it is not slower."""
        mirror = self.compared
        pairs = Pairs() if mirror is None or not mirror.timed else mirror.pairs()
        if pairs.requests < _LEAST_PAIRS or pairs.slower < _SLOWER_SHARE * pairs.requests:
            return ""
        return (
            f"slower than its predecessor: {pairs.new_ms:.1f} ms beside {pairs.old_ms:.1f} ms, the "
            f"medians of {pairs.requests} requests that both were given"
        )

    def hang(self, now: float) -> str:
        run_s = self.scheduler.longest_run_s(now)
        mirror = self.compared
        if mirror is None:
            least_s = max(_HANGS_UNCOMPARED_S, self.hangs_s) if self.hangs_s else math.inf
        elif run_s < _HANGS_S:
            return ""
        else:
            oldest = self.scheduler.oldest()
            old_s = None if oldest is None else mirror.doubt_lasting(oldest)
            # The run may be a batch, of which the predecessor replayed a single request.
            rows = min(mirror.batch_size, max(1, self.scheduler.rows()))
            least_s = math.inf if old_s is None else max(_HANGS_S, 10 * rows * old_s)
        if run_s < least_s:
            return ""
        return f"version {self.model.version}: a run takes {run_s:.1f} s and does not end"

    def absence(self) -> str:
        """Why the model is away, where the version is at fault; empty otherwise."""
        reason, mirror = self.model.not_ready_reason(), self.compared
        if not reason or mirror is None:
            return reason
        better, replayed = mirror.better(Fault.FAILED)
        # A request that also ends the predecessor's process is the caller's fault.
        callers_fault = not better if replayed else mirror.has_doubts
        return "" if callers_fault or mirror.not_ready_reason() else reason

    def _well(self) -> int:
        """How many requests have a response without a fault."""
        n, failed, not_finite = self.watch.all
        return n - failed - not_finite

    def _by_replays(self, mirror: Mirror) -> str:
        n, failed, not_finite = self.watch.recent
        for fault, bad, may, failing in (
            (Fault.FAILED, failed, _MAY_FAIL, self.failed_share),
            (Fault.NOT_FINITE, not_finite, _MAY_NOT_BE_FINITE, self.not_finite_share),
        ):
            better, replayed = mirror.better(fault)
            if better < _LEAST_BAD:
                continue
            before = mirror.worse_share(fault) if mirror.samples else failing
            # Requests without a replay are assumed to resemble the replayed ones.
            if bad * better / replayed > (may + 3 * before) * n:
                what = "requests failed" if fault is Fault.FAILED else "answers were not finite"
                return (
                    f"{bad} of {n} {what}; its predecessor, given {replayed} of these requests, "
                    f"answered {better} well"
                )
        return ""

    def _by_shares(self) -> str:
        n, failed, not_finite = self.watch.recent
        if _is_worse(failed, n, _MAY_FAIL + 3 * self.failed_share):
            return f"{failed} of {n} requests failed; before it {self.failed_share:.1%} did"
        if _is_worse(not_finite, n, _MAY_NOT_BE_FINITE + 3 * self.not_finite_share):
            return (
                f"{not_finite} of {n} answers were not finite; before it "
                f"{self.not_finite_share:.1%} were not"
            )
        return ""


def _is_worse(bad: int, requests: int, may: float) -> bool:
    return bad >= _LEAST_BAD and bad > may * requests


def _failed_share(model: LoadedModel) -> float:
    if model.config.is_ensemble:
        # The model's statistics mix failures of members with those of callers.
        seen = _seen(model)
        return seen.failed / max(1, seen.requests)
    counts = model.statistics.counts()
    failed = counts.failures[FailureReason.BACKEND]
    return failed / (failed + counts.success.count) if failed else 0.0


def _not_finite_share(model: LoadedModel) -> float:
    seen = _seen(model)
    return seen.not_finite / max(1, seen.requests)


def _seen(model: LoadedModel) -> WindowCounts:
    return model.scheduler.seen if isinstance(model.scheduler, WatchedScheduler) else WindowCounts()


def _unwatched(model: LoadedModel) -> Scheduler:
    scheduler = model.scheduler
    return scheduler.beneath if isinstance(scheduler, WatchedScheduler) else scheduler
