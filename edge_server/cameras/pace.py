"""The clock that paces the playback of a recording."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# A delay by the disk or the scheduler up to this long is caught up. After a longer delay, playback
# continues from its current frame, as a camera never sends a burst of late frames.
CATCH_UP_S = 0.25


class Pace:
    """Paces its caller at `fps` calls a second, without drift.

    The first `wait` returns at once; each later wait is due one period after the previous one was
    due, however late the caller came. A caller more than `CATCH_UP_S` late starts a new schedule.

    Args:
        fps: frames per second; 0 never waits.
        clock: returns monotonic time in seconds.
        sleep: blocks for the given seconds.
    """

    def __init__(
        self,
        fps: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._period_s = 1.0 / fps if fps else 0.0
        self._clock = clock
        self._sleep = sleep
        self._due: float | None = None

    def wait(self) -> None:
        """Block until the next frame is due."""
        if not self._period_s:
            return
        now = self._clock()
        if self._due is None or now - self._due > CATCH_UP_S:
            self._due = now
        if now < self._due:
            self._sleep(self._due - now)
        self._due += self._period_s
