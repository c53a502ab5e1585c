"""Back-pressure between the steps of an ensemble: `max_inflight_requests`."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class StepSlots:
    """How many requests one step of an ensemble may have at its model, over all callers.

    A slot is held by nothing but a request that its model has, so whoever waits for one waits for
    models only.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._parked: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()

    def take(self, again: Callable[[], None], *, urgent: bool) -> bool:
        """Take a slot; where none is left, `again` is called once when it is worth to ask again."""
        with self._changed:
            if self._taken < self._limit:
                self._taken += 1
                return True
            (self._parked.appendleft if urgent else self._parked.append)(again)
            return False

    def wait(self, deadline: float | None, given_up: Callable[[], bool]) -> bool:
        """Wait for a slot and take it; False after `deadline`, or once it is given up."""
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        with self._changed:
            free = self._changed.wait_for(lambda: given_up() or self._taken < self._limit, left_s)
            if not free or given_up():
                return False
            self._taken += 1
            return True

    def give_back(self) -> None:
        with self._changed:
            self._taken -= 1
            again = self._parked.popleft() if self._parked else None
            self._changed.notify_all()
        if again is not None:
            again()

    def look_again(self) -> None:
        """Let those who wait see that they may have given up."""
        with self._changed:
            self._changed.notify_all()
