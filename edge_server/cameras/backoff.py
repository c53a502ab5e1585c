"""How long to wait before the next attempt."""

from __future__ import annotations


class Backoff:
    """Delays that double from `first_s` up to `longest_s`, until `reset`."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self.first_s = first_s
        self.longest_s = longest_s
        self._next_s = first_s

    def next_delay_s(self) -> float:
        delay_s = self._next_s
        self._next_s = min(2 * delay_s, self.longest_s)
        return delay_s

    def reset(self) -> None:
        """Start again from `first_s`: what was retried has worked."""
        self._next_s = self.first_s
