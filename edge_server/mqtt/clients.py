"""Short visits to a broker beside the publisher's: a test for `check` and `demo`, and the state
of a program that runs before the daemon."""

from __future__ import annotations

import logging
import ssl
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from edge_server.errors import Unavailable
from edge_server.mqtt.broker import address_of, log_in, reason_of
from edge_server.mqtt.connection import Connection
from edge_server.mqtt.outbox import Wake

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_server.settings import Mqtt

log = logging.getLogger(__name__)

# Time limit for CONNACK, once the connection is open.
TIMEOUT_S = 5.0
_STEP_S = 0.2
_KEEPALIVE_S = 5
_FAREWELL_S = 1.0


class BrokerTest(NamedTuple):
    """The result of a connection test.

    Attributes:
        fault: the reason of a failure; empty if the broker accepted the connection.
        permanent: the broker refused the client, or is not the one that the settings trust: a
            retry would fail again.
    """

    fault: str = ""
    permanent: bool = False


def try_broker(mqtt: Mqtt, client_id: str) -> BrokerTest:
    """Connect as the publisher does, and disconnect; nothing is published.

    Args:
        client_id: other than a connected publisher's: the broker would disconnect that publisher.
    """
    connection = Connection(mqtt, client_id)
    try:
        connection.open()
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        return BrokerTest(str(reason), isinstance(error, ssl.SSLCertVerificationError))
    with closing(Wake()) as wake, closing(connection):
        until = time.monotonic() + TIMEOUT_S
        while not connection.ready and connection.end is None and time.monotonic() < until:
            try:
                connection.step(wake, _STEP_S)
            except Exception as error:  # noqa: BLE001
                connection.fail(error)
        if connection.end is not None:
            return BrokerTest(connection.end, connection.refused)
        if not connection.ready:
            return BrokerTest(f"takes connections and does not answer within {TIMEOUT_S:g} s")
    return BrokerTest()


class RetainedState:
    """Keeps one retained topic at the newest payload; no caller waits for the broker, or fails.

    A broker that cannot be reached is tried again until `close`; only the newest payload is kept
    for it.

    Args:
        client_id: other than a connected publisher's.
    """

    def __init__(self, mqtt: Mqtt, client_id: str, topic: str) -> None:
        self._topic = topic
        self._payload = b""
        self._sent: paho.MQTTMessageInfo | None = None
        self._client = client = paho.Client(
            CallbackAPIVersion.VERSION2, client_id=client_id, protocol=paho.MQTTv5
        )
        client.on_connect = lambda *_: self._send()
        try:
            log_in(client, mqtt)
            client.connect_async(mqtt.host, mqtt.port, keepalive=_KEEPALIVE_S)
        except (OSError, ValueError) as error:
            log.warning("mqtt: %s is not told: %s", address_of(mqtt), error)
            return
        client.loop_start()

    def publish(self, payload: bytes) -> None:
        self._payload = payload
        if self._client.is_connected():
            self._send()

    def close(self) -> None:
        """Wait up to `_FAREWELL_S` for the newest payload to arrive, and disconnect."""
        until = time.monotonic() + _FAREWELL_S
        while not (self._sent and self._sent.is_published()) and time.monotonic() < until:
            time.sleep(_STEP_S / 10)
        # paho's thread ends with the process; a join would wait for a connect that hangs.
        self._client.disconnect()

    def _send(self) -> None:
        if self._payload:
            self._sent = self._client.publish(self._topic, self._payload, qos=1, retain=True)


def read_retained(mqtt: Mqtt, filters: Sequence[str], quiet_s: float) -> dict[str, bytes]:
    """Return the retained messages of these filters, by topic: all that came until none came for
    `quiet_s`.

    Raises: Unavailable: the broker cannot be reached, or refuses the client or a filter.
    """
    found: dict[str, bytes] = {}
    heard_s = time.monotonic()
    refusals: list[str] = []

    def take(_client: object, _data: object, message: paho.MQTTMessage) -> None:
        nonlocal heard_s
        if message.retain:
            found[message.topic] = bytes(message.payload)
            heard_s = time.monotonic()

    def note(_client: object, _data: object, _mid: int, codes: list[Any], _more: object) -> None:
        nonlocal heard_s
        heard_s = time.monotonic()
        refusals.extend(str(code) for code in codes if code.is_failure)

    def connected(
        client: paho.Client, _data: object, _flags: object, code: Any, _p: object
    ) -> None:
        if code.is_failure:
            refusals.append(str(code))
        else:
            client.subscribe([(each, 0) for each in filters])

    # Brokers of clusters that speak no MQTT 5 are read, too.
    client = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv311)
    client.on_message, client.on_subscribe, client.on_connect = take, note, connected
    try:
        log_in(client, mqtt)
        client.connect(mqtt.host, mqtt.port, keepalive=_KEEPALIVE_S)
        heard_s = time.monotonic() + TIMEOUT_S  # until the broker has answered
        code = paho.MQTT_ERR_SUCCESS
        while code == paho.MQTT_ERR_SUCCESS and time.monotonic() < heard_s + quiet_s:
            code = client.loop(_STEP_S)
    except (OSError, ValueError) as error:
        raise Unavailable(f"MQTT broker {address_of(mqtt)}: {reason_of(error)}") from error
    client.disconnect()
    if refusals or code != paho.MQTT_ERR_SUCCESS:
        why = ", ".join(refusals) or paho.error_string(code)
        raise Unavailable(f"MQTT broker {address_of(mqtt)}: {why}")
    return found
