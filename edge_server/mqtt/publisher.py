"""Publisher: publishes lanes and state of this device to an MQTT broker."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from typing import TYPE_CHECKING, Final

from edge_server.inference.snapshot import ModelState
from edge_server.mqtt import payloads
from edge_server.mqtt.connection import LIVE_EXPIRY_S, Connection
from edge_server.mqtt.opening import Opening
from edge_server.mqtt.outbox import Outbox
from edge_server.mqtt.topics import Topics
from edge_server.mqtt.wake import Wake
from edge_server.process.backoff import Backoff
from edge_server.process.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from edge_server.inference.snapshot import ModelEntry
    from edge_server.lanes.types import LaneFrame
    from edge_server.mqtt.broker_address import BrokerAddress
    from edge_server.mqtt.identity import Identity

log = logging.getLogger(__name__)

# paho does not bound QoS 0 messages: 138 MB in 10 s were measured against a frozen broker.
WINDOW: Final = 4

_STEP_S: Final = 0.5
_FAREWELL_S: Final = 0.8
# A broker that is unreachable for this long is logged, once; the publisher keeps trying.
_SLOW_S: Final = 10.0
# No device has so many models and cameras; a broker may retain any number.
_MOST_LEFTOVERS: Final = 1024
_STABLE_S: Final = 10.0
_RETRY_S: Final = (0.5, 30.0)
_REFUSED_S: Final = (30.0, 60.0)


class Publisher:
    """Publishes lanes, camera and model state of one device; its callers never wait or fail.

    A missing, dead, frozen or slow broker costs dropped lanes, which are counted, and nothing
    else: no caller blocks, and at most `WINDOW` messages and one per topic are held. State is kept
    and published again on every new connection; an unexpected disconnect publishes `offline`.

    One worker does all work with the broker, JSON encoding included; the publish methods only put
    values into the outbox. They are safe from any thread.

    Args:
        address: of the broker.
        identity: of this device.
        now_ns: the clock of a frame's age; `time.monotonic_ns`.

    Raises:
        ValueError: the device's name cannot be part of a topic.
    """

    def __init__(
        self,
        address: BrokerAddress,
        identity: Identity,
        *,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.worker = Worker("mqtt", self._tick, on_end=self._end)
        self._address = address
        self._identity = identity
        self._now_ns = now_ns
        self._topics = Topics(identity.device)
        self._outbox: Outbox[tuple[int, LaneFrame]] = Outbox()
        self._outbox.put_state(self._topics.status, payloads.starting(identity))
        self._outbox.put_state(self._topics.meta, payloads.meta(identity))
        # The topics of published models, and the retained topics of an earlier run.
        self._models: set[str] = set()
        self._leftovers: set[str] = set()
        self._complete = False
        self._misnamed: set[str] = set()
        self._feeds: dict[str, tuple[str, Iterator[int]] | None] = {}
        self._wake = Wake()
        self._opening: Opening | None = None
        self._opening_since = 0.0
        self._connection: Connection | None = None
        self._connected = False
        self._ready_since = 0.0
        self._retry_at = 0.0
        self._backoff = Backoff(*_RETRY_S)
        self._leave_by: float | None = None
        self._ended = threading.Event()
        self._published = 0
        self._lost = 0
        self._said = ""

    @property
    def connected(self) -> bool:
        """Whether the connection is open, as far as the publisher knows."""
        return self._connected

    @property
    def waiting(self) -> int:
        """Number of messages that wait for the broker; never more than the number of topics."""
        return self._outbox.waiting

    @property
    def published(self) -> int:
        """Number of lane messages written to a broker's connection."""
        return self._published

    @property
    def dropped(self) -> int:
        """Number of lane messages offered and never written: replaced, too old, or cut off."""
        return self._outbox.dropped + self._lost

    def start(self) -> None:
        """Start connecting to the broker; returns at once. `status` is `starting`."""
        self.worker.start()

    def stop(self) -> None:
        """Publish `offline` if a broker is connected, and stop; takes 1 s at most."""
        if not self.worker.alive:
            self._wake.close()
            return
        self._outbox.put_state(self._topics.status, payloads.offline(self._identity))
        self._leave_by = time.monotonic() + _FAREWELL_S
        self._wake.ring()
        self._ended.wait(_FAREWELL_S + 0.1)
        self.worker.stop(timeout_s=0.1)  # a worker deep in a connect ends with the process

    def publish_online(self, no_lanes: Collection[str] = ()) -> None:
        """Publish that the device serves, until `stop`.

        Retained topics of an earlier run's models and cameras that no longer exist are cleared.

        Args:
            no_lanes: the cameras without lanes at present.
        """
        self._put_state(self._topics.status, payloads.online(self._identity, no_lanes))
        self._complete = True

    def publish_lanes(self, frame: LaneFrame) -> None:
        """Offer a frame's lanes; the newest frame of each camera wins. Never raises."""
        try:
            feed = self._feeds[frame.camera]
        except KeyError:
            feed = self._feeds[frame.camera] = self._feed(frame.camera)
        if feed is None:
            return
        topic, counter = feed
        if self._outbox.put_live(topic, (next(counter), frame)):
            self._wake.ring()

    def publish_camera_status(
        self,
        name: str,
        state: payloads.CameraState,
        last_frame_age_ms: int | None,
        failure: str = "",
    ) -> None:
        """Publish the state of a camera and its lanes; see `payloads.camera_status`."""
        topic = self._topic(self._topics.camera_status, name)
        self._put_state(topic, payloads.camera_status(state, last_frame_age_ms, failure))

    def publish_model_state(self, name: str, state: str, reason: str = "") -> None:
        """Publish whether a model serves, and the reason if it does not."""
        topic = self._topic(self._topics.model_state, name)
        self._put_state(topic, payloads.model_state(name, state, reason))

    def publish_models(self, entries: Iterable[ModelEntry]) -> None:
        """Publish for each model its newest version that is READY, or else its newest one.

        The topics of models that are missing in `entries` are cleared.
        """
        told = {
            e.name: e
            for e in sorted(entries, key=lambda e: (e.state is ModelState.READY, e.version))
        }
        for name, entry in told.items():
            self.publish_model_state(name, entry.state.value, entry.reason)
        for name in self._models - told.keys():
            self._put_state(self._topic(self._topics.model_state, name), b"")
        self._models = set(told)

    def _put_state(self, topic: str | None, payload: bytes) -> None:
        if topic is not None and self._outbox.put_state(topic, payload):
            self._wake.ring()

    def _feed(self, camera: str) -> tuple[str, Iterator[int]] | None:
        topic = self._topic(self._topics.lanes, camera)
        return None if topic is None else (topic, itertools.count())

    def _topic(self, topic_of: Callable[[str], str], name: str) -> str | None:
        try:
            return topic_of(name)
        except ValueError as error:
            if name not in self._misnamed:
                self._misnamed.add(name)
                log.error("mqtt: not published: %s", error)  # noqa: TRY400
            return None

    # The methods below run on the worker.

    def _tick(self, now: float) -> bool:
        leaving = self._leave_by is not None
        if self._connection is None:
            if leaving:
                return False
            if self._opening is not None:
                self._await(self._opening, now)
            elif now < self._retry_at:
                self._wake.wait(min(self._retry_at - now, _STEP_S))
            else:
                self._open(now)
            return True
        connection = self._connection
        connection.step(self._wake, _STEP_S)
        if connection.ready:
            if not self._connected:
                self._greet()
            self._drain(connection)
            if leaving and self._outbox.waiting + connection.in_flight == 0:
                return False
        if connection.end is not None:
            self._lose(connection)
        return self._leave_by is None or time.monotonic() < self._leave_by

    def _open(self, now: float) -> None:
        connection = Connection(
            self._address,
            self._identity.client_id,
            will=(self._topics.status, payloads.offline(self._identity)),
            on_live_sent=self._count,
            on_retained=self._find_leftover,
        )
        self._opening, self._opening_since = Opening(connection, self._wake), now

    def _await(self, opening: Opening, now: float) -> None:
        if not opening.over:
            if now - self._opening_since > _SLOW_S:
                text = f"{self._address} does not answer, or no name server does; waiting"
                self._say(logging.WARNING, text)
            self._wake.wait(_STEP_S)
            return
        self._opening = None
        if opening.error is None:
            self._connection = opening.connection
            return
        why = getattr(opening.error, "strerror", None) or opening.error
        self._say(logging.WARNING, f"cannot reach {self._address}: {why}; trying again")
        self._retry_at = time.monotonic() + self._backoff.next_s()

    def _greet(self) -> None:
        self._connected = True
        self._ready_since = time.monotonic()
        self._outbox.connected()
        self._leftovers.clear()
        if self._connection is not None:
            self._connection.watch(*self._topics.states())
        self._say(logging.INFO, f"connected to {self._address}")

    def _find_leftover(self, topic: str) -> None:
        if len(self._leftovers) < _MOST_LEFTOVERS:
            self._leftovers.add(topic)

    def _take_leftovers_away(self) -> None:
        while self._leftovers:
            topic = self._leftovers.pop()
            if not self._outbox.knows(topic):
                self._outbox.put_state(topic, b"")

    def _drain(self, connection: Connection) -> None:
        if self._complete:
            self._take_leftovers_away()
        window = min(WINDOW, connection.receive_maximum)
        while connection.end is None and connection.in_flight < window:
            state = self._outbox.take_state()
            if state is not None:
                connection.publish_state(*state)
                continue
            live = self._outbox.take_live()
            if live is None:
                return
            topic, (seq, frame) = live
            now_ns = self._now_ns()
            if frame.age_ns(now_ns) > LIVE_EXPIRY_S * 1_000_000_000:
                self._lost += 1
                continue
            payload = payloads.lane_frame(frame, self._identity, seq, now_ns)
            if not connection.publish_live(topic, payload):
                self._lost += 1

    def _lose(self, connection: Connection) -> None:
        """Discard the ended connection and schedule the next attempt."""
        was_connected = self._connected
        self._drop_connection(connection)
        now = time.monotonic()
        if connection.refused:
            self._retry_at = now + random.uniform(*_REFUSED_S)  # noqa: S311
            self._say(logging.ERROR, f"{self._address} refuses us: {connection.end}")
            return
        if was_connected and now - self._ready_since > _STABLE_S:
            self._backoff.reset()
        self._retry_at = now + self._backoff.next_s()
        what = "lost" if was_connected else "cannot reach"
        self._say(logging.WARNING, f"{what} {self._address}: {connection.end}")

    def _drop_connection(self, connection: Connection) -> None:
        connection.close()
        self._connected = False
        self._connection = None
        self._lost += connection.live_in_flight

    def _end(self) -> None:
        if self._opening is not None:
            self._opening.leave()
        if self._connection is not None:
            self._drop_connection(self._connection)
        self._wake.close()
        self._ended.set()

    def _count(self) -> None:
        self._published += 1

    def _say(self, level: int, text: str) -> None:
        """Log a change of state once, however often it recurs."""
        if text != self._said:
            self._said = text
            log.log(level, "mqtt: %s", text)
