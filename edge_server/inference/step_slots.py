"""Back-pressure between the steps of an ensemble: `max_inflight_requests`."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from edge_server.errors import Unavailable
from edge_server.inference.line_watch import MOST_WAITING

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.inference.line_watch import LineWatch


class Parked(Protocol):
    """A task that waits for a slot."""

    def __call__(self) -> None:
        """Try again: a slot may be free."""
        ...

    def is_over(self) -> bool:
        """Whether the request has ended; its caller then has its response."""
        ...


class StepSlots:
    """Limits how many requests one step of an ensemble has at its model, over all callers.

    Only a request at the model holds a slot, so a caller that waits for a slot waits for models
    only.

    Args:
        watch: drops the parked tasks of ended requests; None without such a watch.
    """

    def __init__(self, limit: int, watch: LineWatch | None = None) -> None:
        self._limit = limit
        self._watch = watch
        self._taken = 0
        self._parked: deque[Parked] = deque()
        self._held: list[Parked] = []
        self._changed = threading.Condition()

    def take(self, parked: Parked, *, urgent: bool) -> bool:
        """Take a slot; where none is left, `parked` is called once when one may be free.

        Raises:
            Unavailable: the limit of parked tasks is reached.
        """
        with self._changed:
            if self._taken < self._limit:
                self._taken += 1
                return True
            if len(self._parked) >= MOST_WAITING:
                raise Unavailable(
                    f"Exceeds maximum queue size: {MOST_WAITING} requests wait for a step already"
                )
            (self._parked.appendleft if urgent else self._parked.append)(parked)
            if self._watch is not None:
                self._watch.note_waiting()
            return False

    def drop_dead(self) -> bool:
        """Drop the tasks of ended requests; whether any others are parked or held."""
        with self._changed:
            parked, held = list(self._parked), list(self._held)
        for each in held:
            each.is_over()
        # Outside the lock, because `is_over` may respond to a caller.
        over = [each for each in parked if each.is_over()]
        with self._changed:
            for each in over:
                with suppress(ValueError):
                    self._parked.remove(each)
            return bool(self._parked or self._held)

    def wait(self, deadline: float | None, held: Parked, given_up: Callable[[], bool]) -> bool:
        """Wait for a slot and take it; False after `deadline`, or once `given_up` is true.

        Args:
            held: its `is_over` is called now and then, and makes `given_up` true.
        """
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        with self._changed:
            self._held.append(held)
            if self._watch is not None:
                self._watch.note_waiting()
            try:
                free = self._changed.wait_for(
                    lambda: given_up() or self._taken < self._limit, left_s
                )
            finally:
                self._held.remove(held)
            if not free or given_up():
                return False
            self._taken += 1
            return True

    def give_back(self) -> None:
        with self._changed:
            self._taken -= 1
            self._changed.notify_all()
        self.wake_next()

    def wake_next(self) -> None:
        """Wake one parked task where a slot is free that its intended taker did not take."""
        with self._changed:
            free = self._taken < self._limit
            parked = self._parked.popleft() if free and self._parked else None
        if parked is not None:
            parked()

    def look_again(self) -> None:
        """Wake all waiting threads to check whether they have given up."""
        with self._changed:
            self._changed.notify_all()
