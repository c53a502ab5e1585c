"""A new version of a model is compared with its predecessor while it serves its first requests."""

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

# One bad request, or two, may be chance.
_LEAST_BAD = 3
# The shares of bad requests that may be, beside three times those of the predecessor.
_MAY_FAIL = 0.05
_MAY_NOT_BE_FINITE = 0.01
# Times are compared from this many pairs on. A version is slower where this share of its requests
# is, and not slower where at most half of them are. Between the two it is watched on.
_LEAST_PAIRS = 30
_SLOWER_SHARE = 0.75
_UNCLEAR_SHARE = 0.5
# After this many replays of doubtful requests a version passes without waiting for more.
_ENOUGH_DOUBTS = 20
# A run, or an absence, of this time is too long for any request.
_HANGS_S = 1.0
# Where the predecessor cannot be given the request, a run hangs that takes longer than a busy
# machine needs, and than 30 times the p99 of the predecessor, of at least so many requests.
_HANGS_UNCOMPARED_S = 5.0
_LEAST_FOR_P99 = 50
# The thread looks for runs that hang this often.
_LOOK_S = 0.25


@dataclass(frozen=True)
class CanaryTerms:
    """How long a new version is watched.

    A version passes when it has answered `requests`, `least_s` have passed, and it is clear whether
    it is slower; or after `longest_s`, however many it has answered. Its predecessor stays in
    memory till then.
    """

    requests: int = 200
    least_s: float = 30.0
    longest_s: float = 300.0


def recorded(model: LoadedModel, terms: CanaryTerms) -> LoadedModel:
    """`model` with a count of its first responses, which its successors are compared with; no
    verdict is given on it."""
    if isinstance(model.scheduler, WatchedScheduler):
        return model
    watch = CanaryWindow(terms.requests, most=terms.requests)
    return replace(model, scheduler=WatchedScheduler(model.scheduler, watch, model.config))


class CanaryMonitor:
    """Watches the new versions of one model and gives one verdict: worse than their predecessor, or
    not.

    A request that fails or is refused, or whose response is not finite, is doubtful: the
    predecessor is given the same request, and only where its response is good that counts (see
    `Mirror`). Worse is, with three such requests at least: more failures than 5 % and three times
    those that only the predecessor has; more responses with infinities or NaN than 1 % and three
    times likewise. Worse is also a run that takes more than 1 s and ten times as long as the
    predecessor for the same request (times the rows that its batch may have), and a model that is
    away for 1 s while its predecessor is not.

    A request that is cancelled, comes too late or finds no room is counted neither as good nor as
    bad.

    Requests of a model that keeps state, is decoupled or has another interface than its predecessor
    cannot be replayed: there the shares are compared with those of the predecessor's own first
    requests, numbers that are not finite count only where the caller sent none, and a run hangs
    after 5 s at the earliest.

    A version that is only slower, in the same minutes and for the same requests, is no worse: that
    is reported, and the version stays. The allowed latency is set by those who push the model, and
    a busy machine must not take good lanes away.

    Args:
        name: of the model.
        on_failed: called with the reason, at most once, on the thread of this monitor.
        on_passed: likewise; never both.
        on_over: called last, whatever the verdict.
        on_news: called with the news of a version that serves, whenever it changes; empty where
            there is none any more.
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
        # The callbacks may take any time.
        self._worker = Worker(
            f"probation-{name}", self._wait_and_look, deadline_s=math.inf, on_end=self._close
        )

    def watch(
        self, model: LoadedModel, predecessor: LoadedModel, members: Sequence[LoadedModel] = ()
    ) -> LoadedModel:
        """`model` with a scheduler that is watched, to be published; to be called for each new
        version, before `start`.

        Args:
            predecessor: open for as long as the watch lasts.
            members: of a predecessor that is an ensemble, those of its members too; open likewise.
        """
        mirror = Mirror.of(model, predecessor, members, changed=self._wake.set)
        watch = CanaryWindow(self._terms.requests, changed=self._wake.set)
        scheduler = WatchedScheduler(_unwatched(model), watch, model.config, mirror)
        shares = _failed_share(predecessor), _not_finite_share(predecessor)
        hangs_s = 30 * predecessor.statistics.p99_ns(_LEAST_FOR_P99) / 1e9
        self.watched.append(Watched(model, scheduler, watch, mirror, *shares, hangs_s))
        return replace(model, scheduler=scheduler)

    def start(self) -> None:
        """Start the thread that looks; returns at once.

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
        """Count the time of the watch from `now` (`time.monotonic()`)."""
        self._began_s = now

    def stop(self) -> None:
        """Give no verdict once this has returned; the callback of an earlier one may still run."""
        self._end()
        self._worker.ask_to_stop()
        self._wake.set()

    def wait_over(self, timeout_s: float) -> None:
        """Wait, after `stop`, that long at most until `on_over` has returned."""
        self._worker.stop(timeout_s)

    def look(self, now: float) -> bool:
        """Give the verdict where there is one at `now`; True while there is none."""
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
        """End the watch; False where it had ended before."""
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
        # The requests of all versions count: some versions may get few.
        seen = sum(each.watch.all.requests for each in self.watched)
        return seen >= self._terms.requests and seconds >= self._terms.least_s

    def _unclear(self) -> str:
        """Why a version cannot pass yet though it has answered enough; empty where all can."""
        return next((text for each in self.watched if (text := each.unclear())), "")

    def _slower(self) -> str:
        """Which version is slower than its predecessor; empty where none is."""
        found = ((each.model.version, each.slower()) for each in self.watched)
        return next((f"version {version} is {text}" for version, text in found if text), "")

    def _report(self, now: float) -> None:
        news = self._slower()
        if not news and self._has_seen_enough(now - self._began_s):
            news = f"watched for longer than {self._terms.least_s:g} s: {self._unclear()}"
        if news and not (self._news and news.startswith("watched")):
            self._set_news(news)

    def _set_news(self, news: str) -> None:
        # Logged once for each kind: the figures change with every request.
        if news.partition(":")[0] != self._news.partition(":")[0]:
            if news:
                log.warning("model %s: %s", self._name, news)
            self._on_news(news)
            self._news = news

    def fault(self) -> str:
        """What is worse in the responses so far; empty where nothing is."""
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
        # Seen in two looks, so that a moment in which the whole machine stood still is no hang.
        return hangs[0] if self._hanging.since_s(now, there=bool(hangs)) >= _LOOK_S else ""

    def _absence(self, now: float) -> str:
        reasons = [reason for each in self.watched if (reason := each.absence())]
        if self._away.since_s(now, there=bool(reasons)) < _HANGS_S:
            return ""
        return f"away for more than {_HANGS_S:g} s: {reasons[0]}"


