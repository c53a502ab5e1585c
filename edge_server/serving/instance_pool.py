"""The instances of one model: who may run next, and what runs for how long."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from edge_server.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_server.backends.contract import Instance, Model
    from edge_server.model_config.config import ModelConfig


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

    @staticmethod
    def of(config: ModelConfig, model: Model) -> InstancePool:
        """All the instances that the configuration asks for.

        Raises:
            EdgeServerError: one cannot be made; those before it are closed again.
        """
        made: list[Instance] = []
        try:
            for group in config.instance_groups:
                made += [model.make_instance(f"{group.name}_{i}") for i in range(group.count)]
        except BaseException:
            for instance in made:
                instance.close()
            raise
        return InstancePool(made)

    def __len__(self) -> int:
        return len(self._instances)

    def longest_run_s(self, now: float) -> float:
        """How long the oldest run that has not ended takes by `now` (`time.monotonic()`)."""
        # A copy, so that a run that ends meanwhile does not disturb the look.
        return max((now - started for started in list(self._started_at.values())), default=0.0)

    def close(self) -> None:
        for instance in self._instances:
            instance.close()

    def take(self, *, urgent: bool, deadline: float | None) -> Instance:
        """An idle instance, the caller's until `give_back`; waits for one until `deadline`.

        Raises:
            DeadlineExceeded: none was idle in time (`time.monotonic()`), or the time was up
                before it began.
        """
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

    def give_back(self, instance: Instance) -> None:
        with self._for_others:
            del self._started_at[id(instance)]
            self._idle.append(instance)
            self._wake_next()

    def _wake_next(self) -> None:
        if self._idle:
            (self._for_urgent if self._urgent_waiting else self._for_others).notify()


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
