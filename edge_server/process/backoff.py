"""How long to leave alone what could not be reached."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Backoff:
    """Doubling delays with jitter, so that a fleet does not come back in one moment.

    The n-th delay lies between half and the whole of `first_s * 2**n`, at most `longest_s`.

    Args:
        first_s: the whole of the first delay.
        longest_s: no delay is longer.
        draw: a number in 0..1 for each delay; 1.0 always takes the whole.
    """

    def __init__(
        self, first_s: float, longest_s: float, draw: Callable[[], float] = random.random
    ) -> None:
        self.longest_s = longest_s
        self._first_s = first_s
        self._draw = draw
        self._whole_s = first_s

    def next_s(self) -> float:
        """The delay before the next attempt."""
        whole_s = self._whole_s
        self._whole_s = min(self.longest_s, whole_s * 2)
        return whole_s * (0.5 + self._draw() / 2)

    def reset(self) -> None:
        """An attempt succeeded for good: begin again with the first delay."""
        self._whole_s = self._first_s
