"""Link: the connection to one broker, made again whenever it is lost."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Final

from edge_server.errors import InvalidRequest
from edge_server.mqtt import payloads
from edge_server.mqtt.broker import address_of, reason_of
from edge_server.mqtt.connection import Connection
from edge_server.mqtt.outbox import Wake
from edge_server.process.worker import Backoff, Worker
from edge_server.settings.text_file import read_text_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.lanes.types import LaneFrame
    from edge_server.mqtt.feed import EventFeed, Feed
    from edge_server.pipeline.event_log import Event
    from edge_server.settings import Mqtt

log = logging.getLogger(__name__)

# paho does not bound QoS 0 messages: 138 MB in 10 s were measured against a frozen broker.
WINDOW: Final = 4
FAREWELL_S: Final = 0.8

_STEP_S: Final = 0.5
# A broker that is unreachable for this long is logged, once; the link keeps trying.
_SLOW_S: Final = 10.0
# Live data is worth no longer pause than this.
_RETRY_S: Final = (0.5, 5.0)
# What refuses a device now will mostly do so until somebody changes it.
_REFUSED_S: Final = (5.0, 60.0)
# A vehicle's bus repeats its mistake some ten times a second, with another number each time.
_LEFT_OUT_EVERY_S: Final = 60.0


class Link:
    """Publishes a feed to one broker, and connects again after every loss, until `leave`.

    One worker does all work with the broker. An unexpected disconnect publishes `offline`.

    Attributes:
        connected: the connection is open, as far as this device knows.
        trouble: why it is not connected, for people; empty while it is, and before the first try.

    Args:
        mqtt: the broker and the credentials for it.
        feed: is published.
        may_publish: called on the worker each time the broker has accepted the connection, before
            anything is published; False leaves the connection unused.
        meanwhile: the broker that has the lanes while this one cannot be reached, for the log.
        contents: see `contents_of`; read now where they are not given.
    """

    def __init__(
        self,
        mqtt: Mqtt,
        feed: Feed,
        may_publish: Callable[[Link], bool],
        meanwhile: str = "",
        contents: tuple[str, ...] | None = None,
    ) -> None:
        self.worker = Worker("mqtt", self._tick, on_end=self._end)
        self.connected = False
        self.trouble = ""
        self.address = address_of(mqtt)
        self.mqtt = mqtt
        self._contents = contents_of(mqtt) if contents is None else contents
        self._feed = feed
        self._may_publish = may_publish
        self._meanwhile = f"; lanes go to {meanwhile} until then" if meanwhile else ""
        self._wake = Wake()
        self._connection: Connection | None = None
        self._events: EventFeed | None = None  # once it is known which ones the broker has
        self._born = False  # this broker was sent the birth
        self._is_first = True  # the broker was subscribed to before that
        self._ready_since = 0.0
        self._retry_at = 0.0
        self._backoff = Backoff(*_RETRY_S)
        self._refusals = Backoff(*_REFUSED_S)
        self._leave_by: float | None = None
        self._farewell: bytes | None = None
        self._drains = True
        self._ended = threading.Event()
        self._logged: set[str] = set()  # since the last connection
        self._left_out_at = -math.inf  # when the log last said so

    def is_of(self, mqtt: Mqtt, contents: tuple[str, ...]) -> bool:
        """Whether this link is what `mqtt` and these `contents_of` its files make."""
        return self.mqtt == mqtt and self._contents == contents

    def ring(self) -> None:
        """Have the worker look into the outbox."""
        self._wake.ring()

    def leave(self, farewell: bytes | None = None) -> None:
        """End the link, within `FAREWELL_S` if it is connected; returns at once.

        Args:
            farewell: the last state of the device on this broker; what waits in the outbox stays
                there for another link. Without it all that waits is published first.
        """
        self._farewell = farewell
        self._drains = farewell is None
        self._leave_by = time.monotonic() + FAREWELL_S
        if not self.worker.alive:
            self._wake.close()
        self._wake.ring()

    def abandon(self) -> None:
        """End a link that has never published; returns at once."""
        self._leave_by = time.monotonic()
        self.worker.ask_to_stop()
        self._wake.ring()

    def wait_until_left(self) -> None:
        """Wait for the end of a link that leaves, for `FAREWELL_S` and a little more."""
        self._ended.wait(FAREWELL_S + 0.1)

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
        with connection.ended_by_errors():
            connection.step(self._wake, _STEP_S)
            if connection.ready:
                if not self._drains:
                    self._say_farewell(connection)
                elif self.connected or self._greet(connection):
                    self._look_for_others(connection)
                    self._drain(connection)
                if leaving and connection.in_flight + self._waiting == 0:
                    return False
        if connection.end is not None:
            self._lose(connection, connection.end)
        elif self.connected:
            self._feed.contest.last(now - self._ready_since)
        return self._leave_by is None or time.monotonic() < self._leave_by

    @property
    def _waiting(self) -> int:
        """Number of messages that this link has yet to publish before it may leave."""
        if not self._drains:
            return int(self._farewell is not None)
        events = self._feed.events
        return self._feed.outbox.waiting + (events is not None and events.waiting)

    def _connect(self) -> None:
        status = self._feed.topics.status
        connection = Connection(
            self.mqtt,
            self._feed.identity.client_id,
            will=(status, payloads.status(self._feed.identity, "offline")),
            keepalive_s=self._feed.keepalive_s,
            on_live_sent=lambda: self._feed.count(published=1),
        )
        slow = f"{self.address} does not answer, or no name server does; waiting{self._meanwhile}"
        timer = threading.Timer(_SLOW_S, self._log_once, (logging.WARNING, slow))
        timer.daemon = True
        try:
            timer.start()
            # The system's resolver asks one name server after another, for minutes, and cannot be
            # interrupted.
            with self.worker.allowing(math.inf):
                self._contents = contents_of(self.mqtt)
                connection.open()
        except Exception as error:  # noqa: BLE001
            self.trouble = reason_of(error)
            text = f"cannot reach {self.address}: {self.trouble}; trying again{self._meanwhile}"
            self._log_once(logging.WARNING, text)
            self._retry_at = time.monotonic() + self._backoff.next_s()
        else:
            self._connection = connection
        finally:
            timer.cancel()

    def _greet(self, connection: Connection) -> bool:
        """Begin to publish; return whether this link may."""
        if not self._may_publish(self):
            return False
        self._ready_since = time.monotonic()
        self.trouble = self._meanwhile = ""
        self._feed.outbox.connected()
        self._events = None
        self.connected = True
        topics = self._feed.topics
        # Now, as what the broker retains may arrive after the birth is published.
        self._is_first = not self._born
        connection.watch(topics)
        if self.mqtt.vehicle_state:
            connection.listen(topics.vehicle, self._take_vehicle_state)
        self._logged.clear()
        if not self._feed.contest.text:
            self._log_once(logging.INFO, f"connected to {self.address}")
        return True

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
        if feed.online:
            self._clear_leftovers(connection)
        if self._events is None and feed.events is not None and connection.watched:
            feed.events.begin(payloads.mark_of(connection.mark))
            self._events = feed.events
        events = self._events
        window = min(WINDOW, connection.receive_maximum)
        while self._drains and connection.end is None and connection.in_flight < window:
            if (state := feed.outbox.take_state()) is not None:
                self._publish_state(connection, *state)
                continue
            if events is not None and (mark := events.take_mark()) is not None:
                connection.publish_state(feed.topics.acknowledged, mark)
                continue
            room = connection.in_flight - connection.live_in_flight < max(1, window - 1)
            if room and events is not None and (event := events.take()) is not None:
                self._publish_event(connection, events, event)
                continue
            if (live := feed.outbox.take_live()) is None:
                return
            topic, (seq, frame) = live
            self._write_live(connection, topic, seq, frame)

    def _look_for_others(self, connection: Connection) -> None:
        """Look at the births of others, and let a new one know of this device."""
        while connection.births:
            payload, retained = connection.births.popleft()
            if self._feed.contest.see(payload, retained=retained, first=self._is_first):
                self._feed.outbox.repeat_state(self._feed.topics.meta)

    def _publish_state(self, connection: Connection, topic: str, payload: bytes) -> None:
        connection.publish_state(topic, payload)
        if topic == self._feed.topics.meta:
            self._born = True

    def _write_live(self, connection: Connection, topic: str, seq: int, frame: LaneFrame) -> None:
        feed = self._feed
        now_ns = feed.now_ns()
        # That there are no lanes is true at any age of the last frame.
        if not frame.failure and frame.is_expired(now_ns):
            feed.count(lost=1)
            return
        payload = payloads.lane_frame(frame, feed.identity, seq, now_ns, self.mqtt.payload)
        if not connection.publish_live(topic, payload, feed.envelope(seq)):
            feed.count(lost=1)
            return
        if not frame.failure:
            feed.latency.observe((frame.camera,), frame.age_ns(now_ns) / 1e9)
        if frame.trace is not None:
            frame.trace.published()

    def _publish_event(self, connection: Connection, feed: EventFeed, event: Event) -> None:
        try:
            topic = self._feed.topics.event(event.kind, event.camera)
        except ValueError as error:
            # The next ones would wait for it forever.
            self._log_once(logging.ERROR, f"not published: {error}")
            feed.acknowledge(event.id)
            return
        payload = payloads.event(event, self._feed.identity, self.mqtt.payload)
        envelope = self._feed.envelope(self._feed.next_event(topic))
        # What begins and what ends it have the same correlation data.
        correlation = str(event.begin_id or event.id).encode()
        connection.publish_event(
            topic, payload, envelope, correlation, lambda: feed.acknowledge(event.id)
        )

    def _say_farewell(self, connection: Connection) -> None:
        """Publish the last state once the broker takes one message more."""
        if self._farewell is not None and connection.in_flight < min(
            WINDOW, connection.receive_maximum
        ):
            connection.publish_state(self._feed.topics.status, self._farewell)
            self._farewell = None

    def _clear_leftovers(self, connection: Connection) -> None:
        """Clear the topics that an earlier run retained and that have no state now."""
        while connection.retained:
            topic = connection.retained.pop()
            if not self._feed.outbox.knows(topic):
                self._feed.outbox.put_state(topic, b"")

    def _lose(self, connection: Connection, reason: str) -> None:
        """Discard the ended connection and schedule the next attempt."""
        was_connected = self.connected
        self._close(connection)
        now = time.monotonic()
        self.trouble = reason
        self._feed.count(losses=was_connected)
        pause_s = None
        # Whoever leaves may be ended by the login of the link that follows.
        if was_connected and self._leave_by is None:
            pause_s = self._feed.contest.lose(taken_over=connection.taken_over)
        if pause_s is not None:
            self._retry_at, self.trouble = now + pause_s, self._feed.contest.text
            return
        if connection.acknowledged:
            self._backoff.reset()
            self._refusals.reset()
        if connection.refused:
            self._retry_at = now + self._refusals.next_s()
            text = f"{self.address} refuses us: {reason}{self._meanwhile}"
            self._log_once(logging.ERROR, text)
            return
        self._retry_at = now + self._backoff.next_s()
        event = "lost" if was_connected else "cannot reach"
        self._log_once(logging.WARNING, f"{event} {self.address}: {reason}{self._meanwhile}")

    def _close(self, connection: Connection) -> None:
        connection.close()
        self.connected = False
        self._connection = None
        self._feed.count(lost=connection.live_in_flight)

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


def contents_of(mqtt: Mqtt) -> tuple[str, ...]:
    """Return what tells the present contents of the files of `mqtt` from others; no secret."""
    return tuple(
        _digest(path)
        for path in (mqtt.password_file, mqtt.ca_file, mqtt.cert_file, mqtt.key_file)
        if path
    )


def _digest(path: str) -> str:
    try:
        content = read_text_file(path).encode()
    except UnicodeDecodeError as error:
        content = error.object  # comments of a PEM file may have any encoding
    except OSError as error:
        return str(error.strerror)
    return hashlib.sha256(content).hexdigest()
