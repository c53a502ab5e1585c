"""Feed: what this device publishes, whichever broker takes it. EventFeed: the events that a broker
has yet to take, in their order."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Final

from edge_server.lanes.e2e import Envelope, new_session
from edge_server.mqtt import payloads
from edge_server.mqtt.connection import KEEPALIVE_S
from edge_server.mqtt.outbox import Outbox
from edge_server.process.histogram import FRAME_BOUNDS_S, Histograms
from edge_server.process.worker import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge_server.board.identity import Identity
    from edge_server.lanes.types import LaneFrame
    from edge_server.mqtt.payloads import Mark, Topics
    from edge_server.pipeline.event_log import Event, EventLog
    from edge_server.pipeline.vehicle import VehicleInputs

log = logging.getLogger(__name__)

# Longer and longer pauses leave the broker, and whoever reads, in peace.
_PAUSE_S: Final = (5.0, 300.0)
# A connection that lasts for longer than any pause shows that the other client is gone.
_OVER_S: Final = 2 * _PAUSE_S[1]
_OWN_ID: Final = "give every device an id of its own: device.id (--device-id)"


class Contest:
    """What is known of others that publish as this device; for one thread.

    Args:
        identity: of this device.
        session: of this process, as in its births.

    Attributes:
        text: which other client there is, and the remedy; empty while none is known.
        taken_over: number of connections that another client with this client id has ended.
    """

    def __init__(self, identity: Identity, session: str) -> None:
        self.text = ""
        self.taken_over = 0
        self._identity = identity
        self._session = session
        self._earlier: set[str] = set()  # runs that had retained their birth before ours
        self._hints = 0
        self._has_our_id = False
        self._is_here = False  # it was seen with our client id during this connection
        self._backoff = Backoff(*_PAUSE_S)

    def see(self, payload: bytes, *, retained: bool, first: bool) -> bool:
        """Look at a birth on this device's topic; return whether the other client is news.

        Args:
            retained: the broker had it already when this device subscribed.
            first: the broker had no birth of this process then, so that a retained one is likely
                that of the run before.
        """
        birth = payloads.birth_of(payload)
        if birth.session in ("", self._session):
            return False
        if retained and first:
            self._earlier.add(birth.session)
        if retained and birth.session in self._earlier:
            return False
        return self._found(has_our_id=birth.client_id == self._identity.client_id)

    def lose(self, *, taken_over: bool) -> float | None:
        """Return how long to wait after an open connection has ended; None as after any other end:
        while nothing shows the other client, it is the network that breaks.

        Args:
            taken_over: the broker said that another client came. Once, that may have been this
                device itself, whose earlier connection the broker still had.
        """
        self._hints += taken_over
        if self._hints > 1:
            self._found(has_our_id=True)
        was_here, self._is_here = self._is_here, False
        if not (taken_over or was_here):
            return None
        self.taken_over += 1
        return self._backoff.next_s() if self._has_our_id else None

    def log_in_anew(self) -> None:
        """Note that this device has logged in while it was connected: it has ended its own
        connection where the broker is the same."""
        self._hints = 0

    def last(self, seconds: float) -> None:
        """Note that a connection has lasted for so long."""
        if seconds > _OVER_S and (self._hints or self._has_our_id):
            self._hints = 0
            self._backoff.reset()
            if self._has_our_id:
                self._has_our_id = self._is_here = False
                self.text = ""
                log.info("mqtt: no other client has this device's client id now")

    def _found(self, *, has_our_id: bool) -> bool:
        self._is_here = has_our_id
        if self.text and has_our_id == self._has_our_id:
            return False
        self._has_our_id = has_our_id
        if has_our_id:
            self.text = (
                "another client logs in with this device's client id, "
                f"'{self._identity.client_id}', and each ends the other's connection; {_OWN_ID}"
            )
        else:
            self.text = (
                f"another machine publishes as '{self._identity.device}' too, and who reads gets "
                f"the lanes of both; {_OWN_ID}"
            )
        log.error("mqtt: %s", self.text)
        return True


READER: Final = "mqtt"
# A broker that dies forgets what it has acknowledged and not yet written or passed on.
SETTLED_S: Final = 60.0
_MARK_EVERY_S: Final = 0.5


@dataclass(eq=False)
class Feed:
    """What this device publishes, whichever broker takes it.

    Attributes:
        events: of this device; None publishes none.
        online: the device serves, and every model and camera that exists has a state.
        published: number of lane messages written to a broker's connection.
        lost: number of lane messages that a link took and did not write.
        losses: number of open connections that ended without being left.
        session: of this process, in envelopes and births.
        vehicle: gets what the vehicle publishes of itself; None takes nothing.
        contest: with others that publish as this device.
        latency: (camera,) → the age of lanes when they are written to the connection.
    """

    identity: Identity
    topics: Topics
    keepalive_s: int = KEEPALIVE_S
    now_ns: Callable[[], int] = time.monotonic_ns
    outbox: Outbox[tuple[int, LaneFrame]] = field(default_factory=Outbox)
    events: EventFeed | None = None
    vehicle: VehicleInputs | None = None
    online: bool = False
    published: int = 0
    lost: int = 0
    losses: int = 0
    latency: Histograms = field(default_factory=lambda: Histograms(FRAME_BOUNDS_S))
    session: str = field(default_factory=new_session)
    _events_of: defaultdict[str, Iterator[int]] = field(default_factory=lambda: defaultdict(count))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.contest = Contest(self.identity, self.session)

    def envelope(self, counter: int) -> Envelope:
        """Return the envelope of a message that is published now."""
        return Envelope(self.session, counter, self.now_ns() // 1_000_000)

    def next_event(self, topic: str) -> int:
        """Count the events of a topic, repeated ones too."""
        return next(self._events_of[topic])

    def count(self, *, published: int = 0, lost: int = 0, losses: int = 0) -> None:
        """Two links count at the same time while one takes over from the other."""
        with self._lock:
            self.published += published
            self.lost += lost
            self.losses += losses


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
        # The greatest id that a broker can have acknowledged.
        self._newest_known = log.earlier
        self._acknowledged: deque[tuple[float, int]] = deque()
        self._marked = 0
        self._mark_at = 0.0

    @property
    def waiting(self) -> bool:
        """Whether there is an event that the connection has not been given."""
        return self._log.newest > self._position

    def begin(self, mark: Mark | None = None) -> None:
        """Start over for a new connection.

        Args:
            mark: that the broker has; None without one. One of another log, or beyond all that the
                broker can have acknowledged, says nothing of the events of this one; their ids go
                on above it, for readers that know ids alone.
        """
        self._settle()
        self._acknowledged.clear()
        self._position, self._marked = self._log.acknowledged(READER), 0
        if mark is None:
            return
        if mark.log == self._log.id and mark.id <= self._newest_known:
            self._position = self._marked = mark.id
        else:
            self._log.continue_above(mark.id)

    def take(self) -> Event | None:
        """Return the next event, or None."""
        self._settle()
        event = self._log.next_after(self._position)
        if event is not None:
            self._position = event.id
        return event

    def acknowledge(self, id_: int) -> None:
        """The broker has acknowledged the event; it does so in the order of publishing."""
        self._newest_known = max(self._newest_known, id_)
        self._acknowledged.append((self._now_s() + SETTLED_S, id_))

    def take_mark(self) -> bytes | None:
        """Return the payload of the mark that the broker shall have from now on, or None: at most
        one in `_MARK_EVERY_S`, as each costs a message."""
        if not self._acknowledged or self._now_s() < self._mark_at:
            return None
        newest = self._acknowledged[-1][1]
        if newest == self._marked:
            return None
        self._marked = newest
        self._mark_at = self._now_s() + _MARK_EVERY_S
        return payloads.acknowledged(self._log.id, newest)

    def _settle(self) -> None:
        while self._acknowledged and self._acknowledged[0][0] <= self._now_s():
            self._log.acknowledge(READER, self._acknowledged.popleft()[1])
