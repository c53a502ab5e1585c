"""Connection: one MQTT connection of a publisher, through paho."""

from __future__ import annotations

import logging
import math
import select
import socket
import ssl
import time
from copy import copy
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from edge_server.lanes import e2e
from edge_server.lanes.types import LONGEST_AGE_S
from edge_server.mqtt.broker import MOST_PACKET_BYTES, address_of, fault_of, log_in
from edge_server.mqtt.payloads import content_type
from edge_server.process.threads import AwakeTime

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paho.mqtt.reasoncodes import ReasonCode

    from edge_server.mqtt.outbox import Wake
    from edge_server.settings import Mqtt
    from edge_server.settings.sections import PayloadFormat

log = logging.getLogger(__name__)

# A broker that is silent for two of these intervals counts as lost.
KEEPALIVE_S: Final = 5
# Keepalive does not notice a broker that answers pings and acknowledges nothing.
ACKNOWLEDGE_S: Final = 3.0
# `step` is called at least so often, and looks at acknowledgements no more often than that.
_LONGEST_STEP_S = 1.2
_CHECK_S = 0.25
# For TCP and again for TLS.
CONNECT_TIMEOUT_S: Final = 3.0

# Unread messages in our socket are stale when a frozen broker resumes; this is some 10 frames.
_SEND_BUFFER_BYTES: Final = 32 * 1024
# More messages in such a time are a flood: the acknowledgements behind it would be late.
_MOST_HEARD: Final = 2000
_HEARD_S: Final = 3.0
# Packets that are read before others are published.
_MOST_READ: Final = 50

# MQTT 5's default for a broker that sends no receive maximum.
_MQTT_RECEIVE_MAXIMUM: Final = 65535
# A PUBLISH without topic, properties and payload: fixed header, topic's length, packet id.
_PUBLISH_HEADER_BYTES: Final = 5 + 2 + 2

# Temporary CONNACK codes of MQTT 5: unavailable, busy, quota, rate. Every other refusal is
# permanent until an operator changes the configuration.
_TEMPORARY: Final = frozenset({0x88, 0x89, 0x97, 0x9F})
# DISCONNECT's codes of MQTT 5.
_PROTOCOL_ERROR: Final = 0x82
_SESSION_TAKEN_OVER: Final = 0x8E


class _Sent(NamedTuple):
    """A message of QoS 1 that the broker has not acknowledged."""

    topic: str
    at: float
    on_acknowledged: Callable[[], None] | None = None


