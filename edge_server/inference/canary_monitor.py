"""A new version of a model is held against its predecessor while it serves its first requests."""

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
# How many bad ones there may be, beside three times what the predecessor had.
_MAY_FAIL = 0.05
_MAY_NOT_BE_FINITE = 0.01
# Times are compared where so many requests show them; it is slower where so many of them are, and
# not where no more are than half. Between the two it is watched on.
_LEAST_PAIRS = 30
_SLOWER_SHARE = 0.75
_UNCLEAR_SHARE = 0.5
# After so many replays of doubtful requests it need not wait for more.
_ENOUGH_DOUBTS = 20
# A run, or an absence, of this time is none that a request waits for.
_HANGS_S = 1.0
# Where nobody can ask the predecessor, it must be longer than what a busy machine takes, and than
# ten times what was three times the p99 before, of so many requests.
_HANGS_UNCOMPARED_S = 5.0
_LEAST_FOR_P99 = 50
# What does not come with an answer is looked for this often.
_LOOK_S = 0.25


@dataclass(frozen=True)
class CanaryTerms:
    """How long a new version is watched.

    It passes when it has answered `requests`, and `least_s` have gone, and it is clear whether it
    is slower; or after `longest_s`, however many it has answered. What served before it stays in
    memory till then.
    """

    requests: int = 200
    least_s: float = 30.0
    longest_s: float = 300.0


def recorded(model: LoadedModel, terms: CanaryTerms) -> LoadedModel:
    """`model`, which nothing judges; but what is seen of its first answers, unless it has been
    already, its successors are compared with."""
    if isinstance(model.scheduler, WatchedScheduler):
        return model
    watch = CanaryWindow(terms.requests, most=terms.requests)
    return replace(model, scheduler=WatchedScheduler(model.scheduler, watch, model.config))


