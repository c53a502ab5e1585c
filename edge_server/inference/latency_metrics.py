"""Latencies of requests: which metrics of them are kept, and summaries over the last minute."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edge_server.backends.contract import Phases

# prometheus-cpp's own window, which Triton's summaries have: the last minute, in five parts.
_PART_NS = 12_000_000_000
_PARTS = 5
# The values of one bucket differ by at most 2 %, so its middle is at most 1 % from each of them.
_LOG_GROWTH = math.log(1.02)


@dataclass(frozen=True)
class LatencyMetrics:
    """Which metrics of latencies are kept (Triton's `--metrics-config`).

    Attributes:
        counters: total times, exported beside the counts.
        summaries: `quantiles` of the last minute.
        histograms: of the time to the first response of decoupled models.
    """

    counters: bool = True
    summaries: bool = False
    histograms: bool = False
    quantiles: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True)
class Summary:
    """A distribution at one moment.

    Attributes:
        count: of all observations, also those before the last minute.
        sum_ns: their sum.
        quantiles_ns: quantile → its value in the last minute; NaN without observations.
    """

    count: int
    sum_ns: int
    quantiles_ns: Mapping[float, float]


class SlidingSummary:
    """Quantiles of the last 48 to 60 s, each at most 1 % from a value of exactly that rank.

    The caller locks. Memory grows with the logarithm of the spread of the values: 1 us to 100 s are
    930 buckets.
    """

    def __init__(self) -> None:
        self._count = self._sum_ns = 0
        # The parts of the window that have observations, the newest last.
        self._parts: deque[tuple[int, Counter[int]]] = deque(maxlen=_PARTS)

    def add(self, ns: int, now_ns: int) -> None:
        """Count a value at `now_ns` (`time.monotonic_ns()`)."""
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


@dataclass(frozen=True)
class RequestSummaries:
    """The summaries of one model version; the fields are the names of Triton's metrics."""

    request: SlidingSummary = field(default_factory=SlidingSummary)
    queue: SlidingSummary = field(default_factory=SlidingSummary)
    compute_input: SlidingSummary = field(default_factory=SlidingSummary)
    compute_infer: SlidingSummary = field(default_factory=SlidingSummary)
    compute_output: SlidingSummary = field(default_factory=SlidingSummary)
    cache_hit: SlidingSummary = field(default_factory=SlidingSummary)
    cache_miss: SlidingSummary = field(default_factory=SlidingSummary)

    def succeeded(self, total_ns: int, queue_ns: int, phases: Phases, now_ns: int) -> None:
        for summary, ns in (
            (self.request, total_ns),
            (self.queue, queue_ns),
            (self.compute_input, phases.input),
            (self.compute_infer, phases.infer),
            (self.compute_output, phases.output),
        ):
            summary.add(ns, now_ns)
