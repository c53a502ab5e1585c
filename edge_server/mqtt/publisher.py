"""Publisher: publishes lanes and state of this device to an MQTT broker."""

from __future__ import annotations

import itertools
import logging
import math
import random
import ssl
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from edge_server.inference.snapshot import ModelState
from edge_server.mqtt import payloads
from edge_server.mqtt.broker import address_of
from edge_server.mqtt.connection import KEEPALIVE_S, LIVE_EXPIRY_S, Connection
from edge_server.mqtt.health import health
from edge_server.mqtt.outbox import Outbox, Wake
from edge_server.mqtt.topics import Topics
from edge_server.process.backoff import Backoff
from edge_server.process.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from edge_server.board.facts import BoardFacts
    from edge_server.board.update_record import UpdateRecord
    from edge_server.board.watch import BoardCondition
    from edge_server.inference.snapshot import ModelEntry
    from edge_server.lanes.types import LaneFrame
    from edge_server.mqtt.topics import Identity
    from edge_server.settings import Mqtt

log = logging.getLogger(__name__)

# paho does not bound QoS 0 messages: 138 MB in 10 s were measured against a frozen broker.
WINDOW: Final = 4

# X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL.
_OF_ANOTHER_TIME: Final = (9, 10)
_STEP_S: Final = 0.5
_FAREWELL_S: Final = 0.8
# A broker that is unreachable for this long is logged, once; the publisher keeps trying.
_SLOW_S: Final = 10.0
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

    Attributes:
        connected: the connection is open, as far as the publisher knows.
        published: number of lane messages written to a broker's connection.

    Args:
        mqtt: the broker and the credentials for it.
        identity: of this device.
        keepalive_s: see `KEEPALIVE_S`.
        now_ns: the clock of a frame's age; `time.monotonic_ns`.

    Raises:
        ValueError: the device's name cannot be part of a topic.
    """

    def __init__(
        self,
        mqtt: Mqtt,
        identity: Identity,
        *,
        keepalive_s: int = KEEPALIVE_S,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.worker = Worker("mqtt", self._tick, on_end=self._end)
        self.connected = False
        self.published = 0
        self._mqtt = mqtt
        self._address = address_of(mqtt)
        self._identity = identity
        self._keepalive_s = keepalive_s
        self._now_ns = now_ns
        self._topics = Topics(identity.device)
        self._outbox: Outbox[tuple[int, LaneFrame]] = Outbox()
        self._outbox.put_state(self._topics.status, payloads.status(identity, "starting"))
        self._outbox.put_state(self._topics.meta, payloads.meta(identity))
        self._seq: dict[str, Iterator[int]] = defaultdict(itertools.count)
        self._models: set[str] = set()  # that have a topic
        self._online = False
        self._misnamed: set[str] = set()
        self._wake = Wake()
        self._connection: Connection | None = None
        self._ready_since = 0.0
        self._retry_at = 0.0
        self._backoff = Backoff(*_RETRY_S)
        self._leave_by: float | None = None
        self._ended = threading.Event()
        self._lost = 0
        self._logged = ""

    @property
    def waiting(self) -> int:
        """Number of messages that wait for the broker; never more than the number of topics."""
        return self._outbox.waiting

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
        self._outbox.put_state(self._topics.status, payloads.status(self._identity, "offline"))
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
        payload = payloads.status(self._identity, "online", no_lanes=sorted(no_lanes))
        self._put_state(self._topics.status, payload)
        self._online = True

    def publish_health(
        self,
        facts: BoardFacts | None,
        condition: BoardCondition,
        free_bytes: Mapping[str, int],
    ) -> None:
        """Publish the health of the board; see `health`."""
        mono_ns, epoch_ns = time.monotonic_ns(), time.time_ns()
        payload = health(
            self._identity, facts, condition, free_bytes, mono_ns=mono_ns, epoch_ns=epoch_ns
        )
        self._put_state(self._topics.health, payload)

    def publish_lanes(self, frame: LaneFrame) -> None:
        """Offer a frame's lanes; the newest frame of each camera wins. Never raises."""
        topic = self._topic(self._topics.lanes, frame.camera)
        if topic is not None and self._outbox.put_live(topic, (next(self._seq[topic]), frame)):
            self._wake.ring()

    def publish_camera_status(
        self,
        name: str,
        state: payloads.CameraState,
        last_frame_age_ms: int | None,
        failure: str = "",
        **more: Any,
    ) -> None:
        """Publish the state of a camera and its lanes; see `payloads.camera_status`."""
        topic = self._topic(self._topics.camera_status, name)
        self._put_state(topic, payloads.camera_status(state, last_frame_age_ms, failure, **more))

    def clear_camera_status(self, name: str) -> None:
        """Clear the retained state of a camera that was removed."""
        self._put_state(self._topic(self._topics.camera_status, name), b"")

    def publish_update(self, record: UpdateRecord) -> None:
        """Publish the version that runs, and what became of the last update."""
        self._put_state(self._topics.update, payloads.update(self._identity, record))

    def publish_model_state(self, name: str, state: str, reason: str = "") -> None:
        """Publish whether a model serves, and the reason if it does not."""
        topic = self._topic(self._topics.model_state, name)
        self._put_state(topic, payloads.model_state(name, state, reason))

    def publish_models(self, entries: Iterable[ModelEntry]) -> None:
        """Publish for each model its newest version that is READY, or else its newest one.

        The topics of models that are missing in `entries` are cleared.
        """
        by_rank = sorted(entries, key=lambda e: (e.state is ModelState.READY, e.version))
        newest = {entry.name: entry for entry in by_rank}
        for name, entry in newest.items():
            self.publish_model_state(name, entry.state.value, entry.reason)
        for name in self._models - newest.keys():
            self._put_state(self._topic(self._topics.model_state, name), b"")
        self._models = set(newest)

    def _put_state(self, topic: str | None, payload: bytes) -> None:
        if topic is not None and self._outbox.put_state(topic, payload):
            self._wake.ring()

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
        connection = self._connection
        if connection is None:
            if leaving:
                return False
            if now < self._retry_at:
                self._wake.wait(min(self._retry_at - now, _STEP_S))
            else:
                self._connect()
            return True
        connection.step(self._wake, _STEP_S)
        if connection.ready:
            if not self.connected:
                self._greet(connection)
            self._drain(connection)
            if leaving and self._outbox.waiting + connection.in_flight == 0:
                return False
        if connection.end is not None:
            self._lose(connection, connection.end)
        return self._leave_by is None or time.monotonic() < self._leave_by

    def _connect(self) -> None:
        connection = Connection(
            self._mqtt,
            self._identity.client_id,
            will=(self._topics.status, payloads.status(self._identity, "offline")),
            keepalive_s=self._keepalive_s,
            on_live_sent=self._count,
        )
        slow = f"{self._address} does not answer, or no name server does; waiting"
        timer = threading.Timer(_SLOW_S, self._log_once, (logging.WARNING, slow))
        timer.daemon = True
        timer.start()
        try:
            # The system's resolver asks one name server after another, for minutes, and cannot be
            # interrupted.
            with self.worker.allowing(math.inf):
                connection.open()
        except Exception as error:  # noqa: BLE001
            reason = _reason(error)
            text = f"cannot reach {self._address}: {reason}; trying again"
            self._log_once(logging.WARNING, text)
            self._retry_at = time.monotonic() + self._backoff.next_s()
        else:
            self._connection = connection
        finally:
            timer.cancel()

    def _greet(self, connection: Connection) -> None:
        self.connected = True
        self._ready_since = time.monotonic()
        self._outbox.connected()
        connection.watch(*self._topics.states())
        self._log_once(logging.INFO, f"connected to {self._address}")

    def _drain(self, connection: Connection) -> None:
        """Write what the broker takes now: states first, then the newest lanes."""
        if self._online:
            self._clear_leftovers(connection)
        window = min(WINDOW, connection.receive_maximum)
        while connection.end is None and connection.in_flight < window:
            if (state := self._outbox.take_state()) is not None:
                connection.publish_state(*state)
                continue
            if (live := self._outbox.take_live()) is None:
                return
            topic, (seq, frame) = live
            now_ns = self._now_ns()
            # That there are no lanes is true at any age of the last frame.
            if not frame.failure and frame.age_ns(now_ns) > LIVE_EXPIRY_S * 1_000_000_000:
                self._lost += 1
                continue
            payload = payloads.lane_frame(frame, self._identity, seq, now_ns)
            if not connection.publish_live(topic, payload):
                self._lost += 1

    def _clear_leftovers(self, connection: Connection) -> None:
        """Clear the topics that an earlier run retained and that have no state now."""
        while connection.retained:
            topic = connection.retained.pop()
            if not self._outbox.knows(topic):
                self._outbox.put_state(topic, b"")

    def _lose(self, connection: Connection, reason: str) -> None:
        """Discard the ended connection and schedule the next attempt."""
        was_connected = self.connected
        self._close(connection)
        now = time.monotonic()
        if connection.refused:
            self._retry_at = now + random.uniform(*_REFUSED_S)  # noqa: S311
            self._log_once(logging.ERROR, f"{self._address} refuses us: {reason}")
            return
        if was_connected and now - self._ready_since > _STABLE_S:
            self._backoff.reset()
        self._retry_at = now + self._backoff.next_s()
        event = "lost" if was_connected else "cannot reach"
        self._log_once(logging.WARNING, f"{event} {self._address}: {reason}")

    def _close(self, connection: Connection) -> None:
        connection.close()
        self.connected = False
        self._connection = None
        self._lost += connection.live_in_flight

    def _end(self) -> None:
        if self._connection is not None:
            self._close(self._connection)
        self._wake.close()
        self._ended.set()

    def _count(self) -> None:
        self.published += 1

    def _log_once(self, level: int, text: str) -> None:
        """Log a change of state once, however often it recurs."""
        if text != self._logged:
            self._logged = text
            log.log(level, "mqtt: %s", text)


def _reason(error: Exception) -> str:
    """Return why no connection was made; the clock may be the reason where a certificate is not
    valid at this time."""
    reason = str(getattr(error, "strerror", None) or error)
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _OF_ANOTHER_TIME:
        now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        return f"{reason}; is the clock of this device right? It shows {now}"
    return reason
