"""Delays between attempts to reach a remote service."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Backoff:
    """Doubling delays with jitter, so that the devices of a fleet do not reconnect all at once.

    The n-th delay lies between half and the whole of `first_s * 2**n`, at most `longest_s`.

    Args:
        first_s: upper bound of the first delay.
        longest_s: upper bound of all delays.
        draw: returns a number in 0..1 for each delay; 1.0 always takes the whole delay.
    """

    def __init__(
        self, first_s: float, longest_s: float, draw: Callable[[], float] = random.random
    ) -> None:
        self.longest_s = longest_s
        self._first_s = first_s
        self._draw = draw
        self._whole_s = first_s

    def next_s(self) -> float:
        """Return the delay before the next attempt."""
        whole_s = self._whole_s
        self._whole_s = min(self.longest_s, whole_s * 2)
        return whole_s * (0.5 + self._draw() / 2)

    def reset(self) -> None:
        """Restart from the first delay, after an attempt has succeeded."""
        self._whole_s = self._first_s
