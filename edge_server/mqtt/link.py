"""Link: the connection to one broker, made again whenever it is lost, and what goes over it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final

from edge_server.errors import InvalidRequest
from edge_server.lanes.e2e import Envelope, new_session
from edge_server.lanes.types import LONGEST_AGE_S
from edge_server.mqtt import payloads
from edge_server.mqtt.broker import address_of, reason_of
from edge_server.mqtt.connection import KEEPALIVE_S, Connection
from edge_server.mqtt.outbox import Outbox, Wake
from edge_server.mqtt.payloads import Birth, Mark
from edge_server.pipeline import messages
from edge_server.pipeline.perception import NetworkFrame
from edge_server.process.histogram import FRAME_BOUNDS_S, Histograms
from edge_server.process.text import shown
from edge_server.process.threads import Backoff, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge_server.board.board import Identity
    from edge_server.lanes.types import LaneFrame
    from edge_server.mqtt.payloads import Topics
    from edge_server.pipeline.event_log import Event, EventLog
    from edge_server.pipeline.vehicle import VehicleInputs
    from edge_server.settings import Mqtt

log = logging.getLogger(__name__)

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

    Attributes:
        busy: there may be an event, or a mark, for the connection now or soon.
    """

    def __init__(self, log: EventLog, now_s: Callable[[], float] = time.monotonic) -> None:
        self.busy = True
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

    def look(self) -> None:
        """Note that there may be an event to take; on any thread."""
        self.busy = True

    def begin(self, mark: Mark | None = None) -> None:
        """Start over for a new connection.

        Args:
            mark: that the broker has; None without one. One of another log, or beyond all that the
                broker can have acknowledged, says nothing of the events of this one; their ids go
                on above it, for readers that know ids alone.
        """
        self._settle()
        self.busy = True
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
        self.busy = bool(self._acknowledged)  # before: an event may come in between
        event = self._log.next_after(self._position)
        if event is not None:
            self.busy, self._position = True, event.id
        return event

    def acknowledge(self, id_: int) -> None:
        """The broker has acknowledged the event; it does so in the order of publishing."""
        self.busy = True
        self._newest_known = max(self._newest_known, id_)
        self._acknowledged.append((self._now_s() + SETTLED_S, id_))

    def take_mark(self) -> bytes | None:
        """Return the payload of the mark that the broker is to have from now on, or None: at most
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


@dataclass(eq=False)
class Feed:
    """What this device publishes, to whichever broker, and what became of it.

    Attributes:
        events: of this device; None publishes none.
        vehicle: gets what the vehicle publishes of itself; None takes nothing.
        online: the device serves, and every model and camera that exists has a state.
        published: number of lane messages written to a broker's connection.
        lost: number of lane messages that a link took and did not write.
        losses: number of open connections that ended without being left.
        taken_over: number of connections that another client with this client id has ended.
        contest: which other client publishes as this device, and the remedy; empty while none is
            known.
        latency: (camera,) → the age of lanes when they are written to the connection.
        session: of this process, in envelopes and births.
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
    taken_over: int = 0
    contest: str = ""
    latency: Histograms = field(default_factory=lambda: Histograms(FRAME_BOUNDS_S))
    session: str = field(default_factory=new_session)
    # Of events on each topic, repeated ones too.
    counters: defaultdict[str, Iterator[int]] = field(default_factory=lambda: defaultdict(count))


# paho does not bound QoS 0 messages: 138 MB in 10 s were measured against a frozen broker.
WINDOW: Final = 4
FAREWELL_S: Final = 0.8

_STEP_S: Final = 1.0
# Live data is worth no longer pause than this.
_RETRY_S: Final = (0.5, 5.0)
# What refuses a device now will mostly do so until somebody changes it.
_REFUSED_S: Final = (5.0, 60.0)
# Two clients with one id end each other's connection: longer pauses let one of them work.
_CONTEST_S: Final = (5.0, 300.0)
# A connection that lasts for longer than any pause shows that the other client is gone.
_UNCONTESTED_S: Final = 2 * _CONTEST_S[1]
# A vehicle's bus repeats its mistake some ten times a second, with another number each time.
_LEFT_OUT_EVERY_S: Final = 60.0
# After a flood.
_DEAF_S: Final = 60.0
# No device has so many models and cameras; a broker may retain any number.
_MAX_RETAINED: Final = 1024
_LONGEST_ID: Final = 100  # characters of another client's id that the log shows
_OWN_ID: Final = "give every device an id of its own: device.id (--device-id)"


