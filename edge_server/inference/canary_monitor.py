"""The canary monitor: compares a new version with its predecessor while both are loaded."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from dataclasses import replace as with_fields
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from edge_server.errors import EdgeServerError, InvalidRequest
from edge_server.inference.data_plane import MODEL_STUCK_S
from edge_server.inference.mirror import (
    MOST_SAMPLES,
    WITHOUT_VERDICT,
    Fault,
    Mirror,
    ReplayTarget,
    all_finite,
    has_non_finite,
)
from edge_server.inference.registry import SchedulerWrapper
from edge_server.inference.statistics import FailureReason
from edge_server.process.threads import AwakeTime, Worker
from edge_server.requests import InferResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from edge_server.inference.registry import LoadedModel, Scheduler, Snapshot
    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import InferRequest, Respond, ResponseCallback

log = logging.getLogger(__name__)

# One or two bad requests may be chance.
_LEAST_BAD = 3
# The tolerated shares of bad requests, beside three times those of the predecessor, and the words
# of a verdict.
_TOLERATED = {
    Fault.FAILED: (0.05, "requests failed", "did"),
    Fault.NOT_FINITE: (0.01, "responses were not finite", "were not"),
}
# A request is slower that takes more than twice the predecessor's time and this in addition.
_SLOWER_NS = 2_000_000
# The minimum number of requests for a comparison of times. A version is slower altogether where
# this share of its requests is, and for some where so many more are than chance explains: a busy
# machine slows either version alike, so three times as many as the predecessor is slower for.
_LEAST_TIMED = 30
_SLOWER_SHARE = 0.75
_LEAST_SLOWER = 8
_BY_CHANCE = 3
# After this many replays of requests with a fault a version passes without more of them.
_ENOUGH_REPLAYS = 20
# A run, or an absence of the model, of this length counts as a hang for any request.
HANGS_S = 1.0
# Where the predecessor has no response to the same request, a run hangs when it exceeds both this
# (more than a busy machine needs) and 30 times the predecessor's p99, taken over at least so many
# requests.
_HANGS_UNCOMPARED_S = 5.0
LEAST_FOR_P99 = 50
# Whatever is known of the predecessor, a run, or an absence, that lasts so long is the version's
# fault: the supervisor would end the process for it a little later, and not the version.
UNDECIDED_S = MODEL_STUCK_S / 2
# How many sequences with non-finite inputs are remembered.
_MOST_SPOILT = 1024


class WatchedScheduler(SchedulerWrapper):
    """Passes requests on to `scheduler` and counts their responses, until `end` or `most` requests.

    Until then responses are on the host, where they can be checked. A `mirror` gets the requests
    whose response has a fault and a sample of the others. A non-finite response counts only where
    the request, and with it its sequence, held finite numbers alone."""

    def __init__(
        self,
        scheduler: Scheduler,
        config: ModelConfig,
        window: int,
        mirror: Mirror | None = None,
        *,
        most: int | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(scheduler)
        self._mirror = mirror
        self._most = most
        self._wake = wake
        self._spoilt = None if config.sequence_batching is None else _SpoiltSequences()
        self._lock = threading.Lock()
        self._ended = False
        self._last: deque[Fault | None] = deque(maxlen=window)
        self._seen: Counter[Fault | None] = Counter()
        # The arrival time of each request without a last response, and the request.
        self._running: dict[int, tuple[float, InferRequest]] = {}

    @property
    def recent(self) -> Counter[Fault | None]:
        """The last requests by fault; None is none."""
        with self._lock:
            return Counter(self._last)

    @property
    def seen(self) -> Counter[Fault | None]:
        with self._lock:
            return self._seen.copy()

    def end(self) -> None:
        self._ended = True
        self._mirror = None

    def oldest(self) -> InferRequest | None:
        """The request that has waited longest for its last response; only with a mirror."""
        running = list(self._running.values())
        return min(running, key=lambda each: each[0])[1] if running else None

    def infer(self, request: InferRequest, snapshot: Snapshot) -> InferResponse:
        if self._ended:
            return self.beneath.infer(request, snapshot)
        return super().infer(request, snapshot)

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        if self._ended:
            self.beneath.submit(request, snapshot, respond)
            return
        if request.on_device:
            request = replace(request, on_device=False)
        if self._mirror is not None:
            self._running[id(request)] = (time.monotonic(), request)
        spoilt = self._spoilt is not None and self._spoilt.has(request)
        finite = True

        def check(response: ResponseCallback, final: bool) -> None:
            nonlocal finite
            if final:
                self._running.pop(id(request), None)
            try:
                finite = finite and not has_non_finite(response)
                if final:
                    # Before `respond`: afterwards the caller may write into the inputs.
                    fault = None if finite else Fault.NOT_FINITE
                    if isinstance(response, EdgeServerError):
                        fault = Fault.FAILED
                    self._note(request, response, None if spoilt else fault)
            except Exception:
                # The check may run out of memory; the caller gets the response even so.
                log.exception("model %s: a response could not be checked", request.model_name)
            respond(response, final)

        try:
            self.beneath.submit(request, snapshot, check)
        except BaseException:
            self._running.pop(id(request), None)
            raise

    def _note(self, request: InferRequest, response: ResponseCallback, fault: Fault | None) -> None:
        if isinstance(response, WITHOUT_VERDICT):
            return
        mirror = self._mirror
        if fault is Fault.NOT_FINITE and not all_finite(request):
            # Such a response to inputs that are not finite is no fault of the version.
            self._count(None)
            return
        if mirror is None or not mirror.comparable:
            if isinstance(response, InvalidRequest):
                # Only the predecessor could show that the request was not at fault.
                return
        elif fault is not None:
            mirror.compare(request, fault)
        elif isinstance(response, InferResponse) and mirror.wants_sample():
            mirror.sample(request, response)
        self._count(fault)

    def _count(self, fault: Fault | None) -> None:
        with self._lock:
            if self._ended:
                return
            self._last.append(fault)
            self._seen[fault] += 1
            self._ended = self._seen.total() == self._most
        if fault is not None:
            self._wake()


class _SpoiltSequences:
    def __init__(self) -> None:
        self._ids: set[int | str] = set()

    def has(self, request: InferRequest) -> bool:
        place = request.sequence
        if place is None:
            return not all_finite(request)
        if place.start:
            self._ids.discard(place.id)
        if len(self._ids) <= _MOST_SPOILT and not all_finite(request):
            self._ids.add(place.id)
        # Beyond that number any sequence may be one of them.
        spoilt = place.id in self._ids or len(self._ids) > _MOST_SPOILT
        if place.end:
            self._ids.discard(place.id)
        return spoilt


class WatchedVersion(NamedTuple):
    """One new version, its `mirror` (None where the predecessor cannot replay its requests), and of
    the predecessor the `shares` of its own requests with each fault and in `hangs_s` 30 times its
    p99, 0 with too few requests."""

    model: LoadedModel
    scheduler: WatchedScheduler
    mirror: Mirror | None
    shares: Mapping[Fault, float]
    hangs_s: float

    @property
    def compared(self) -> Mirror | None:
        """The mirror, while it can compare."""
        return self.mirror if self.mirror is not None and self.mirror.comparable else None

    def fault(self) -> str:
        """Why the responses show that the version is worse; empty where they do not."""
        recent, mirror = self.scheduler.recent, self.compared
        requests = recent.total()
        for fault, (tolerated, what, did) in _TOLERATED.items():
            bad = better = replayed = recent[fault]
            share = self.shares[fault]
            evidence = f"before it {share:.1%} {did}"
            if mirror is not None:
                better, replayed = mirror.better(fault)
                share = mirror.worse_share(fault) if mirror.target.calculates else share
                evidence = (
                    f"its predecessor, given {replayed} of these requests, responded well to "
                    f"{better}"
                )
            # Requests without a replay are assumed to resemble the replayed ones.
            if (
                better >= _LEAST_BAD
                and bad * better / replayed > (tolerated + 3 * share) * requests
            ):
                return f"{bad} of {requests} {what}; {evidence}"
        return ""

    def unclear(self) -> str:
        """Why the version needs more requests before it can pass; empty where it needs none."""
        mirror = self.compared
        if mirror is None:
            return ""
        replayed = sum(mirror.better(fault)[1] for fault in Fault)
        # A client may send requests for ever that every version fails.
        if mirror.is_comparing and replayed < _ENOUGH_REPLAYS:
            return "its predecessor is still to be given the requests that it failed"
        if not mirror.timed or self.scheduler.seen[None] < _LEAST_TIMED:
            return ""
        # A cached response took no time, so it counts as a sample only.
        sampled = mirror.sampled
        if sampled < _LEAST_TIMED:
            return f"its predecessor was given {sampled} of {_LEAST_TIMED} requests so far"
        if sampled < MOST_SAMPLES and 1 < _beyond_chance(mirror.times()) < _LEAST_SLOWER:
            return "whether it is slower than its predecessor is not clear"
        return ""

    def slower(self) -> str:
        mirror = self.compared
        times = mirror.times() if mirror is not None and mirror.timed else []
        if len(times) < _LEAST_TIMED or _beyond_chance(times) < _LEAST_SLOWER:
            return ""
        slower = [pair for pair in times if _is_slower(*pair)]
        altogether = len(slower) >= _SLOWER_SHARE * len(times)
        which = "" if altogether else f" for {len(slower)} of {len(times)} requests"
        shown = times if altogether else slower
        new_ms, old_ms = (median(each_ns) / 1e6 for each_ns in zip(*shown, strict=True))
        return (
            f"slower than its predecessor{which}: {new_ms:.1f} ms beside {old_ms:.1f} ms, the "
            f"medians of {len(shown)} requests that both were given"
        )

    def hang(self, awake: AwakeTime) -> str:
        """The run that hangs; on the monitor's thread, which replays the request at once."""
        run_s = awake.since(self.scheduler.running_since())
        if run_s < HANGS_S:
            return ""
        mirror, oldest = self.compared, self.scheduler.oldest()
        old_s = None if mirror is None or oldest is None else mirror.time_s(oldest)
        if mirror is None or old_s is None:
            least_s = max(_HANGS_UNCOMPARED_S, self.hangs_s or math.inf)
        else:
            # The run may be a batch, of which the predecessor replayed a single request. A busy
            # machine may have held up the run and not that one replay, but then others, too.
            slowest_s = max((old_ns for _, old_ns in mirror.times()), default=0) / 1e9
            least_s = max(HANGS_S, 10 * mirror.target.batch_size * old_s, 10 * slowest_s)
        if run_s < min(UNDECIDED_S, least_s):
            return ""
        return f"version {self.model.version}: a run takes {run_s:.1f} s and does not end"

    def absence(self) -> str:
        """Why the model is away, where the version is at fault; empty otherwise."""
        reason, mirror = self.model.not_ready_reason(), self.compared
        if not reason or mirror is None:
            return reason
        waits = mirror.is_comparing and not mirror.better(Fault.FAILED)[1]
        return "" if waits or mirror.target.not_ready_reason() else reason

    def excuses(self) -> int:
        """How many requests have failed on the predecessor likewise, so that the caller may be at
        fault for the absence; 0 where the predecessor responded well to another one."""
        mirror = self.compared
        if mirror is None or mirror.better(Fault.FAILED)[0]:
            return 0
        return mirror.shared_failures


