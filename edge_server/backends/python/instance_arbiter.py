"""Which process of a model executes a batch: the instance's own, or one that stands in for it."""

from __future__ import annotations

import threading
import time
from math import inf
from typing import Generic, Protocol, TypeVar

from edge_server.errors import DeadlineExceeded


class Executes(Protocol):
    """What takes turns."""

    @property
    def up(self) -> bool:
        """Whether it can execute now."""
        ...


E = TypeVar("E", bound=Executes)


class InstanceArbiter(Generic[E]):
    """Lends each of a model's processes to one batch at a time.

    While a process is away the others do its work too: without that it would draw every request
    to itself, because nothing is as quickly idle again as what refuses.

    Args:
        stand_in: one may do another's work; not where a sequence has its state in one of them.
    """

    def __init__(self, *, stand_in: bool) -> None:
        self._stand_in = stand_in
        self._change = threading.Condition()
        self._all: list[E] = []
        self._busy: list[E] = []

    def add(self, one: E) -> None:
        """From now on it may stand in for the others."""
        with self._change:
            self._all.append(one)

    def take(self, own: E, deadline: float) -> E | None:
        """`own`, or where it is away whichever is up and free first; None where none is up.

        Raises:
            DeadlineExceeded: none became free before `deadline` (`time.monotonic()`; infinity
                waits for ever).
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
        """One came up, or went away."""
        with self._change:
            self._change.notify_all()

    def _candidates(self, own: E) -> list[E]:
        if own.up or not self._stand_in:
            return [own]
        return [own, *(one for one in self._all if one is not own)]
