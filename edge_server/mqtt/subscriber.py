"""LaneSubscriber: receives a device's lane messages as a vehicle would, for the demo."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from edge_server.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

_ASIDE_S = 5


class LaneSubscriber:
    """Passes every lane message of `device` to `on_payload`, on a thread of paho's own.

    Args:
        on_payload: receives the JSON bytes; must return at once.

    Raises:
        Unavailable: the broker cannot be reached.
    """

    def __init__(
        self, host: str, port: int, device: str, on_payload: Callable[[bytes], None]
    ) -> None:
        self._topic = f"edge/v1/{device}/cameras/+/lanes"
        self._on_payload = on_payload
        self._client = mqtt.Client(
            CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5, reconnect_on_failure=True
        )
        self._client.on_connect = self._subscribe
        self._client.on_message = self._receive
        try:
            self._client.connect(host, port, keepalive=_ASIDE_S)
        except (OSError, ValueError) as error:  # the resolver raises ValueErrors, too
            reason = getattr(error, "strerror", None) or error
            raise Unavailable(
                f"MQTT broker {host}:{port} cannot be reached: {reason}; start one there, or "
                "leave --mqtt out"
            ) from error
        self._client.loop_start()

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def _subscribe(self, client: mqtt.Client, *_: Any) -> None:
        client.subscribe(self._topic, qos=0)

    def _receive(self, client: mqtt.Client, userdata: Any, message: mqtt.MQTTMessage) -> None:
        del client, userdata
        self._on_payload(bytes(message.payload))