def _is_slower(new_ns: int, old_ns: int) -> bool:
    return new_ns > 2 * old_ns + _SLOWER_NS


def _beyond_chance(times: Sequence[tuple[int, int]]) -> int:
    """How many requests the new version was slower for, beside those that chance explains."""
    slower = sum(_is_slower(new_ns, old_ns) for new_ns, old_ns in times)
    return slower - _BY_CHANCE * sum(_is_slower(old_ns, new_ns) for new_ns, old_ns in times)


def fault_shares(model: LoadedModel) -> Mapping[Fault, float]:
    scheduler = model.scheduler
    shares = dict.fromkeys(Fault, 0.0)
    if isinstance(scheduler, WatchedScheduler):
        seen = scheduler.seen
        shares = {fault: seen[fault] / max(1, seen.total()) for fault in Fault}
    # The statistics of an ensemble mix failures of members with those of callers.
    if not model.config.is_ensemble:
        counts = model.statistics.counts()
        failed = counts.failures[FailureReason.BACKEND]
        shares[Fault.FAILED] = failed / (failed + counts.success.count) if failed else 0.0
    return shares


# The interval at which the thread checks for runs that hang.
_CHECK_S = 0.25


@dataclass(frozen=True)
class CanaryTerms:
    """A version passes when it has responded to `requests` requests, `least_s` have passed, and it
    is known whether it is slower; or after `longest_s`. Until then its predecessor stays in
    memory."""

    requests: int = 200
    least_s: float = 30.0
    longest_s: float = 300.0


