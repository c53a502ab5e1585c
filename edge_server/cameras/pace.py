"""The clock that a recording is played by."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# A hiccup of the disk or the scheduler is caught up; after more than this, playing goes on from
# where it is, as a rush of late frames is nothing that a camera would do.
CATCH_UP_S = 0.25


class Pace:
    """QuarantineReleases its caller `fps` times a second, without drift.

    The first `wait` returns at once; each later one is due one period after the one before was
    due, however late the caller came. A caller more than `CATCH_UP_S` late starts a new schedule.

    Args:
        fps: frames per second; 0 never waits.
        clock: seconds, monotonic.
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
