"""Statistics of a model version: the numbers behind ModelStatistics and the metrics."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

from edge_server.process.histogram import Buckets

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edge_server.backends.contract import CopyDirection, Phases
    from edge_server.process.histogram import Distribution

# prometheus-cpp's own window, which Triton's summaries have: the last minute, in five parts.
_PART_NS = 12_000_000_000
_PARTS = 5
# The values of one bucket differ by at most 2 %, so its middle is at most 1 % from each of them.
_LOG_GROWTH = math.log(1.02)


@dataclass(frozen=True)
class LatencyMetrics:
    """Which metrics of latencies are kept (Triton's `--metrics-config`): total times, `quantiles`
    of the last minute; histograms of the phases of requests, and of the time to the first response
    of decoupled models.
    """

    counters: bool = True
    summaries: bool = False
    histograms: bool = False
    quantiles: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True)
class Summary:
    """All observations, and `quantiles_ns` of those of the last minute; NaN without any."""

    count: int
    sum_ns: int
    quantiles_ns: Mapping[float, float]


class SlidingSummary:
    """Quantiles of the last 48 to 60 s, each at most 1 % from a value of exactly that rank.

    The caller locks. Values from 1 us to 100 s have 930 buckets.
    """

    def __init__(self) -> None:
        self._count = self._sum_ns = 0
        # The parts of the window that have observations, the newest last.
        self._parts: deque[tuple[int, Counter[int]]] = deque(maxlen=_PARTS)

    def add(self, ns: int, now_ns: int) -> None:
        self._count += 1
        self._sum_ns += ns
        part = now_ns // _PART_NS
        if not self._parts or self._parts[-1][0] != part:
            self._parts.append((part, Counter()))
        self._parts[-1][1][math.ceil(math.log(max(1, ns)) / _LOG_GROWTH)] += 1

    def at(self, quantiles: Sequence[float], now_ns: int) -> Summary:
        oldest = now_ns // _PART_NS - _PARTS
        window: Counter[int] = Counter()
        for part, counts in self._parts:
            if part > oldest:
                window.update(counts)
        values = {share: _quantile_ns(window, share) for share in quantiles}
        return Summary(self._count, self._sum_ns, values)


def _quantile_ns(window: Counter[int], share: float) -> float:
    rank = math.ceil(share * window.total()) if window else 0
    for bucket, count in sorted(window.items()):
        rank -= count
        if rank <= 0:
            return math.exp((bucket - 0.5) * _LOG_GROWTH)
    return math.nan


# A model may send responses without end; each index has a counter, and all go to clients.
_MOST_RESPONSES = 1000
# The upper bounds of the buckets: four per power of two from 1 us, so that each bound is at most a
# quarter above the last.
_BOUNDS_NS = [(5 + quarter) << octave >> 2 for octave in range(10, 64) for quarter in range(4)]


PHASES = ("request", "queue", "compute_input", "compute_infer", "compute_output")
_SUMMARIES = (*PHASES, "cache_hit", "cache_miss")
# Of a phase in s, which Prometheus can add up over models and devices.
_PHASE_BOUNDS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0),
)
COUNTERS_ONLY = LatencyMetrics()
NO_TAGS: Mapping[str, str] = MappingProxyType({})


class FailureReason(Enum):
    """Why a request failed; the values are the metric's."""

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


@dataclass
class Duration:
    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        self.count += count
        self.ns += ns


@dataclass
class CopyCount:
    count: int = 0
    n_bytes: int = 0


@dataclass
class ComputeTimes:
    computed: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0

    def add(self, phases: Phases) -> None:
        self.computed += 1
        self.input_ns += phases.input
        self.infer_ns += phases.infer
        self.output_ns += phases.output

    @property
    def compute_input(self) -> Duration:
        return Duration(self.computed, self.input_ns)

    @property
    def compute_infer(self) -> Duration:
        return Duration(self.computed, self.infer_ns)

    @property
    def compute_output(self) -> Duration:
        return Duration(self.computed, self.output_ns)


@dataclass
class ResponseStatistics:
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    empty_response: Duration = field(default_factory=Duration)
    cancel: Duration = field(default_factory=Duration)


@dataclass
class Counts(ComputeTimes):
    """All numbers of one model version; the computations are those of whole requests.

    Attributes:
        batches: batch size → its executions.
        responses: index of a response of a decoupled request, "0" first; the last of
            `_MOST_RESPONSES` includes all after it."""

    last_inference_ns: int = 0
    padding: int = 0
    queue_ns: int = 0
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    cache_hit: Duration = field(default_factory=Duration)
    cache_miss: Duration = field(default_factory=Duration)
    failures: dict[FailureReason, int] = field(
        default_factory=lambda: dict.fromkeys(FailureReason, 0)
    )
    batches: defaultdict[int, ComputeTimes] = field(
        default_factory=lambda: defaultdict(ComputeTimes)
    )
    responses: defaultdict[str, ResponseStatistics] = field(
        default_factory=lambda: defaultdict(ResponseStatistics)
    )
    copies: dict[CopyDirection, CopyCount] = field(
        default_factory=lambda: {"to_host": CopyCount(), "to_device": CopyCount()}
    )

    @property
    def last_inference_ms(self) -> int:
        return self.last_inference_ns // 1_000_000

    @property
    def inference_count(self) -> int:
        return sum(size * runs.computed for size, runs in self.batches.items()) - self.padding

    @property
    def execution_count(self) -> int:
        return sum(runs.computed for runs in self.batches.values())

    @property
    def queue(self) -> Duration:
        return Duration(self.success.count, self.queue_ns)


class ModelStatistics:
    """Counts of one loaded model version; every method may be called from any thread."""

    def __init__(
        self,
        kept: LatencyMetrics = COUNTERS_ONLY,
        first_response_bounds_ms: Sequence[float] = (),
        tags: Mapping[str, str] = NO_TAGS,
        *,
        cached: bool = True,
    ) -> None:
        self.kept = kept
        self.tags = tags
        self.cached = cached
        self._lock = threading.Lock()
        self._bounds_ms = tuple(first_response_bounds_ms) if kept.histograms else ()
        self._begin()

    def _begin(self) -> None:
        self._counts = Counts()
        self._latencies = Buckets(_BOUNDS_NS)
        self._summaries = {n: SlidingSummary() for n in _SUMMARIES if self.kept.summaries}
        self._first_responses = Buckets(self._bounds_ms) if self._bounds_ms else None
        self._phases = {n: Buckets(_PHASE_BOUNDS_S) for n in PHASES if self.kept.histograms}

    def p99_ns(self, least: int) -> int:
        """An upper bound of 99 % of the model's response times; 0 with fewer than `least`
        requests."""
        with self._lock:
            bounds_ns, at_most, _ = self._latencies.now()
        if at_most[-1] < max(1, least):
            return 0
        return round(bounds_ns[bisect_left(at_most, 0.99 * at_most[-1])])

    def counts(self) -> Counts:
        with self._lock:
            return deepcopy(self._counts)

    def start_over(self) -> None:
        """Reset all numbers: runs before the model served count nowhere."""
        with self._lock:
            self._begin()

    def summaries(self) -> dict[str, Summary]:
        """Those that are kept, by name."""
        now_ns = time.monotonic_ns()
        with self._lock:
            kept = self._summaries.items()
            return {name: each.at(self.kept.quantiles, now_ns) for name, each in kept}

    def first_responses_ms(self) -> Distribution | None:
        """The times from a request to its first response; None where they are not kept."""
        with self._lock:
            return None if self._first_responses is None else self._first_responses.now()

    def phases_s(self) -> dict[str, Distribution]:
        """The durations of each of `PHASES` in s; empty where they are not kept."""
        with self._lock:
            return {name: each.now() for name, each in self._phases.items()}

    def executed(self, batch_size: int, phases: Phases, padding: int = 0) -> None:
        """Count a run of the model on `batch_size` elements (1 where the model does not batch)."""
        with self._lock:
            counts = self._counts
            counts.last_inference_ns = time.time_ns()
            counts.padding += padding
            counts.batches[batch_size].add(phases)

    def succeeded(self, total_ns: int, queue_ns: int, phases: Phases, alone: int = 0) -> None:
        """Count a request that got its last response, and its run, if `alone` is that run's batch
        size.
        """
        with self._lock:
            counts = self._counts
            counted: tuple[ComputeTimes, ...] = (counts,)
            if alone:
                counts.last_inference_ns = time.time_ns()
                counted = counts, counts.batches[alone]
            for times in counted:  # as `ComputeTimes.add`
                times.computed += 1
                times.input_ns += phases.input
                times.infer_ns += phases.infer
                times.output_ns += phases.output
            counts.success.count += 1
            counts.success.ns += total_ns
            counts.queue_ns += queue_ns
            self._latencies.add(total_ns)
            if self._summaries or self._phases:
                self._summarise(
                    request=total_ns,
                    queue=queue_ns,
                    compute_input=phases.input,
                    compute_infer=phases.infer,
                    compute_output=phases.output,
                )

    def hit(self, total_ns: int) -> None:
        """Count a request with a cached response: a success without computation."""
        with self._lock:
            self._counts.success.add(total_ns)
            self._counts.cache_hit.add(total_ns)
            self._summarise(request=total_ns, queue=0, cache_hit=total_ns)

    def missed(self, ns: int) -> None:
        with self._lock:
            self._counts.cache_miss.add(ns)
            self._summarise(cache_miss=ns)

    def failed(self, reason: FailureReason, total_ns: int) -> None:
        with self._lock:
            self._counts.fail.add(total_ns)
            self._counts.failures[reason] += 1

    def copied(self, direction: CopyDirection, n_bytes: int) -> None:
        with self._lock:
            copies = self._counts.copies[direction]
            copies.count += 1
            copies.n_bytes += n_bytes

    def first_responded(self, total_ns: int) -> None:
        if self._first_responses is not None:
            with self._lock:
                self._first_responses.add(total_ns / 1e6)

    def responded(self, index: int, ns: int, *, empty: bool = False, failed: bool = False) -> None:
        """Count the `index`-th response of a decoupled request, `ns` after the one before."""
        with self._lock:
            key = str(min(index, _MOST_RESPONSES - 1))
            response = self._counts.responses[key]
            if empty:
                response.empty_response.add(ns)
                return
            response.compute_infer.add(ns)
            response.compute_output.add(0)
            (response.fail if failed else response.success).add(ns)

    def _summarise(self, **durations_ns: int) -> None:
        now_ns = time.monotonic_ns()
        for name, ns in durations_ns.items():
            if self._summaries:
                self._summaries[name].add(ns, now_ns)
            if name in self._phases:
                self._phases[name].add(ns / 1e9)
