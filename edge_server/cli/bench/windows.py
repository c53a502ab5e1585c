"""Windows of a measurement: when it is stable, and what its windows say together.

As perf_analyzer decides it: the last three windows agree with their mean in throughput and latency.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

AGREE = 3
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class LoadWindow:
    """The requests that were completed in a window of time.

    Attributes:
        seconds: its length.
        latencies_ms: of the successful requests.
        failed: number of the others.
    """

    seconds: float
    latencies_ms: Sequence[float]
    failed: int = 0

    @property
    def per_s(self) -> float:
        return len(self.latencies_ms) / self.seconds

    @property
    def mean_ms(self) -> float:
        return float(np.mean(self.latencies_ms)) if self.latencies_ms else 0.0


def is_stable(windows: Sequence[LoadWindow], tolerance: float) -> bool:
    """Return whether the last `AGREE` windows differ from their mean by `tolerance` at most, a
    share, in throughput and in mean latency."""
    last = windows[-AGREE:]
    if len(last) < AGREE or not all(window.latencies_ms for window in last):
        return False
    for values in ([w.per_s for w in last], [w.mean_ms for w in last]):
        mean = sum(values) / len(values)
        if any(abs(value - mean) > tolerance * mean for value in values):
            return False
    return True


@dataclass(frozen=True)
class Latency:
    """Of successful requests, in ms."""

    mean: float
    max: float
    percentiles: dict[int, float]

    @staticmethod
    def of(latencies_ms: Sequence[float]) -> Latency:
        """Return what `latencies_ms`, one at least, say."""
        found = np.percentile(latencies_ms, PERCENTILES)
        percentiles = dict(zip(PERCENTILES, map(float, found), strict=True))
        return Latency(float(np.mean(latencies_ms)), float(np.max(latencies_ms)), percentiles)


@dataclass(frozen=True)
class StageTimes:
    """Where a model's requests spent their time, a mean of each in ms; of all clients together.

    Attributes:
        total: from the arrival of a request until its response.
    """

    model: str
    requests: int
    total: float
    queue: float
    compute_input: float
    compute_infer: float
    compute_output: float


@dataclass(frozen=True)
class Measurement:
    """What was measured with one number of requests at a time.

    Attributes:
        per_s: inferences: requests, times the elements of a batch.
        stable: the windows agreed; otherwise these are the last ones, after the most that were
            allowed.
        windows: number of windows that it took.
        stages: the model, and after it the members of an ensemble.
    """

    concurrency: int
    per_s: float
    requests: int
    failed: int
    latency: Latency
    stable: bool
    windows: int
    stages: tuple[StageTimes, ...] = field(default=())

    @property
    def transport_ms(self) -> float:
        """What a request takes beside its time in the server's model: gRPC and the client."""
        return max(0.0, self.latency.mean - self.stages[0].total) if self.stages else 0.0
