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


class EventFeed:
    """Hands out events to one connection at a time, each at least once.

    A new connection begins after the last event that was acknowledged a minute ago, so that a
    broker that died with what it had acknowledged gets it again. Subscribers drop the ids that they
    have seen.

    Args:
        log: the device's events.
        now_s: the monotonic clock.
    """

    def __init__(self, log: EventLog, now_s: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._now_s = now_s
        self._position = log.acknowledged(READER)
        self._acknowledged: deque[tuple[float, int]] = deque()

    @property
    def waiting(self) -> bool:
        """Whether there is an event that the connection has not been given."""
        return self._log.newest > self._position

    def begin(self) -> None:
        """Start over for a new connection."""
        self._settle()
        self._acknowledged.clear()
        self._position = self._log.acknowledged(READER)

    def take(self) -> Event | None:
        """Return the next event, or None."""
        self._settle()
        if not self.waiting:
            return None
        event = self._log.after(self._position)[0]
        self._position = event.id
        return event

    def acknowledge(self, id_: int) -> None:
        """The broker has acknowledged the event; it does so in the order of publishing."""
        self._acknowledged.append((self._now_s() + SETTLED_S, id_))

    def _settle(self) -> None:
        while self._acknowledged and self._acknowledged[0][0] <= self._now_s():
            self._log.acknowledge(READER, self._acknowledged.popleft()[1])
