"""The instances of one model: who may run next, and what runs for how long."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from edge_server.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from edge_server.backends.contract import Instance


class InstancePool:
    """Lends each instance to one caller at a time; urgent callers go before the others."""

    def __init__(self, instances: Sequence[Instance]) -> None:
        self._instances = tuple(instances)
        self._idle = list(instances)
        self._started_at: dict[int, float] = {}
        lock = threading.Lock()
        self._for_urgent = threading.Condition(lock)
        self._for_others = threading.Condition(lock)
        self._urgent_waiting = 0

    @contextmanager
    def lend(self, *, urgent: bool, deadline: float | None) -> Iterator[Instance]:
        """An idle instance for the block; waits for one until `deadline` (`time.monotonic()`).

        Raises:
            DeadlineExceeded: none was idle in time, or the time was up before it began.
        """
        instance = self._take(urgent=urgent, deadline=deadline)
        try:
            yield instance
        finally:
            self._give_back(instance)

    def longest_run_s(self, now: float) -> float:
        """How long the oldest run that has not ended takes by `now` (`time.monotonic()`)."""
        # A copy, so that a run that ends meanwhile does not disturb the look.
        return max((now - started for started in list(self._started_at.values())), default=0.0)

    def close(self) -> None:
        for instance in self._instances:
            instance.close()

    def _take(self, *, urgent: bool, deadline: float | None) -> Instance:
        turn = self._for_urgent if urgent else self._for_others
        with turn:
            self._urgent_waiting += urgent
            try:
                mine = turn.wait_for(
                    lambda: self._idle and (urgent or not self._urgent_waiting), _left_s(deadline)
                )
            finally:
                self._urgent_waiting -= urgent
            if not mine or _left_s(deadline) == 0.0:
                # The wake-up that was ours may be another's.
                self._wake_next()
                raise DeadlineExceeded("the request's deadline passed before an instance was idle")
            instance = self._idle.pop()
            self._started_at[id(instance)] = time.monotonic()
            # Two may have been given back while only this caller was woken.
            self._wake_next()
            return instance

    def _give_back(self, instance: Instance) -> None:
        with self._for_others:
            del self._started_at[id(instance)]
            self._idle.append(instance)
            self._wake_next()

    def _wake_next(self) -> None:
        if self._idle:
            (self._for_urgent if self._urgent_waiting else self._for_others).notify()


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
