"""Schedules the retries of loads that failed for a reason that may pass."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from edge_server.process.backoff import Backoff

if TYPE_CHECKING:
    from edge_server.lifecycle.budget import MemoryBudget

# Between two loads of one model, so that fluctuating memory does not cause a busy loop.
_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0

T = TypeVar("T")


class LoadRetry(Generic[T]):
    """Keeps work by model name for a retry after a failed load. Thread-safe.

    Args:
        budget: the memory budget of the loader; None checks no memory.
    """

    def __init__(self, budget: MemoryBudget | None) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept[T]] = {}

    def keep(self, name: str, work: T, now: float, *, passes: bool = False) -> bool:
        """Keep `work` for a retry if the last load of `name` lacked memory.

        Args:
            name: the model.
            work: the work to retry.
            now: the time of the failure (`time.monotonic()`).
            passes: True keeps `work` whatever the reason of the failure.

        Returns:
            Whether `work` is kept.
        """
        lacked = 0 if self._budget is None else self._budget.lacked(name)
        with self._lock:
            if not (lacked or passes):
                self._kept.pop(name, None)
                return False
            kept = self._kept.get(name)
            if kept is None:
                kept = self._kept[name] = _Kept(work)
                kept.pause(now)
            kept.work, kept.needs_bytes = work, lacked
            return True

    def forget(self, name: str) -> None:
        """Drop the retry of `name`, which was loaded or has changed."""
        with self._lock:
            self._kept.pop(name, None)

    def due(self, now: float) -> dict[str, T]:
        """Return the work due at `now` (`time.monotonic()`) for which there is enough memory; the
        pauses of each model grow, and the work stays kept until `forget` or the next `keep`."""
        with self._lock:
            waited = {n: kept for n, kept in self._kept.items() if now >= kept.not_before}
        due = {n: kept for n, kept in waited.items() if self._has(kept.needs_bytes)}
        for kept in due.values():
            kept.pause(now)
        return {name: kept.work for name, kept in due.items()}

    def _has(self, needed_bytes: int) -> bool:
        return not needed_bytes or self._budget is None or self._budget.has(needed_bytes)


class _Kept(Generic[T]):
    """The kept work of one model; `not_before` is a time of `time.monotonic()`."""

    def __init__(self, work: T) -> None:
        self.work = work
        self.needs_bytes = 0
        self.not_before = 0.0
        self._pauses = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)

    def pause(self, now: float) -> None:
        self.not_before = now + self._pauses.next_s()
