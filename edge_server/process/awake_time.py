"""AwakeTime: how long something stands still, by a monitor that did not stand still itself."""

from __future__ import annotations

from collections import deque
from math import inf

# Of the monitor's late looks. A monitor that looks twice a second and is late each time has those
# of the last eight minutes at least.
_MOST_REMEMBERED = 1000


class AwakeTime:
    """The age of what one monitor watches, without the time in which the monitor did not run.

    A process that was stopped, suspended or starved runs all its threads again at once, and the
    monitor may be the first of them. By the clock alone everything would then seem to hang. What
    this counts was there in all that time, and the monitor looked at it again and again.

    For the monitor's thread alone.

    Args:
        longest_s: the time between two looks that counts at most; of a longer one the rest was
            sleep. It is to be more than the monitor's period, and less than its limits.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._first = self._last = inf
        # When a sleep had ended, and how long it was.
        self._sleeps: deque[tuple[float, float]] = deque(maxlen=_MOST_REMEMBERED)

    def look(self, now: float) -> None:
        """Note that the monitor looks at `now` (`time.monotonic()`); called before `since`."""
        slept_s = now - self._last - self._longest_s
        if slept_s > 0:
            self._sleeps.append((now, slept_s))
        self._first, self._last = min(self._first, now), now

    def since(self, moment: float) -> float:
        """Return for how many seconds before the last look the monitor was awake after `moment`.

        What began before the first look counts from the first look.
        """
        slept_s = 0.0
        for ended, each_s in reversed(self._sleeps):
            if ended <= moment:
                break
            slept_s += each_s
        return max(0.0, self._last - max(moment, self._first) - slept_s)
