"""Lanes over MQTT, each message checked by its envelope."""

from __future__ import annotations

import contextlib
import queue
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import paho.mqtt.client as mqtt
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from paho.mqtt.enums import CallbackAPIVersion

from edge_lanes.e2e import PROPERTY, Checker
from edge_lanes.reading import SILENT_AFTER_S, Reading, reading_of, readings
from edge_lanes.v1 import lanes_pb2

if TYPE_CHECKING:
    from collections.abc import Generator

    from paho.mqtt.reasoncodes import ReasonCode

_PROTOBUF = "application/x-protobuf"


class _Message(NamedTuple):
    payload: bytes
    content_type: str


def _frame_of(message: _Message) -> lanes_pb2.LaneFrame | None:
    """Return the frame of a message; None where it is none, which another publisher may send."""
    frame = lanes_pb2.LaneFrame()
    try:
        if message.content_type.startswith(_PROTOBUF):
            frame.ParseFromString(message.payload)
        else:
            json_format.Parse(message.payload, frame, ignore_unknown_fields=True)
    except (DecodeError, json_format.ParseError, ValueError, RecursionError):
        return None
    return frame


class LaneSubscription:
    """The newest lanes of one camera, as `Reading`s; it connects again by itself.

    A message that was changed, repeated, delayed or overtaken, or is no frame, is dropped, and
    counted in `lost` of the next reading.

    Args:
        host, port: of the broker.
        device, camera: as in the topic.
        silent_after_s: a reading with State.SILENT comes after so long without another.
        client: with TLS, user name and password as the broker wants them, made with
            `CallbackAPIVersion.VERSION2` and `MQTTv5`; one in plain text by default. It is of this
            subscription alone.
    """

    def __init__(
        self,
        host: str,
        device: str,
        camera: str,
        *,
        port: int = 1883,
        silent_after_s: float = SILENT_AFTER_S,
        client: mqtt.Client | None = None,
    ) -> None:
        self._topic = f"edge/v1/{device}/cameras/{camera}/lanes"
        self._address = host, port
        self._silent_after_s = silent_after_s
        self._checker = Checker(self._topic)
        self._error = ""
        # The newest message alone.
        self._arrived: queue.Queue[_Message] = queue.Queue(maxsize=1)
        self._last: lanes_pb2.LaneFrame | None = None
        self._client = client or mqtt.Client(CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
        self._client.reconnect_delay_set(1, 5)

    def __iter__(self) -> Generator[Reading]:
        client = self._client
        client.on_connect = self._on_connect
        client.on_connect_fail = self._on_connect_fail
        client.on_disconnect = self._on_disconnect
        client.on_message = self._on_message
        client.connect_async(*self._address)
        client.loop_start()
        try:
            yield from readings(self._next, lambda: self._error, self._silent_after_s)
        finally:
            client.disconnect()
            client.loop_stop()
            # Without a cycle of references its sockets are closed with this subscription.
            client.on_connect = client.on_connect_fail = None
            client.on_disconnect = client.on_message = None

    def _next(self, timeout_s: float) -> Reading:
        until_s = time.monotonic() + timeout_s
        while (frame := _frame_of(self._arrived.get(timeout=timeout_s))) is None:
            timeout_s = max(0.0, until_s - time.monotonic())
        last, self._last = self._last, frame
        # A restart of the daemon counts from the beginning.
        lost = frame.seq - last.seq - 1 if last is not None and last.seq < frame.seq else 0
        return reading_of(frame, lost)

    def _on_connect(
        self, client: mqtt.Client, _data: Any, _flags: Any, reason: ReasonCode, _properties: Any
    ) -> None:
        self._error = str(reason) if reason.is_failure else ""
        client.subscribe(self._topic)

    def _on_connect_fail(self, _client: mqtt.Client, _data: Any) -> None:
        host, port = self._address
        self._error = f"{host}:{port} cannot be reached"

    def _on_disconnect(
        self, _client: mqtt.Client, _data: Any, _flags: Any, reason: ReasonCode, _properties: Any
    ) -> None:
        self._error = str(reason)

    def _on_message(self, _client: mqtt.Client, _data: Any, message: mqtt.MQTTMessage) -> None:
        properties = message.properties
        envelope = dict(getattr(properties, "UserProperty", [])).get(PROPERTY)
        payload = bytes(message.payload)
        if not self._checker.check(payload, envelope, time.monotonic()).usable:
            return
        arrived = _Message(payload, getattr(properties, "ContentType", ""))
        # This thread alone puts, so there is room once the older one is out.
        with contextlib.suppress(queue.Empty):
            self._arrived.get_nowait()
        self._arrived.put_nowait(arrived)
