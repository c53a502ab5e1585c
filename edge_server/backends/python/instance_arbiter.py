"""Choose the process that executes a batch: the instance's own, or a stand-in."""

from __future__ import annotations

import threading
import time
from math import inf
from typing import Generic, Protocol, TypeVar

from edge_server.errors import DeadlineExceeded


class Executes(Protocol):
    """A member of the arbiter: an instance that may be lent."""

    @property
    def up(self) -> bool:
        """Return whether the instance can execute now."""
        ...


E = TypeVar("E", bound=Executes)


class InstanceArbiter(Generic[E]):
    """Lends each of a model's processes to one batch at a time.

    While a process is down, the others also execute its batches. Without stand-ins the instance
    that is down would draw every request to itself, because an instance that refuses is idle again
    at once.

    Args:
        stand_in: an instance may execute another's batch; False where a sequence has its state in
            one process.
    """

    def __init__(self, *, stand_in: bool) -> None:
        self._stand_in = stand_in
        self._change = threading.Condition()
        self._all: list[E] = []
        self._busy: list[E] = []

    def add(self, one: E) -> None:
        """Add an instance that may stand in for the others."""
        with self._change:
            self._all.append(one)

    def take(self, own: E, deadline: float) -> E | None:
        """Lend `own`; while `own` is down, lend the first instance that is up and free.

        Returns:
            None when no instance is up.

        Raises:
            DeadlineExceeded: no instance became free before `deadline` (`time.monotonic()`;
                infinity waits forever).
        """
        with self._change:
            while True:
                up = [one for one in self._candidates(own) if one.up]
                if not up:
                    return None
                for one in up:
                    if one not in self._busy:
                        self._busy.append(one)
                        return one
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self._change.wait(None if left_s == inf else left_s):
                    raise DeadlineExceeded(
                        "the request's deadline passed before an instance was idle"
                    )

    def give_back(self, one: E) -> None:
        with self._change:
            self._busy.remove(one)
            self._change.notify_all()

    def changed(self) -> None:
        """Wake the waiting callers after an instance has come up or gone down."""
        with self._change:
            self._change.notify_all()

    def _candidates(self, own: E) -> list[E]:
        if own.up or not self._stand_in:
            return [own]
        return [own, *(one for one in self._all if one is not own)]
