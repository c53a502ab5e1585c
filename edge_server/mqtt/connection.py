"""Connection: one MQTT connection of a publisher, through paho."""

from __future__ import annotations

import logging
import select
import socket
import ssl
import time
from collections import deque
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any, Final

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from edge_server.lanes import e2e
from edge_server.lanes.types import LONGEST_AGE_S
from edge_server.mqtt.broker import (
    MOST_PACKET_BYTES,
    address_of,
    fault_of,
    password_of,
    transport_of,
)
from edge_server.mqtt.payloads import content_type
from edge_server.process.worker import AwakeTime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paho.mqtt.reasoncodes import ReasonCode

    from edge_server.mqtt.outbox import Wake
    from edge_server.mqtt.payloads import Topics
    from edge_server.settings import Mqtt
    from edge_server.settings.sections import PayloadFormat

log = logging.getLogger(__name__)

# A broker that is silent for two of these intervals counts as lost.
KEEPALIVE_S: Final = 5
# Keepalive does not notice a broker that answers pings and acknowledges nothing.
ACKNOWLEDGE_S: Final = 3.0
# `step` is called at least so often.
_LONGEST_STEP_S = 1.0
# For TCP and again for TLS.
CONNECT_TIMEOUT_S: Final = 3.0

# Unread messages in our socket are stale when a frozen broker resumes; this is some 10 frames.
_SEND_BUFFER_BYTES: Final = 32 * 1024
# No device has so many models and cameras; a broker may retain any number.
_MAX_RETAINED: Final = 1024

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