class Connection:
    """One connection from CONNECT to its end; the next connection is a new object.

    paho runs without its thread and its reconnect: `step`, called by one thread, does all the work,
    so publishing needs no second thread and no lock of paho's is ever held against ours; and paho's
    own loop takes no descriptor above 1023. A paho client that reconnects also resends
    unacknowledged messages *after* `on_connect`, which would overwrite new retained state with old;
    a new client has nothing to resend.

    Attributes:
        ready: the broker has accepted the connection, and it has not ended.
        receive_maximum: number of QoS 1 messages that the broker takes before it acknowledges one.
        end: the reason why the connection ended, for the log; None while it lasts.
        refused: the broker refused this client and will again until an operator intervenes.
        taken_over: the broker ended the connection because another client with the same id came.
        live_in_flight: number of live messages that paho has not yet written to the socket.
        in_flight: these, and the states and events that the broker has not acknowledged.
        answered: the broker has answered every `subscribe`, or one not for too long.
        acknowledged: the broker has acknowledged a message: it works.
        flooded: more came than can be read beside what is published.

    Args:
        client_id: the MQTT client id.
        will: topic and payload that the broker retains if the client vanishes; None sets no will.
        on_live_sent: called by `step` or `publish_live` for each live message that is written.
        on_message: called by `step` with topic, payload and whether it was retained.
    """

    def __init__(
        self,
        mqtt: Mqtt,
        client_id: str,
        will: tuple[str, bytes] | None = None,
        *,
        keepalive_s: int = KEEPALIVE_S,
        on_live_sent: Callable[[], None] = lambda: None,
        on_message: Callable[[str, bytes, bool], None] = lambda *_: None,
    ) -> None:
        self.ready = False
        self.end: str | None = None
        self.refused = False
        self.taken_over = False
        self.receive_maximum = _MQTT_RECEIVE_MAXIMUM
        self.live_in_flight = self.in_flight = 0
        self.acknowledged = False
        self.answered = True
        self.flooded = False
        self._filters: dict[int | None, Sequence[str]] = {}  # of each subscription
        self._asked_at = math.inf
        self._on_message = on_message
        self._heard = 0
        self._heard_since = 0.0
        self._said = ""  # by paho, which gives the reason of a malformed packet nowhere else
        self._mqtt = mqtt
        self._keepalive_s = keepalive_s
        self._on_live_sent = on_live_sent
        self._packet_limit_bytes: int | None = None
        self._unacknowledged: dict[int, _Sent] = {}
        self._awake = AwakeTime(_LONGEST_STEP_S)
        self._check_at = 0.0
        self._denied: set[str] = set()
        self._poll: select.poll | None = None  # of the wake and the socket
        self._client = client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id=client_id,
            protocol=paho.MQTTv5,
            reconnect_on_failure=False,
        )
        client.connect_timeout = CONNECT_TIMEOUT_S
        client.on_socket_open = _tune
        client.on_socket_close = self._on_socket_close
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_publish = self._on_publish
        client.on_subscribe = self._on_subscribe
        client.on_message = self._hear
        if will is not None:
            properties = _properties(PacketTypes.WILLMESSAGE)
            client.will_set(will[0], will[1], qos=1, retain=True, properties=properties)
        self._state_properties = _properties(PacketTypes.PUBLISH)
        self._event_properties = _properties(PacketTypes.PUBLISH, mqtt.payload, "Event")
        self._live_properties = {
            message: _properties(PacketTypes.PUBLISH, mqtt.payload, message)
            for message in ("LaneFrame", "NetworkFrame")
        }
        for each in self._live_properties.values():
            each.MessageExpiryInterval = LONGEST_AGE_S

    def open(self) -> None:
        """Connect and send CONNECT; blocks for up to `CONNECT_TIMEOUT_S` for each address of the
        host and for TLS, plus the time of the name servers.

        Raises:
            OSError: the broker is unreachable or untrusted, or a file cannot be read.
            ValueError: an invalid host name or file.
        """
        mqtt = self._mqtt
        log_in(self._client, mqtt)
        limits = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        limits.MaximumPacketSize = MOST_PACKET_BYTES
        self._client.connect(
            mqtt.host, mqtt.port, self._keepalive_s, clean_start=True, properties=limits
        )

    def subscribe(self, filters: Sequence[str]) -> None:
        """Subscribe with QoS 0 to what others publish, and the broker retains."""
        options = SubscribeOptions(qos=0, noLocal=True)
        _, mid = self._client.subscribe([(each, options) for each in filters])
        self._filters[mid] = filters
        self._asked_at = time.monotonic()
        self.answered = False

    def publish_live(
        self, topic: str, payload: bytes, envelope: e2e.Envelope, message: str = "LaneFrame"
    ) -> bool:
        """Publish with QoS 0, not retained, expiring after `LONGEST_AGE_S`; return False if the
        packet exceeds the broker's limit."""
        properties = copy(self._live_properties[message])  # in a tenth of the time of new ones
        properties.UserProperty = e2e.PROPERTY, e2e.protect(topic, payload, envelope)
        if self._packet_limit_bytes is not None and not self._fits(topic, payload, properties):
            return False
        self.live_in_flight += 1  # before: paho may call `_on_publish` from within
        self.in_flight += 1
        self._client.publish(topic, payload, qos=0, properties=properties)
        return True

    def publish_state(self, topic: str, payload: bytes) -> None:
        """Publish with QoS 1, retained. A state whose packet exceeds the broker's limit clears its
        topic, as the state retained there is no longer true."""
        if not self._fits(topic, payload, self._state_properties):
            payload = b""
        sent = self._client.publish(
            topic, payload, qos=1, retain=True, properties=self._state_properties
        )
        self._unacknowledged[sent.mid] = _Sent(topic, time.monotonic())
        self.in_flight += 1

    def publish_event(
        self,
        topic: str,
        payload: bytes,
        envelope: e2e.Envelope,
        correlation: bytes,
        on_acknowledged: Callable[[], None],
    ) -> None:
        """Publish with QoS 1, not retained, never expiring: late is better than lost. An event
        whose packet exceeds the broker's limit, or that the broker refuses, counts as acknowledged:
        the next ones would wait for it forever."""
        properties = copy(self._event_properties)
        properties.UserProperty = e2e.PROPERTY, e2e.protect(topic, payload, envelope)
        properties.CorrelationData = correlation
        if not self._fits(topic, payload, properties):
            on_acknowledged()
            return
        sent = self._client.publish(topic, payload, qos=1, properties=properties)
        self._unacknowledged[sent.mid] = _Sent(topic, time.monotonic(), on_acknowledged)
        self.in_flight += 1

    def _fits(self, topic: str, payload: bytes, properties: Properties) -> bool:
        # paho sends a packet over the limit all the same, and the broker ends the connection.
        if self._packet_limit_bytes is None:
            return True
        packed: bytes = properties.pack()  # type: ignore[no-untyped-call]
        size_bytes = _PUBLISH_HEADER_BYTES + len(topic) + len(packed) + len(payload)
        if size_bytes > self._packet_limit_bytes:
            self._log_denied(
                topic,
                f"not published: a message of {size_bytes} bytes, and {address_of(self._mqtt)} "
                f"takes {self._packet_limit_bytes} at most; raise the broker's limit (mosquitto: "
                "max_packet_size)",
            )
            return False
        return True

    def _log_denied(self, topic: str, text: str) -> None:
        """Log once for each topic."""
        if topic not in self._denied:
            self._denied.add(topic)
            log.error("mqtt: %s: %s", topic, text)

    def step(self, wake: Wake, timeout_s: float) -> None:
        """Wait for the socket, `wake`, which is the same each time, or `timeout_s`; read and write.

        Must be called at least every second: keepalive is checked here.
        """
        client = self._client
        sock = client.socket()
        if sock is None:
            self._ended("connection closed")
            return
        decrypted = isinstance(sock, ssl.SSLSocket) and sock.pending() > 0
        descriptor = sock.fileno()
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(wake.fileno(), select.POLLIN)
        writing = select.POLLOUT if client.want_write() else 0
        self._poll.register(descriptor, select.POLLIN | writing)
        events = dict(self._poll.poll(0 if decrypted else timeout_s * 1000))
        event = events.pop(descriptor, 0)
        if events:
            wake.clear()
        if decrypted or event & ~select.POLLOUT:
            more = select.poll()
            more.register(descriptor, select.POLLIN)
            # Only here does paho say what is malformed; for each packet sent it would cost time.
            client.on_log = self._on_log
            for _ in range(_MOST_READ):
                client.loop_read()
                if client.socket() is not sock or not more.poll(0):
                    break
            client.on_log = None
        if event & select.POLLOUT:
            client.loop_write()
        now = time.monotonic()
        if now >= self._check_at:
            self._check_at = now + _CHECK_S
            client.loop_misc()
            self._check_acknowledgements(now)

    def fail(self, error: Exception) -> None:
        """End the connection by an error, paho's or ours, and nothing else: paho raises IndexError,
        KeyError, struct.error ... for invalid packets."""
        where = address_of(self._mqtt)
        log.error("mqtt: %s: the connection is ended by an error", where, exc_info=error)
        self._ended(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """End the connection; the broker drops the will if DISCONNECT is still sent."""
        if self.ready:
            self._client.disconnect()
        sock = self._client.socket()
        if sock is not None:
            sock.close()
        self._ended("closed by us")

    def _check_acknowledgements(self, now: float) -> None:
        self._awake.look(now)
        if not self.answered and self._awake.since(self._asked_at) > ACKNOWLEDGE_S:
            self.answered = True
            log.warning(
                "mqtt: %s has not answered a subscription for %g s: events go on without knowing "
                "which ones it has",
                address_of(self._mqtt),
                ACKNOWLEDGE_S,
            )
        oldest = next(iter(self._unacknowledged.values()), None)
        if oldest is not None and self._awake.since(oldest.at) > ACKNOWLEDGE_S:
            self.flooded = self._heard > _MOST_HEARD // 10
            self._ended(f"{oldest.topic} not acknowledged for {ACKNOWLEDGE_S:g} s")

    def _ended(self, reason: str) -> None:
        self.ready = False
        if self.end is None:
            self.end = reason

    # Called by paho from within `step`, `publish_live` and `publish_state`.

    def _on_connect(self, _c: Any, _d: Any, _flags: Any, reason: ReasonCode, limits: Any) -> None:
        if reason.is_failure:
            self.refused = reason.value not in _TEMPORARY
            self._ended(str(reason))
            return
        self._packet_limit_bytes = getattr(limits, "MaximumPacketSize", None)
        self.receive_maximum = getattr(limits, "ReceiveMaximum", _MQTT_RECEIVE_MAXIMUM)
        self.ready = True

    def _on_socket_close(self, _c: Any, _d: Any, sock: object) -> None:
        if fault := fault_of(sock):
            self._ended(fault)

    def _on_disconnect(
        self, _c: Any, _d: Any, flags: paho.DisconnectFlags, reason: ReasonCode, _p: Any
    ) -> None:
        if flags.is_disconnect_packet_from_server:
            self.taken_over = reason.value == _SESSION_TAKEN_OVER
            self._ended(f"ended by the broker: {reason}")
        elif reason.value == _PROTOCOL_ERROR:
            self._ended(f"a protocol error: {self._said}")
        else:
            self._ended("connection closed" if reason.value == 0x80 else str(reason))

    def _on_log(self, _c: Any, _d: Any, _level: int, text: str) -> None:
        self._said = text

    def _on_subscribe(self, _c: Any, _d: Any, mid: int, reasons: list[ReasonCode], _p: Any) -> None:
        filters = self._filters.pop(mid, ())
        self.answered = not self._filters
        for topic, reason in zip(filters, reasons, strict=False):
            if reason.is_failure:
                level = logging.ERROR if topic.endswith("/vehicle") else logging.INFO
                broker = address_of(self._mqtt)
                log.log(
                    level, "mqtt: %s does not let this device read %s: %s", broker, topic, reason
                )

    def _hear(self, _c: Any, _d: Any, message: paho.MQTTMessage) -> None:
        now = time.monotonic()
        if now - self._heard_since > _HEARD_S:
            self._heard_since, self._heard = now, 0
        self._heard += 1
        if self._heard > _MOST_HEARD:
            self.flooded = True
            self._ended(
                f"more than {_MOST_HEARD} messages in {_HEARD_S:g} s, the last on {message.topic}"
            )
            return
        self._on_message(message.topic, bytes(message.payload), message.retain)

    def _on_publish(self, _c: Any, _d: Any, mid: int, reason: ReasonCode, _p: Any) -> None:
        sent = self._unacknowledged.pop(mid, None)
        self.in_flight -= 1
        if sent is None:
            self.live_in_flight -= 1
            self._on_live_sent()
            return
        self.acknowledged = True
        if reason.is_failure:
            self._log_denied(sent.topic, f"{address_of(self._mqtt)} refuses it: {reason}")
        if sent.on_acknowledged is not None:
            sent.on_acknowledged()


def _tune(_client: paho.Client, _data: Any, sock: Any) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)


def _properties(packet: int, payload: PayloadFormat = "json", message: str = "") -> Properties:
    properties = Properties(packet)  # type: ignore[no-untyped-call]
    properties.PayloadFormatIndicator = int(payload == "json")  # 1 is UTF-8, 0 is bytes
    properties.ContentType = content_type(payload, message)
    return properties
