"""Home Assistant finds the device: the payload of its MQTT device discovery, off by default."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edge_server.board.board import Identity
from edge_server.errors import SettingsError
from edge_server.mqtt.payloads import Topics
from edge_server.mqtt.publisher import Publisher
from edge_server.settings import Mqtt

IDENTITY = Identity("truck-7", "0.1.0", "boot", "client")
TOPIC = "homeassistant/device/edge_server_truck-7/config"
TOPICS = Topics("truck-7")


def states(publisher: Publisher) -> dict[str, bytes]:
    return dict(iter(publisher._outbox.take_state, None))


def found(mqtt: Mqtt, *cameras: str) -> dict[str, bytes]:
    publisher = Publisher(mqtt, IDENTITY)
    for camera in cameras:
        publisher.publish_calibration(camera, None)
    publisher.stop()
    return states(publisher)


def test_nothing_is_announced_unless_it_is_wanted() -> None:
    assert not [topic for topic in found(Mqtt("127.0.0.1"), "front") if "config" in topic]


def test_the_payload_is_that_of_device_discovery() -> None:
    sent = found(Mqtt("127.0.0.1", home_assistant="homeassistant"), "front", "rear")
    payload: Any = json.loads(sent[TOPIC])
    # Device and origin are required; each component needs a platform and a unique id.
    assert payload["dev"]["ids"] == ["edge_server_truck-7"]
    assert payload["o"]["name"] == "edge_server"
    components = payload["cmps"]
    assert len(components) == 6
    assert {each["p"] for each in components.values()} == {"sensor", "binary_sensor"}
    assert len({each["unique_id"] for each in components.values()}) == 6
    assert components["front_lane_departure"]["state_topic"] == TOPICS.event(
        "lane_departure", "front"
    )
    assert components["rear_state"]["state_topic"] == TOPICS.camera_status("rear")
    assert components["rear_lateral_offset"]["state_topic"] == TOPICS.lanes("rear")
    assert payload["availability_topic"] == TOPICS.status


def test_a_camera_without_lanes_has_no_entities_of_lanes() -> None:
    publisher = Publisher(Mqtt("127.0.0.1", home_assistant="homeassistant"), IDENTITY)
    publisher.publish_calibration("rear", None, lanes=False)
    assert list(json.loads(states(publisher)[TOPIC])["cmps"]) == ["rear_state"]
    publisher.publish_calibration("rear", None)
    assert len(json.loads(states(publisher)[TOPIC])["cmps"]) == 3
    publisher.stop()


def test_a_camera_that_is_removed_is_taken_out_and_another_prefix_replaces_the_first() -> None:
    mqtt = Mqtt("127.0.0.1", home_assistant="homeassistant")
    publisher = Publisher(mqtt, IDENTITY)
    publisher.publish_calibration("front", None)
    publisher.publish_calibration("rear", None)
    publisher.clear_camera("rear")
    sent = states(publisher)
    assert len(json.loads(sent[TOPIC])["cmps"]) == 3
    publisher._link.mqtt = Mqtt("127.0.0.1", home_assistant="other")
    publisher._introduce()
    sent = states(publisher)
    assert sent[TOPIC] == b""
    assert sent["other/device/edge_server_truck-7/config"]
    publisher.clear_camera("front")
    assert states(publisher)["other/device/edge_server_truck-7/config"] == b""
    publisher.stop()


def test_it_reads_no_protobuf() -> None:
    with pytest.raises((SettingsError, ValueError), match='home_assistant needs payload = "json"'):
        Mqtt("127.0.0.1", home_assistant="homeassistant", payload="protobuf")
