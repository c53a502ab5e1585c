"""Models that there was no memory for: what is to be done for them when there is."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from edge_server.process.backoff import Backoff

if TYPE_CHECKING:
    from edge_server.lifecycle.budget import MemoryBudget

# Between two loads of one model; memory that comes and goes must not make it a loop.
_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0

T = TypeVar("T")


class MemoryRetry(Generic[T]):
    """Work by model name, kept from a load that memory was too short for. Thread-safe.

    Args:
        budget: what refused them; None refuses nothing.
    """

    def __init__(self, budget: MemoryBudget | None) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept[T]] = {}

    def keep(self, name: str, work: T, now: float) -> None:
        """The last load of `name` failed at `now`: keep `work` if that was for want of memory."""
        lacked = 0 if self._budget is None else self._budget.lacked(name)
        with self._lock:
            if not lacked:
                self._kept.pop(name, None)
                return
            kept = self._kept.get(name)
            if kept is None:
                kept = self._kept[name] = _Kept(work)
                kept.pause(now)
            kept.work, kept.needs_bytes = work, lacked

    def forget(self, name: str) -> None:
        """It was loaded, or is something else by now."""
        with self._lock:
            self._kept.pop(name, None)

    def due(self, now: float) -> dict[str, T]:
        """What there is memory for by now, for each model after longer and longer pauses; kept
        until its load has ended one way or the other."""
        with self._lock:
            waited = {n: kept for n, kept in self._kept.items() if now >= kept.not_before}
        if self._budget is None:
            return {}
        due = {n: kept for n, kept in waited.items() if self._budget.has(kept.needs_bytes)}
        for kept in due.values():
            kept.pause(now)
        return {name: kept.work for name, kept in due.items()}


class _Kept(Generic[T]):
    """`not_before` is a time of `time.monotonic()`."""

    def __init__(self, work: T) -> None:
        self.work = work
        self.needs_bytes = 0
        self.not_before = 0.0
        self._pauses = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)

    def pause(self, now: float) -> None:
        self.not_before = now + self._pauses.next_s()