class _Lasting:
    """How long a condition has held, look by look."""

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
        mirror: None where its predecessor cannot be given the same requests.
        failed_share, not_finite_share: of the predecessor's own requests.
        hangs_s: 30 times the p99 of the predecessor; 0 where it has answered too few requests.
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
        """Its mirror, while that can compare."""
        return self.mirror if self.mirror is not None and self.mirror.comparable else None

    def reason(self) -> str:
        mirror = self.compared
        return self._by_shares() if mirror is None else self._by_replays(mirror)

    def unclear(self) -> str:
        """Why the version needs more requests before it can pass; empty where it does not."""
        mirror = self.compared
        if mirror is None:
            return ""
        replayed = sum(mirror.better(fault)[1] for fault in Fault)
        # A client may go on for ever with requests that no version can answer.
        if mirror.has_doubts and replayed < _ENOUGH_DOUBTS:
            return "its predecessor is still to be asked what it failed to answer"
        if not mirror.timed or self._well() < _LEAST_PAIRS:
            return ""
        # A cached response took no time: it is a sample and no pair.
        sampled, pairs = mirror.sampled, mirror.pairs()
        if sampled < _LEAST_PAIRS:
            return f"its predecessor was given {sampled} of {_LEAST_PAIRS} requests so far"
        if _UNCLEAR_SHARE * pairs.requests < pairs.slower < _SLOWER_SHARE * pairs.requests:
            return "whether it is slower than its predecessor is not clear"
        return ""

    def slower(self) -> str:
        """How the version is slower than its predecessor in the same minutes; empty where not."""
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
            # The run may be of a batch, of which the predecessor was given one request.
            rows = min(mirror.batch_size, max(1, self.scheduler.rows()))
            least_s = math.inf if old_s is None else max(_HANGS_S, 10 * rows * old_s)
        if run_s < least_s:
            return ""
        return f"version {self.model.version}: a run takes {run_s:.1f} s and does not end"

    def absence(self) -> str:
        """Why the model is away, where that is a fault of the version; empty where it is not."""
        reason, mirror = self.model.not_ready_reason(), self.compared
        if not reason or mirror is None:
            return reason
        better, replayed = mirror.better(Fault.FAILED)
        # A request that ends its predecessor's process as well is the caller's fault.
        callers_fault = not better if replayed else mirror.has_doubts
        return "" if callers_fault or mirror.not_ready_reason() else reason

    def _well(self) -> int:
        """How many requests the version has answered without a fault."""
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
            # Requests without a replay are assumed to be like those with one.
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
        # Its statistics count failures of members and of callers alike.
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
