"""Statistics of a model version: the numbers behind ModelStatistics and the metrics."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_server.backends.contract import CopyDirection, Phases


# A model may send responses without end; each index has a counter, and all go to clients.
_MOST_RESPONSES = 1000
# Four buckets per power of two, so that each bound is at most a quarter above the last.
_PER_OCTAVE_BITS = 2
_LEAST_NS = 1 << 10
_BUCKETS = 64 << _PER_OCTAVE_BITS


class FailureReason(Enum):
    """Why a request failed; the values are the metric's."""

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


@dataclass
class Duration:
    """The number of events and their total time."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        self.count += count
        self.ns += ns


@dataclass
class CopyCount:
    """The number and size of tensors copied between host and device in one direction."""

    count: int = 0
    n_bytes: int = 0


@dataclass
class BatchStatistics:
    """Executions of one batch size."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)

    def add(self, phases: Phases) -> None:
        self.compute_input.add(phases.input)
        self.compute_infer.add(phases.infer)
        self.compute_output.add(phases.output)


@dataclass
class ResponseStatistics:
    """Outcomes of the n-th responses of decoupled requests."""

    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    empty_response: Duration = field(default_factory=Duration)
    cancel: Duration = field(default_factory=Duration)


@dataclass
class Counts:
    """All numbers of one model version.

    Attributes:
        last_inference_ms: epoch; 0 before the first.
        inference_count: batch elements.
        execution_count: runs of the model; a batch is one.
        success: whole requests, from the data plane to their last response.
        failures: by reason; `fail` is their sum.
        batches: batch size → its executions.
        responses: index of a response of a decoupled request, "0" first; the last of
            `_MOST_RESPONSES` includes all after it.
        copies: of inputs to the model's device, and of outputs to the callers'.
    """

    last_inference_ms: int = 0
    inference_count: int = 0
    execution_count: int = 0
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    cache_hit: Duration = field(default_factory=Duration)
    cache_miss: Duration = field(default_factory=Duration)
    failures: dict[FailureReason, int] = field(
        default_factory=lambda: dict.fromkeys(FailureReason, 0)
    )
    batches: defaultdict[int, BatchStatistics] = field(
        default_factory=lambda: defaultdict(BatchStatistics)
    )
    responses: defaultdict[str, ResponseStatistics] = field(
        default_factory=lambda: defaultdict(ResponseStatistics)
    )
    copies: dict[CopyDirection, CopyCount] = field(
        default_factory=lambda: {"to_host": CopyCount(), "to_device": CopyCount()}
    )


class ModelStatistics:
    """Counts of one loaded model version; every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counts()
        self._latencies = Latencies()

    def p99_ns(self, least: int) -> int:
        """An approximate upper bound of 99 % of the model's response times; 0 with fewer than
        `least` requests."""
        with self._lock:
            enough = self._latencies.count >= least
            return self._latencies.quantile_ns(0.99) if enough else 0

    def counts(self) -> Counts:
        """A copy of the numbers at this moment."""
        with self._lock:
            return deepcopy(self._counts)

    def start_over(self) -> None:
        """Reset all numbers: runs before the model served count nowhere."""
        with self._lock:
            self._counts = Counts()
            self._latencies = Latencies()

    def executed(self, batch_size: int, phases: Phases, padding: int = 0) -> None:
        """Count a run of the model on `batch_size` elements (1 where the model does not batch).

        Args:
            padding: number of elements that belong to no request.
        """
        with self._lock:
            counts = self._counts
            counts.execution_count += 1
            counts.inference_count += batch_size - padding
            counts.last_inference_ms = time.time_ns() // 1_000_000
            counts.batches[batch_size].add(phases)

    def succeeded(self, total_ns: int, queue_ns: int, phases: Phases) -> None:
        """Count a request that got its last response."""
        with self._lock:
            counts = self._counts
            counts.success.add(total_ns)
            self._latencies.add(total_ns)
            counts.queue.add(queue_ns)
            counts.compute_input.add(phases.input)
            counts.compute_infer.add(phases.infer)
            counts.compute_output.add(phases.output)

    def hit(self, total_ns: int) -> None:
        """Count a request with a cached response: a success without computation."""
        with self._lock:
            self._counts.success.add(total_ns)
            self._counts.queue.add(0)
            self._counts.cache_hit.add(total_ns)

    def missed(self, ns: int) -> None:
        """Count a cache miss; lookup and insertion took `ns` together."""
        with self._lock:
            self._counts.cache_miss.add(ns)

    def failed(self, reason: FailureReason, total_ns: int) -> None:
        with self._lock:
            self._counts.fail.add(total_ns)
            self._counts.failures[reason] += 1

    def copied(self, direction: CopyDirection, n_bytes: int) -> None:
        """Count a tensor of `n_bytes` copied between host and device."""
        with self._lock:
            copies = self._counts.copies[direction]
            copies.count += 1
            copies.n_bytes += n_bytes

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


class Latencies:
    """Counts of durations in ns, in buckets a quarter wide; the caller locks."""

    def __init__(self) -> None:
        self.count = 0
        self._buckets = [0] * _BUCKETS

    def add(self, ns: int) -> None:
        self.count += 1
        ns = max(ns, _LEAST_NS)
        octave = ns.bit_length() - 1
        self._buckets[octave << 2 | (ns >> (octave - 2)) & 3] += 1

    def quantile_ns(self, share: float) -> int:
        """An upper bound of the quantile `share`, at most a quarter too high; 0 without counts."""
        above = self.count * (1 - share)
        for index in reversed(range(_BUCKETS)):
            above -= self._buckets[index]
            if above < 0:
                return (5 + (index & 3)) << (index >> 2) >> 2
        return 0