class Connection:
    """One connection from CONNECT to its end; the next connection is a new object.

    paho runs without its thread and its reconnect: `step`, called by one thread, does all the work,
    so publishing needs no second thread and no lock of paho's is ever held against ours. A paho
    client that reconnects also resends unacknowledged messages *after* `on_connect`, which would
    overwrite new retained state with old; a new client has nothing to resend.

    Attributes:
        ready: the broker has accepted the connection, and it has not ended.
        receive_maximum: number of QoS 1 messages that the broker takes before it acknowledges one.
        end: the reason why the connection ended, for the log; None while it lasts.
        refused: the broker refused this client and will again until an operator intervenes.
        taken_over: the broker ended the connection because another client with the same id came.
        live_in_flight: number of live messages that paho has not yet written to the socket.
        watched: the broker has answered the last `watch`, or has left it unanswered for too long.
        retained: the topics found by `watch`, a bounded number.
        mark: what the broker retains on `acknowledged`; empty where it has nothing.
        births: what other clients have published on `meta`, and whether it was retained; the
            newest ones.
        acknowledged: the broker has acknowledged a message: it works.

    Args:
        mqtt: the broker and the credentials for it.
        client_id: the MQTT client id.
        will: topic and payload that the broker retains if the client vanishes; None sets no will.
        keepalive_s: see `KEEPALIVE_S`.
        on_live_sent: called by `step` or `publish_live` for each live message that is written.
    """

    def __init__(
        self,
        mqtt: Mqtt,
        client_id: str,
        will: tuple[str, bytes] | None = None,
        *,
        keepalive_s: int = KEEPALIVE_S,
        on_live_sent: Callable[[], None] = lambda: None,
    ) -> None:
        self.ready = False
        self.end: str | None = None
        self.refused = False
        self.taken_over = False
        self.receive_maximum = _MQTT_RECEIVE_MAXIMUM
        self.live_in_flight = 0
        self.acknowledged = False
        self.watched = False
        self.retained: set[str] = set()
        self.mark = b""
        self.births: deque[tuple[bytes, bool]] = deque(maxlen=4)
        self._topics: Topics | None = None  # that `watch` has subscribed to
        self._watch_mid: int | None = None
        self._watched_since = 0.0
        self._heard_topic = ""
        self._on_payload: Callable[[bytes], None] | None = None
        self._listen_mid: int | None = None
        self._said = ""  # by paho, which gives the reason of a malformed packet nowhere else
        self._mqtt = mqtt
        self._keepalive_s = keepalive_s
        self._on_live_sent = on_live_sent
        self._packet_limit_bytes: int | None = None
        self._unacknowledged: dict[int, tuple[str, float]] = {}  # mid: topic, sent at
        self._awake = AwakeTime(_LONGEST_STEP_S)
        self._of_events: dict[int, Callable[[], None]] = {}
        self._denied: set[str] = set()
        self._client = client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id=client_id,
            protocol=paho.MQTTv5,
            reconnect_on_failure=False,
        )
        client.connect_timeout = CONNECT_TIMEOUT_S
        client.on_socket_open = _tune
        client.on_socket_close = self._on_socket_close
        client.on_log = self._on_log
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_publish = self._on_publish
        client.on_subscribe = self._on_subscribe
        client.on_message = self._on_message
        if will is not None:
            properties = _properties(PacketTypes.WILLMESSAGE)
            client.will_set(will[0], will[1], qos=1, retain=True, properties=properties)
        self._state_properties = _properties(PacketTypes.PUBLISH)
        self._event_properties = _properties(PacketTypes.PUBLISH, mqtt.payload, "Event")
        self._live_properties = _properties(PacketTypes.PUBLISH, mqtt.payload, "LaneFrame")
        self._live_properties.MessageExpiryInterval = LONGEST_AGE_S

    @property
    def in_flight(self) -> int:
        """Number of unfinished messages: live ones not written, states not acknowledged."""
        return self.live_in_flight + len(self._unacknowledged)

    def open(self) -> None:
        """Connect and send CONNECT; blocks for up to `CONNECT_TIMEOUT_S` for each address of the
        host and for TLS, plus the time of the name servers.

        Raises:
            OSError: the broker is unreachable or untrusted, or a file cannot be read.
            ValueError: an invalid host name or file.
        """
        mqtt = self._mqtt
        if mqtt.username is not None:
            self._client.username_pw_set(mqtt.username, password_of(mqtt))
        self._client.tls_set_context(transport_of(mqtt))
        limits = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        limits.MaximumPacketSize = MOST_PACKET_BYTES
        self._client.connect(
            mqtt.host, mqtt.port, self._keepalive_s, clean_start=True, properties=limits
        )

    def watch(self, topics: Topics) -> None:
        """Subscribe: from now on `retained` gathers the topics of models and cameras with a
        retained message, `mark` is that of `acknowledged` once the broker has answered, and
        `births` what others publish on `meta`."""
        options = SubscribeOptions(qos=0, noLocal=True)
        self._topics = topics
        # A broker answers in order: what it retains of the first comes before the second's answer.
        self._client.subscribe([(topics.acknowledged, options)])
        _, self._watch_mid = self._client.subscribe(
            [(topic, options) for topic in (topics.meta, *topics.states())]
        )
        self._watched_since = time.monotonic()

    def listen(self, topic: str, on_payload: Callable[[bytes], None]) -> None:
        """Subscribe: from now on `step` calls `on_payload` with each message of `topic`.

        A retained one is of a time that nobody knows, and is left out.
        """
        self._heard_topic, self._on_payload = topic, on_payload
        options = SubscribeOptions(qos=0, noLocal=True)
        _, self._listen_mid = self._client.subscribe([(topic, options)])

    def publish_live(self, topic: str, payload: bytes, envelope: e2e.Envelope) -> bool:
        """Publish with QoS 0, not retained, expiring after `LONGEST_AGE_S`; return False if the
        packet exceeds the broker's limit."""
        properties = _protected(self._live_properties, topic, payload, envelope)
        if not self._fits(topic, payload, properties):
            return False
        self.live_in_flight += 1  # before: paho may call `_on_publish` from within
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
        self._unacknowledged[sent.mid] = topic, time.monotonic()

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
        properties = _protected(self._event_properties, topic, payload, envelope)
        properties.CorrelationData = correlation
        if not self._fits(topic, payload, properties):
            on_acknowledged()
            return
        sent = self._client.publish(topic, payload, qos=1, properties=properties)
        self._unacknowledged[sent.mid] = topic, time.monotonic()
        self._of_events[sent.mid] = on_acknowledged

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
        """Wait for the socket, `wake` or `timeout_s`, then read and write.

        Must be called at least every second: keepalive is checked here.
        """
        client = self._client
        sock = client.socket()
        if sock is None:
            self._ended("connection closed")
            return
        decrypted = isinstance(sock, ssl.SSLSocket) and sock.pending() > 0
        poll = select.poll()
        poll.register(wake.fileno(), select.POLLIN)
        writing = select.POLLOUT if client.want_write() else 0
        poll.register(sock.fileno(), select.POLLIN | writing)
        events = dict(poll.poll(0 if decrypted else timeout_s * 1000))
        if wake.fileno() in events:
            wake.clear()
        event = events.get(sock.fileno(), 0)
        if decrypted or event & ~select.POLLOUT:
            client.loop_read()
        if event & select.POLLOUT:
            client.loop_write()
        client.loop_misc()
        self._check_acknowledgements()

    @contextmanager
    def ended_by_errors(self) -> Iterator[None]:
        """Have an error of what is done within, paho's or ours, end the connection and nothing
        else: paho raises IndexError, KeyError, struct.error ... for invalid packets."""
        try:
            yield
        except Exception as error:
            log.exception("mqtt: %s: the connection is ended by an error", address_of(self._mqtt))
            self._ended(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """End the connection; the broker drops the will if DISCONNECT is still sent."""
        if self.ready:
            self._client.disconnect()
        sock = self._client.socket()
        if sock is not None:
            sock.close()
        self._ended("closed by us")

    def _check_acknowledgements(self) -> None:
        self._awake.look(time.monotonic())
        if self._topics is not None and not self.watched:
            self._check_watch()
        for topic, sent_at in self._unacknowledged.values():
            if self._awake.since(sent_at) > ACKNOWLEDGE_S:
                self._ended(f"{topic} not acknowledged for {ACKNOWLEDGE_S:g} s")
            return  # the first is the oldest

    def _check_watch(self) -> None:
        if self._awake.since(self._watched_since) > ACKNOWLEDGE_S:
            self.watched = True
            log.warning(
                "mqtt: %s has not answered a subscription for %g s: events go on without knowing "
                "which ones it has",
                address_of(self._mqtt),
                ACKNOWLEDGE_S,
            )

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
        self.watched = self.watched or mid == self._watch_mid
        refusal = next((reason for reason in reasons if reason.is_failure), None)
        if refusal is None:
            return
        if mid == self._listen_mid:
            log.error(
                "mqtt: %s does not let this device read %s (%s): the vehicle's state is not known",
                address_of(self._mqtt),
                self._heard_topic,
                refusal,
            )
        else:
            log.info(
                "mqtt: %s does not let this device read what it retains (%s): states of models and "
                "cameras that are gone since an earlier run stay there",
                address_of(self._mqtt),
                refusal,
            )

    def _on_message(self, _c: Any, _d: Any, message: paho.MQTTMessage) -> None:
        topic, topics = message.topic, self._topics
        if topic == self._heard_topic:
            if self._on_payload is not None and not message.retain:
                self._on_payload(bytes(message.payload))
        elif topics is None:
            return
        elif topic == topics.acknowledged:
            self.mark = bytes(message.payload)
        elif topic == topics.meta:
            self.births.append((bytes(message.payload), message.retain))
        elif (
            message.retain
            and message.payload
            and topics.is_state(topic)  # a broker may send any, one that cannot be published too
            and len(self.retained) < _MAX_RETAINED
        ):
            self.retained.add(topic)

    def _on_publish(self, _c: Any, _d: Any, mid: int, reason: ReasonCode, _p: Any) -> None:
        topic, _ = self._unacknowledged.pop(mid, (None, 0.0))
        if topic is None:
            self.live_in_flight -= 1
            self._on_live_sent()
            return
        self.acknowledged = True
        if reason.is_failure:
            self._log_denied(topic, f"{address_of(self._mqtt)} refuses it: {reason}")
        if (on_acknowledged := self._of_events.pop(mid, None)) is not None:
            on_acknowledged()


def _tune(_client: paho.Client, _data: Any, sock: Any) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)


def _protected(
    properties: Properties, topic: str, payload: bytes, envelope: e2e.Envelope
) -> Properties:
    # A copy takes a tenth of the time of new ones.
    properties = copy(properties)
    properties.UserProperty = e2e.PROPERTY, e2e.protect(topic, payload, envelope)
    return properties


def _properties(packet: int, payload: PayloadFormat = "json", message: str = "") -> Properties:
    properties = Properties(packet)  # type: ignore[no-untyped-call]
    properties.PayloadFormatIndicator = int(payload == "json")  # 1 is UTF-8, 0 is bytes
    properties.ContentType = content_type(payload, message)
    return properties