def recorded(model: LoadedModel, terms: CanaryTerms) -> LoadedModel:
    """`model` with a count of its first responses, the baseline for its successors; the count
    leads to no verdict on `model` itself."""
    if isinstance(model.scheduler, WatchedScheduler):
        return model
    scheduler = WatchedScheduler(model.scheduler, model.config, terms.requests, most=terms.requests)
    return with_fields(model, scheduler=scheduler)


class CanaryMonitor:
    """Watches the new versions of one model and gives one verdict: worse than their predecessor, or
    not.

    A request that fails or is refused, or whose response is not finite, is replayed on the
    predecessor, and counts only where that responds well (see `Mirror`). With at least three such
    requests a version is worse when more than 5 % of its requests fail, or more than 1 % of its
    responses are not finite, and three times what only the predecessor has of them; when a run
    takes more than 1 s and ten times as long as the predecessor needs for the same request (times
    the rows that its batch may have) and for the slowest that both were given; and when its model
    is away for 1 s while the predecessor is not. A standstill of the whole process counts for
    neither (see `AwakeTime`). Where the predecessor has no response to compare, the run hangs after
    5 s and 30 times its p99. Both limits end at 30 s; so long may the model be away, too.

    A request that is cancelled, late or finds the queue full does not count. Requests of a model
    that keeps state, is decoupled or has another interface than its predecessor cannot be replayed:
    the shares are compared with those of the predecessor's own first requests.

    A version that is only slower is reported and stays: the team that pushes it sets its allowed
    latency, and a busy machine must not take good lanes away.

    Args:
        on_failed: called with the reason, at most once, on the thread of this monitor.
        on_over: called last, whatever the verdict.
        on_news: called when the news of a serving version change; empty where there are none any
            more."""

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
        """Return `model` with a watched scheduler, to be published; for each new version, before
        `start`. The predecessor, and its `members` where it is an ensemble, stay open until the
        canary is over."""
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
        return with_fields(model, scheduler=scheduler)

    def start(self) -> None:
        """Start the monitor's thread; returns at once. Where the system gives no thread the
        versions serve unwatched, and `on_over` is called."""
        self.begin(time.monotonic())
        try:
            self._worker.start()
        except RuntimeError as error:
            log.warning("model %s: not compared with its predecessor: %s", self._name, error)
            self._end()
            self._close()

    def begin(self, now: float) -> None:
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

    def check(self, now: float) -> bool:
        """Give the verdict that is due at `now`; True while there is none."""
        self._awake.look(now)
        hangs = (text for each in self.watched if (text := each.hang(self._awake)))
        reason = self.fault() or next(hangs, "") or self._absence(now)
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
        found = ((each.model.version, each.fault()) for each in self.watched)
        return next((f"version {version}: {text}" for version, text in found if text), "")

    @property
    def is_comparing(self) -> bool:
        mirrors = [each.mirror for each in self.watched]
        return not self._over and any(m is not None and m.is_comparing for m in mirrors)

    def _tick(self, now: float) -> bool:
        mirrors = [each.mirror for each in self.watched if each.mirror is not None]
        self._wake.wait(min([_CHECK_S, *(mirror.wait_s(now) for mirror in mirrors)]))
        self._wake.clear()
        for mirror in mirrors:
            if not self._over and mirror.wait_s(time.monotonic()) == 0:
                mirror.step()
        return self.check(time.monotonic())

    def _end(self) -> bool:
        """False where the canary had ended before."""
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
        found = ((each.model.version, each.slower()) for each in self.watched)
        return next((f"version {version} is {text}" for version, text in found if text), "")

    def _set_news(self, news: str) -> None:
        # Logged once per kind: the figures change with every request.
        if news.partition(":")[0] != self._news.partition(":")[0]:
            if news:
                log.warning("model %s: %s", self._name, news)
            self._on_news(news)
            self._news = news

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