class CanaryMonitor:
    """Watches the new versions of one model, and says once whether they are worse than what served
    before.

    A request that fails or is refused, or whose response is not finite, is doubtful: the
    predecessor is given the same request, and only where its response is good that counts (see
    `Mirror`). Worse is, with three such requests at least: more failures than 5 % and three times
    those that only the predecessor has; more responses with infinities or NaN than 1 % and three
    times likewise. Worse is also a run that takes more than 1 s and ten times as long as the
    predecessor for the same request (times the rows that its batch may have), and a model that is
    away for 1 s while its predecessor is not.

    A request that is cancelled, comes too late or finds no room is counted neither as good nor as
    bad.

    What keeps state, is decoupled or has another interface than its predecessor cannot be asked
    again: there the shares are compared with those of the predecessor's own first requests, numbers
    that are not finite count only where the caller sent none, and a run must take 5 s.

    A version that is only slower, in the same minutes and for the same requests, is no worse: it is
    told of, and stays. How fast a model may be is for whoever pushes it to say, and a machine that
    is busy must not take good lanes away.

    Args:
        name: of the model.
        on_failed: called with the reason, at most once, on a thread of this probation's own.
        on_passed: likewise; never both.
        on_over: called last, whatever the end.
        on_news: called with what a person is to know of a version that serves, whenever that
            changes; empty is nothing any more.
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
        # What it calls may take its time.
        self._worker = Worker(
            f"probation-{name}", self._wait_and_look, deadline_s=math.inf, on_end=self._close
        )

    def watch(
        self, model: LoadedModel, predecessor: LoadedModel, members: Sequence[LoadedModel] = ()
    ) -> LoadedModel:
        """`model` as it is to be published; to be called for each new version, before `start`.

        Args:
            predecessor: open, for as long as this takes.
            members: those of the predecessor, all the way down, where it is an ensemble; likewise.
        """
        mirror = Mirror.of(model, predecessor, members, changed=self._wake.set)
        watch = CanaryWindow(self._terms.requests, changed=self._wake.set)
        scheduler = WatchedScheduler(_unwatched(model), watch, model.config, mirror)
        shares = _failed_share(predecessor), _not_finite_share(predecessor)
        hangs_s = 30 * predecessor.statistics.p99_ns(_LEAST_FOR_P99) / 1e9
        self.watched.append(Watched(model, scheduler, watch, mirror, *shares, hangs_s))
        return replace(model, scheduler=scheduler)

    def start(self) -> None:
        """From now on a thread looks; returns at once."""
        self.begin(time.monotonic())
        for each in self.watched:
            if each.mirror is not None:
                each.mirror.start()
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
            self._tell(now)
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
        """Whether it was not over yet."""
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
        # Of versions that few ask for the others tell.
        seen = sum(each.watch.all.requests for each in self.watched)
        return seen >= self._terms.requests and seconds >= self._terms.least_s

    def _unclear(self) -> str:
        """Why it cannot pass yet though it has answered enough; empty where it can."""
        return next((text for each in self.watched if (text := each.unclear())), "")

    def _slower(self) -> str:
        """Which version is slower than its predecessor; empty where none is."""
        found = ((each.model.version, each.slower()) for each in self.watched)
        return next((f"version {version} is {text}" for version, text in found if text), "")

    def _tell(self, now: float) -> None:
        news = self._slower()
        if not news and self._has_seen_enough(now - self._began_s):
            news = f"watched for longer than {self._terms.least_s:g} s: {self._unclear()}"
        if news and not (self._news and news.startswith("watched")):
            self._set_news(news)

    def _set_news(self, news: str) -> None:
        # Told once for each kind: the figures change with every request.
        if news.partition(":")[0] != self._news.partition(":")[0]:
            if news:
                log.warning("model %s: %s", self._name, news)
            self._on_news(news)
            self._news = news

    def fault(self) -> str:
        """What its answers so far show to be worse; empty where they do not."""
        for each in self.watched:
            reason = each.reason()
            if reason:
                return f"version {each.model.version}: {reason}"
        return ""

    @property
    def has_doubts(self) -> bool:
        """Whether its predecessor is still to be asked what went wrong here."""
        return any(each.mirror is not None and each.mirror.has_doubts for each in self.watched)

    def _reason(self, now: float) -> str:
        return self.fault() or self._hang(now) or self._absence(now)

    def _hang(self, now: float) -> str:
        hangs = [hang for each in self.watched if (hang := each.hang(now))]
        # WindowCounts twice, so that a moment in which the whole machine stood still is none.
        return hangs[0] if self._hanging.since_s(now, there=bool(hangs)) >= _LOOK_S else ""

    def _absence(self, now: float) -> str:
        troubles = [trouble for each in self.watched if (trouble := each.absence())]
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
    """One new version, and what was usual before it.

    Attributes:
        mirror: None where its predecessor cannot be asked the same.
        failed_share, not_finite_share: of the predecessor's own requests.
        hangs_s: how long no run of the predecessor took, by far; 0 where nobody knows.
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
        """Its mirror, while that can tell anything."""
        return self.mirror if self.mirror is not None and self.mirror.comparable else None

    def reason(self) -> str:
        mirror = self.compared
        return self._by_shares() if mirror is None else self._by_replays(mirror)

    def unclear(self) -> str:
        """Why more requests would tell more of it than those that it has answered."""
        mirror = self.compared
        if mirror is None:
            return ""
        replayed = sum(mirror.better(fault)[1] for fault in Fault)
        # Somebody may go on for ever with what no version can answer.
        if mirror.has_doubts and replayed < _ENOUGH_DOUBTS:
            return "its predecessor is still to be asked what it failed to answer"
        if not mirror.timed or self._well() < _LEAST_PAIRS:
            return ""
        # An answer from the cache took no time.
        sampled, pairs = mirror.sampled, mirror.pairs()
        if sampled < _LEAST_PAIRS:
            return f"its predecessor was given {sampled} of {_LEAST_PAIRS} requests so far"
        if _UNCLEAR_SHARE * pairs.requests < pairs.slower < _SLOWER_SHARE * pairs.requests:
            return "whether it is slower than its predecessor is not clear"
        return ""

    def slower(self) -> str:
        """How it is slower than its predecessor in the same minutes; empty where it is not."""
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
        """Why the model is away, where that is its own doing; empty where it is not."""
        trouble, mirror = self.model.not_ready_reason(), self.compared
        if not trouble or mirror is None:
            return trouble
        better, replayed = mirror.better(Fault.FAILED)
        # What ends its predecessor's process as well is the caller's doing.
        callers_doing = not better if replayed else mirror.has_doubts
        return "" if callers_doing or mirror.not_ready_reason() else trouble

    def _well(self) -> int:
        """How many requests it has answered well."""
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
            # Those that were not replayed are taken to be like those that were.
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
        # Its statistics do not tell whose fault it was.
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
