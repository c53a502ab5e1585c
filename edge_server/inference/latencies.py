"""A histogram of request durations that costs next to nothing to keep."""

from __future__ import annotations

# Four buckets per power of two, so that each bound is at most a quarter above the last.
_PER_OCTAVE_BITS = 2
_LEAST_NS = 1 << 10
_BUCKETS = 64 << _PER_OCTAVE_BITS


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
