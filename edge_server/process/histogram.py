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
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def now(self) -> Distribution:
        return Distribution(self._bounds, tuple(accumulate(self._counts)), self._total)


class Histograms:
    """Counts durations in buckets, apart for each set of labels; any thread may call any method.

    An observation holds the lock of its own labels for a fraction of a microsecond.
    """

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self._lock = threading.Lock()
        self._series: Mapping[tuple[str, ...], _Series] = {}  # replaced, never changed

    def observe(self, labels: tuple[str, ...], seconds: float) -> None:
        series = self._series.get(labels) or self._add(labels)
        with series.lock:
            series.buckets.add(seconds)

    def forget(self, label: str) -> None:
        with self._lock:
            self._series = {key: each for key, each in self._series.items() if key[0] != label}

    def distributions(self) -> dict[tuple[str, ...], Distribution]:
        found = {}
        for labels, series in sorted(self._series.items()):
            with series.lock:
                found[labels] = series.buckets.now()
        return found

    def _add(self, labels: tuple[str, ...]) -> _Series:
        with self._lock:
            series = self._series.get(labels)
            if series is None:
                series = _Series(self._bounds_s)
                self._series = {**self._series, labels: series}
            return series


class _Series:
    __slots__ = ("buckets", "lock")

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self.lock = threading.Lock()
        self.buckets = Buckets(bounds_s)
