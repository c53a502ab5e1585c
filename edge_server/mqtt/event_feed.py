"""EventFeed: the events that a broker has yet to take, in their order."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.pipeline.event_log import EventLog
    from edge_server.pipeline.events import Event

READER: Final = "mqtt"
# A broker that dies forgets what it has acknowledged and not yet written or passed on.
SETTLED_S: Final = 60.0
_MARK_EVERY_S: Final = 0.5


class EventFeed:
    """Hands out events to one connection at a time, each at least once.

    The broker retains a mark, the newest event that it has acknowledged. A broker that died comes
    back with messages, sessions and mark of one and the same moment, seconds or hours old, and gets
    what follows its mark. One that comes back without a mark gets what it acknowledged in the last
    minute, and everything after. Subscribers drop the ids that they have seen.

    Args:
        log: the device's events.
        now_s: the monotonic clock.
    """

    def __init__(self, log: EventLog, now_s: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._now_s = now_s
        self._position = log.acknowledged(READER)
        self._acknowledged: deque[tuple[float, int]] = deque()
        self._marked = 0
        self._mark_at = 0.0

    @property
    def waiting(self) -> bool:
        """Whether there is an event that the connection has not been given."""
        return self._log.newest > self._position

    def begin(self, mark: int | None = None) -> None:
        """Start over for a new connection.

        Args:
            mark: that the broker has; None without one. One beyond the newest event is of a log
                that was erased, or of another device.
        """
        self._settle()
        self._acknowledged.clear()
        known = mark is not None and mark <= self._log.newest
        self._position = mark if mark is not None and known else self._log.acknowledged(READER)
        self._marked = self._position if known else 0

    def take(self) -> Event | None:
        """Return the next event, or None."""
        self._settle()
        event = self._log.next_after(self._position)
        if event is not None:
            self._position = event.id
        return event

    def acknowledge(self, id_: int) -> None:
        """The broker has acknowledged the event; it does so in the order of publishing."""
        self._acknowledged.append((self._now_s() + SETTLED_S, id_))

    def take_mark(self) -> int | None:
        """Return the mark that the broker shall have from now on, or None: at most one in
        `_MARK_EVERY_S`, as each costs a message."""
        if not self._acknowledged or self._now_s() < self._mark_at:
            return None
        newest = self._acknowledged[-1][1]
        if newest == self._marked:
            return None
        self._marked = newest
        self._mark_at = self._now_s() + _MARK_EVERY_S
        return newest

    def _settle(self) -> None:
        while self._acknowledged and self._acknowledged[0][0] <= self._now_s():
            self._log.acknowledge(READER, self._acknowledged.popleft()[1])
