"""Histograms: values counted in buckets, cheap enough for every frame and request."""

from __future__ import annotations

import threading
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# 1 ms … 1 s: a camera delivers 10 to 60 frames/s, lanes older than 0.2 s are stale, and those older
# than 1 s are not published.
FRAME_BOUNDS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0),
)


class Distribution(NamedTuple):
    """A histogram at one moment: for each upper bound, and infinity, how many observations are at
    most that; and the sum of all."""

    bounds: tuple[float, ...]
    at_most: tuple[int, ...]
    total: float


class Buckets:
    """A histogram with fixed bounds; the caller locks."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def now(self) -> Distribution:
        return Distribution(self.bounds, tuple(accumulate(self.counts)), self.total)


class Histograms:
    """Counts durations in buckets, apart for each set of labels; any thread may call any method.

    An observation holds the lock for a fraction of a microsecond.
    """

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self._lock = threading.Lock()
        self._series: dict[tuple[str, ...], Buckets] = {}

    def observe(self, seconds_of: Mapping[tuple[str, ...], float]) -> None:
        """Count one duration for each set of labels."""
        with self._lock:
            for labels, seconds in seconds_of.items():
                if labels not in self._series:
                    self._series[labels] = Buckets(self._bounds_s)
                self._series[labels].add(seconds)

    def forget(self, label: str) -> None:
        with self._lock:
            self._series = {key: each for key, each in self._series.items() if key[0] != label}

    def distributions(self) -> dict[tuple[str, ...], Distribution]:
        with self._lock:
            return {labels: each.now() for labels, each in sorted(self._series.items())}