class Link:
    """Publishes a feed to one broker, and connects again after every loss, until `leave`.

    One worker does all work with the broker. An unexpected disconnect publishes `offline`.

    Attributes:
        connected: the connection is open, as far as this device knows.
        trouble: why it is not connected, for people; empty while it is, and before the first try.
    """

    def __init__(self, mqtt: Mqtt, feed: Feed, contents: tuple[object, ...] | None = None) -> None:
        self.worker = Worker("mqtt", self._tick, on_end=self._end)
        self.connected = False
        self.trouble = ""
        self.address = address_of(mqtt)
        self.mqtt = mqtt
        self._contents = contents_of(mqtt) if contents is None else contents
        self._feed = feed
        self._wake = Wake()
        self.ring = self._wake.ring  # has the worker look into the outbox
        self._connection: Connection | None = None
        self._events: EventFeed | None = None  # once it is known which ones the broker has
        self._mark = b""  # that the broker retains
        self._listens = False
        self._deaf_until = 0.0
        self._retained: set[str] = set()  # topics of states that the broker had at the connection
        self._ready_since = 0.0
        self._retry_at = 0.0
        self._backoff = Backoff(*_RETRY_S)
        self._refusals = Backoff(*_REFUSED_S)
        self._contest = Backoff(*_CONTEST_S)
        self._taken_over = 0  # since a connection lasted
        self._has_rival = False  # a client with our id was here before this connection
        self._connections = 0
        self._earlier = ""  # the session whose birth this broker had before ours
        self._leave_by: float | None = None
        self._farewell: bytes | None = None
        self._drains = True
        self._ended = threading.Event()
        self._logged: set[str] = set()  # since the last connection
        self._left_out_at = -math.inf  # when the log last reported it

    def is_of(self, mqtt: Mqtt, contents: tuple[object, ...]) -> bool:
        """Whether this link is what `mqtt` and these `contents_of` its files make."""
        return self.mqtt == mqtt and self._contents == contents

    def leave(self, farewell: bytes | None = None) -> None:
        """End the link and wait for it, for `FAREWELL_S` and a little more if it is connected.

        Args:
            farewell: the last state of the device on this broker; what waits in the outbox stays
                there for another link. Without it all that waits is published first.
        """
        self._farewell = farewell
        self._drains = farewell is None
        self._leave_by = time.monotonic() + FAREWELL_S
        self._wake.ring()
        if self.worker.alive:
            self._ended.wait(FAREWELL_S + 0.1)
            self.worker.stop(timeout_s=0.1)  # a worker deep in a connect ends by itself
        else:
            self._wake.close()

    def abandon(self) -> None:
        """End the link as soon as its thread, which hangs or is dead, can; wait for nothing."""
        self._drains = False
        self._leave_by = -math.inf
        self.ring()

    # The methods below run on the worker.

    def _tick(self, now: float) -> bool:
        leaving = self._leave_by is not None
        connection = self._connection
        if connection is None:
            if leaving:
                return False
            if now < self._retry_at:
                self._wake.wait(min(self._retry_at - now, _STEP_S))
            else:
                self._connect()
            return True
        try:
            connection.step(self._wake, _STEP_S)
            if connection.ready:
                if not self._drains:
                    self._say_farewell(connection)
                else:
                    if not self.connected:
                        self._greet()
                    self._drain(connection)
                if leaving and connection.in_flight + self._waiting == 0:
                    return False
        except Exception as error:  # noqa: BLE001
            connection.fail(error)
        if connection.end is not None:
            self._lose(connection, connection.end)
        elif (self._taken_over or self._has_rival) and now - self._ready_since > _UNCONTESTED_S:
            self._taken_over, self._has_rival, self._feed.contest = 0, False, ""
            self._contest.reset()
            log.info("mqtt: no other client has this device's client id now")
        return self._leave_by is None or time.monotonic() < self._leave_by

    @property
    def _waiting(self) -> int:
        """Number of messages that this link has yet to publish before it may leave."""
        if not self._drains:
            return int(self._farewell is not None)
        events = self._feed.events
        return self._feed.outbox.waiting + (events is not None and events.waiting)

    def _connect(self) -> None:
        feed, status = self._feed, self._feed.topics.status
        connection = Connection(
            self.mqtt,
            feed.identity.client_id,
            will=(status, payloads.status(feed.identity, "offline")),
            keepalive_s=feed.keepalive_s,
            on_live_sent=self._count_published,
            on_message=self._hear,
        )
        try:
            # The system's resolver asks one name server after another, for minutes, and cannot be
            # interrupted.
            with self.worker.allowing(math.inf):
                self._contents = contents_of(self.mqtt)
                connection.open()
        except Exception as error:  # noqa: BLE001
            self.trouble = reason_of(error)
            text = f"cannot reach {self.address}: {self.trouble}; trying again"
            self._log_once(logging.WARNING, text)
            self._retry_at = time.monotonic() + self._backoff.next_s()
        else:
            self._connection = connection

    def _greet(self) -> None:
        """Begin to publish: every state again, and what follows the broker's mark."""
        feed = self._feed
        self._ready_since = time.monotonic()
        self._connections += 1
        self.trouble = ""
        self._listens = False
        self._events, self._mark, self._has_rival = None, b"", False
        self._retained.clear()
        self.connected = True
        feed.outbox.connected()
        self._logged.clear()
        if not feed.contest:
            self._log_once(logging.INFO, f"connected to {self.address}")

    def _listen(self, connection: Connection) -> None:
        """Subscribe to what this device reads."""
        topics = self._feed.topics
        self._listens = True
        vehicle = [topics.vehicle] if self.mqtt.vehicle_state else []
        # A broker answers in order: what it retains of the first comes before the second's answer.
        connection.subscribe([topics.acknowledged])
        connection.subscribe([topics.meta, *topics.states(), *vehicle])

    def _hear(self, topic: str, payload: bytes, retained: bool) -> None:
        """Note what a topic of this device holds, or gets from others."""
        topics = self._feed.topics
        if topic == topics.vehicle:
            if not retained:  # the moment of a retained one is unknown
                self._take_vehicle_state(payload)
        elif topic == topics.acknowledged:
            self._mark = payload
        elif topic == topics.meta:
            self._see_birth(payloads.decoded(payload, Birth) or Birth(), retained)
        # A broker may send any topic, one that cannot be published too.
        elif (
            retained and payload and topics.is_state(topic) and len(self._retained) < _MAX_RETAINED
        ):
            self._retained.add(topic)

    def _see_birth(self, birth: Birth, retained: bool) -> None:
        """Name another client that publishes as this device, and let it know of this one."""
        feed, identity = self._feed, self._feed.identity
        if birth.session in {"", feed.session}:
            return
        if retained and self._connections == 1:
            self._earlier = birth.session
        if retained and birth.session == self._earlier:  # likely that of the run before
            return
        if birth.client_id == identity.client_id:
            self._has_rival = True
            self._name_rival()
        elif not feed.contest:
            self._contend(
                f"another machine publishes as '{identity.device}' too, logged in as "
                f"'{shown(birth.client_id[:_LONGEST_ID])}', and readers get the lanes of both; "
                f"{_OWN_ID}"
            )

    def _name_rival(self) -> None:
        self._contend(
            f"another client logs in with this device's client id, "
            f"'{self._feed.identity.client_id}', and each ends the other's connection; {_OWN_ID}"
        )

    def _contend(self, text: str) -> None:
        if self._feed.contest != text:
            self._feed.contest = text
            self._feed.outbox.repeat_state(self._feed.topics.meta)
            log.error("mqtt: %s", text)

    def _take_vehicle_state(self, data: bytes) -> None:
        feed = self._feed
        if feed.vehicle is None:
            return
        try:
            state = payloads.read_vehicle_state(data, feed.now_ns(), self.mqtt.payload)
        except InvalidRequest as error:
            now = time.monotonic()
            if now - self._left_out_at > _LEFT_OUT_EVERY_S:
                self._left_out_at = now
                log.warning("mqtt: %s: left out: %s", feed.topics.vehicle, error)
        else:
            feed.vehicle.put(state)

    def _drain(self, connection: Connection) -> None:
        """Write what the broker takes now: states first, then events, then the newest lanes.

        One place of the window is for lanes alone, so that they do not grow old behind the events
        of an outage.
        """
        feed = self._feed
        if not self._listens and time.monotonic() > self._deaf_until:
            self._listen(connection)
        if self._retained and feed.online:
            for topic in self._retained:  # an earlier run left it
                if not feed.outbox.knows(topic):
                    feed.outbox.put_state(topic, b"")
            self._retained.clear()
        if self._events is None and feed.events is not None and connection.answered:
            feed.events.begin(payloads.decoded(self._mark, Mark))
            self._events = feed.events
        events = self._events
        window = min(WINDOW, connection.receive_maximum)
        while self._drains and connection.end is None and connection.in_flight < window:
            if (state := feed.outbox.take_state()) is not None:
                connection.publish_state(*state)
                continue
            if events is not None and events.busy:
                if (mark := events.take_mark()) is not None:
                    connection.publish_state(feed.topics.acknowledged, mark)
                    continue
                room = connection.in_flight - connection.live_in_flight < max(1, window - 1)
                if room and (event := events.take()) is not None:
                    self._publish_event(connection, events, event)
                    continue
            if (live := feed.outbox.take_live()) is None:
                return
            topic, (seq, frame) = live
            self._write_live(connection, topic, seq, frame)

    def _write_live(self, connection: Connection, topic: str, seq: int, frame: LaneFrame) -> None:
        feed = self._feed
        now_ns = feed.now_ns()
        age_s = frame.age_ns(now_ns) / 1e9
        # That there are no lanes is true at any age of the last frame.
        if not frame.failure and age_s > LONGEST_AGE_S:
            feed.lost += 1
            return
        payload = messages.frame_payload(frame, feed.identity, seq, now_ns, self.mqtt.payload)
        envelope = Envelope(feed.session, seq, feed.now_ns() // 1_000_000)
        of_network = isinstance(frame, NetworkFrame)
        message = "NetworkFrame" if of_network else "LaneFrame"
        if not connection.publish_live(topic, payload, envelope, message):
            feed.lost += 1
            return
        if not (frame.failure or of_network):
            feed.latency.observe({(frame.camera,): age_s})
        if frame.trace is not None:
            frame.trace.published()

    def _count_published(self) -> None:
        self._feed.published += 1

    def _publish_event(self, connection: Connection, events: EventFeed, event: Event) -> None:
        feed = self._feed
        try:
            topic = feed.topics.event(event.kind, event.camera)
            payload = payloads.event(event, feed.identity, self.mqtt.payload)
        except (ValueError, OverflowError, OSError) as error:
            # The next ones would wait for it forever.
            self._log_once(logging.ERROR, f"not published: {error}")
            events.acknowledge(event.id)
            return
        number = next(feed.counters[topic])
        connection.publish_event(
            topic,
            payload,
            Envelope(feed.session, number, feed.now_ns() // 1_000_000),
            # What begins and what ends it have the same correlation data.
            str(event.begin_id or event.id).encode(),
            lambda: events.acknowledge(event.id),
        )

    def _say_farewell(self, connection: Connection) -> None:
        """Publish the last state once the broker takes one message more."""
        if self._farewell is not None and connection.in_flight < min(
            WINDOW, connection.receive_maximum
        ):
            connection.publish_state(self._feed.topics.status, self._farewell)
            self._farewell = None

    def _lose(self, connection: Connection, reason: str) -> None:
        """Discard the ended connection and schedule the next attempt."""
        feed, was_connected = self._feed, self.connected
        self._close(connection)
        now = time.monotonic()
        if connection.taken_over:
            reason += f", by a client that logs in as '{feed.identity.client_id}' too"
        self.trouble = reason
        feed.losses += was_connected
        is_rival = connection.taken_over or self._has_rival
        if is_rival and was_connected and self._leave_by is None:
            feed.taken_over += 1
            self._taken_over += 1
            # Once, that may have been this device itself, whose earlier connection the broker had.
            if self._has_rival or self._taken_over > 1:
                self._name_rival()
                self.trouble = feed.contest
                self._retry_at = now + self._contest.next_s()
                return
        if connection.flooded:
            # With a new connection, what waits in the broker is gone.
            self._deaf_until = now + _DEAF_S
            reason += f"; nothing is read for {_DEAF_S:g} s"
        if connection.acknowledged:
            self._backoff.reset()
            self._refusals.reset()
        if connection.refused:
            self._retry_at = now + self._refusals.next_s()
            self._log_once(logging.ERROR, f"{self.address} refuses us: {reason}")
            return
        self._retry_at = now + self._backoff.next_s()
        event = "lost" if was_connected else "cannot reach"
        self._log_once(logging.WARNING, f"{event} {self.address}: {reason}")

    def _close(self, connection: Connection) -> None:
        connection.close()
        self.connected = False
        self._connection = None
        self._feed.lost += connection.live_in_flight

    def _end(self) -> None:
        if self._connection is not None:
            self._close(self._connection)
        self._wake.close()
        self._ended.set()

    def _log_once(self, level: int, text: str) -> None:
        """Log a text once until the next connection, however often it recurs, and in turn with
        whichever others; nothing of a link that leaves."""
        if text not in self._logged and self._leave_by is None:
            self._logged.add(text)
            log.log(level, "mqtt: %s", text)


def contents_of(mqtt: Mqtt) -> tuple[object, ...]:
    """Return what tells the present contents of the files of `mqtt` from others."""
    return tuple(
        _stamp(path)
        for path in (mqtt.password_file, mqtt.ca_file, mqtt.cert_file, mqtt.key_file)
        if path
    )


def _stamp(path: str) -> object:
    try:
        found = Path(path).stat()
    except OSError as error:
        return error.errno
    return found.st_ino, found.st_size, found.st_mtime_ns
