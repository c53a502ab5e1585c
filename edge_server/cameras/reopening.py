"""When a source that was lost is opened again."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from edge_server.process.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.cameras.return_watch import ReturnWatch

# A source that is there again is opened before it is due so many times within that time.
_MOST_CALLS_BACK = 3
_CALLS_BACK_WITHIN_S = 10.0


class Reopening:
    """Says when a lost source is opened: after delays that double, or as soon as it is there again
    where that can be seen. Not thread-safe.

    A source that comes and goes is opened as often as the delays allow, and little more.

    Args:
        first_s: the first delay.
        longest_s: upper bound of the delays; after a source has run longer than this, they start
            from the first again.
        watch: makes what sees the source return; None where nothing does.
    """

    def __init__(
        self, first_s: float, longest_s: float, watch: Callable[[], ReturnWatch | None]
    ) -> None:
        self._backoff = Backoff(first_s, longest_s)
        self._new_watch = watch
        self._watch: ReturnWatch | None = None
        self._due = 0.0
        self._called_back: deque[float] = deque(maxlen=_MOST_CALLS_BACK)

    def lose(self, now: float, ran_s: float) -> None:
        """The source is lost; it ran for `ran_s`."""
        if ran_s > self._backoff.longest_s:
            self._backoff.reset()
        self._due = now + self._backoff.next_s()
        self.end()
        self._watch = self._new_watch()

    def is_due(self, now: float) -> bool:
        """Return whether the source is to be opened now."""
        return now >= self._due or self._is_back(now)

    def wait_s(self, now: float) -> float:
        """Return the seconds until the source is opened or looked for."""
        due = self._due if self._watch is None else min(self._due, self._watch.due)
        return max(0.0, due - now)

    def end(self) -> None:
        """Look for the source no more: it is opened, or nobody wants it."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _is_back(self, now: float) -> bool:
        """Return whether the source was away, and may be opened before it is due."""
        if self._watch is None or not self._watch.look(now):
            return False
        often = len(self._called_back) == _MOST_CALLS_BACK
        if often and now - self._called_back[0] < _CALLS_BACK_WITHIN_S:
            return False
        self._called_back.append(now)
        self._backoff.reset()
        return True
