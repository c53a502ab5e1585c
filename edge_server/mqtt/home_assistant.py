"""What Home Assistant's MQTT discovery reads: one device with entities for each camera.

The payload is that of its "device discovery": `dev`, `o` (origin) and `cmps` (components), each
component a platform `p` with templates for our JSON.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edge_server.board.identity import Identity
    from edge_server.mqtt.topics import Topics

_STATES = ("ok", "degraded", "stalled", "frozen", "lost")
# "None" is its word for "not known"; the key is absent where the offset cannot be measured.
_OFFSET = "{{ (value_json.get('ego') or {}).get('lateral_offset_m') }}"
_DEPARTURE = "{{ 'OFF' if value_json.phase == 'EVENT_PHASE_END' else 'ON' }}"


def topic(prefix: str, identity: Identity) -> str:
    """Return the topic of the device's discovery; retained."""
    return f"{prefix}/device/edge_server_{identity.device}/config"


def discovery(identity: Identity, topics: Topics, cameras: Iterable[str]) -> bytes:
    """Return the entities of every camera: departure warning, state, and lateral offset."""
    components: dict[str, Any] = {}
    for camera in sorted(cameras):
        unique = f"edge_server_{identity.device}_{camera}"
        components[f"{camera}_lane_departure"] = {
            "p": "binary_sensor",
            "unique_id": f"{unique}_lane_departure",
            "name": f"{camera} lane departure",
            "device_class": "safety",
            "state_topic": topics.event("lane_departure", camera),
            "value_template": _DEPARTURE,
        }
        components[f"{camera}_state"] = {
            "p": "sensor",
            "unique_id": f"{unique}_state",
            "name": f"{camera} camera",
            "device_class": "enum",
            "options": _STATES,
            "entity_category": "diagnostic",
            "state_topic": topics.camera_status(camera),
            "value_template": "{{ value_json.state }}",
        }
        components[f"{camera}_lateral_offset"] = {
            "p": "sensor",
            "unique_id": f"{unique}_lateral_offset",
            "name": f"{camera} lateral offset",
            "device_class": "distance",
            "state_class": "measurement",
            "unit_of_measurement": "m",
            "state_topic": topics.lanes(camera),
            "value_template": _OFFSET,
            "expire_after": 2,
        }
    return msgspec.json.encode(
        {
            "dev": {
                "ids": [f"edge_server_{identity.device}"],
                "name": identity.device,
                "sw": identity.version,
            },
            "o": {"name": "edge_server", "sw": identity.version},
            "availability_topic": topics.status,
            "availability_template": "{{ value_json.state }}",
            "cmps": components,
            "qos": 1,
        }
    )
