"""The AsyncAPI document: current, complete, and every reference in it leads somewhere."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import asyncapi
import msgspec
import numpy as np
import pytest

from edge_server.board.board import Identity
from edge_server.board.update import UpdateRecord
from edge_server.cameras.calibration import Calibration
from edge_server.lanes.agreement import LaneAgreement
from edge_server.lanes.camera_model import CameraModel, Lens, Mounting
from edge_server.mqtt import payloads
from edge_server.mqtt.payloads import Topics
from edge_server.pipeline import messages
from edge_server.pipeline.event_log import Event
from edge_server.pipeline.perception import Detections, NetworkFrame
from edge_server.repository.channel import ChannelReport

if TYPE_CHECKING:
    from collections.abc import Iterator

CALIBRATION = Calibration(
    "ab12cd34ef56",
    CameraModel(Lens("pinhole", 1280, 720, 900, 900, 640, 360, (0,) * 5), Mounting(1.4, 0.02)),
)
DOCUMENT: Any = asyncapi.document()
ADDRESSES = {each["address"] for each in DOCUMENT["channels"].values()}


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def test_the_published_document_is_current() -> None:
    assert json.loads(asyncapi.FILE.read_text()) == DOCUMENT


def test_every_reference_leads_somewhere() -> None:
    found = list(references(DOCUMENT))
    assert len(found) > 50
    for reference in found:
        value = DOCUMENT
        for key in reference.removeprefix("#/").split("/"):
            value = value[key]


def test_every_topic_is_in_it() -> None:
    topics = Topics("0device")
    named = {name: each for name, each in vars(Topics).items() if not name.startswith("_")}
    # `provision` is read, not sent; `states` are filters, and `is_state` looks for their topics.
    for name in named.keys() - {"provision", "states", "is_state", "device"}:
        if isinstance(named[name], property):
            address = getattr(topics, name)
        elif name == "event":
            address = topics.event("lane_departure", "0camera")
        elif name in ("network", "verdict"):
            address = getattr(topics, name)("0camera", "0network")
        elif name == "channel":
            address = topics.channel("0channel")
        else:
            address = getattr(topics, name)("0model" if name.startswith("model") else "0camera")
        for word in ("device", "camera", "model", "network", "channel"):
            address = address.replace(f"0{word}", f"{{{word}}}")
        assert address in ADDRESSES, name
    assert "edge/v1/{device}/events/model" in ADDRESSES


IDENTITY = Identity("truck-7", "0.1.0", "boot", "client")
BOXES = Detections(
    np.array([[1.0, 2.0, 3.0, 4.0]]),
    np.array([0]),
    np.array([0.9]),
    ("car",),
    ground=np.array([[20.0, 1.0]]),
    covariance=np.eye(2)[None],
)
OBJECTS = NetworkFrame(
    "front", 1, 0, 0, 0, 1280, 720, "net", network="signs", task="detection", result=BOXES
)
EVENT = Event("model", "instant", "ready", "", 1, 2, id=3, model="lanes")


@pytest.mark.parametrize(
    ("name", "payload"),
    [
        ("Status", payloads.status(IDENTITY, "online", no_lanes=["front"], restart_needed=["x"])),
        ("Status", payloads.status(IDENTITY, "offline")),
        ("Meta", payloads.meta(IDENTITY, "abc", "json", {"front": "ab12"}, {"lanes": [1]})),
        ("Update", payloads.update(IDENTITY, UpdateRecord())),
        ("Acknowledged", payloads.acknowledged("0123456789abcdef", 7)),
        ("ModelState", payloads.model_state("lanes", "READY", "")),
        ("CameraStatus", payloads.camera_status("ok", None)),
        ("CameraStatus", payloads.camera_status("ok", None, lanes_fail=None)),
        ("CameraStatus", payloads.camera_status("ok", None, networks={"signs": "late: 1 s"})),
        ("Verdict", payloads.verdict("new", "candidate", "lanes", LaneAgreement().verdict())),
        ("Channel", msgspec.json.encode(ChannelReport("lanes"))),
        ("NetworkFrame", messages.frame_payload(OBJECTS, IDENTITY, 0, 0)),
        ("Calibration", payloads.calibration(CALIBRATION)),
        ("Event", payloads.event(EVENT, IDENTITY)),
    ],
)
def test_what_is_sent_has_the_fields_of_its_schema(name: str, payload: bytes) -> None:
    schema = DOCUMENT["components"]["schemas"][name]
    sent = json.loads(payload)
    assert set(schema["required"]) <= sent.keys() <= schema["properties"].keys()
    for key, value in sent.items():
        assert value in schema["properties"][key].get("enum", [value])


def test_an_operation_has_the_messages_of_its_channel() -> None:
    for name, operation in DOCUMENT["operations"].items():
        channel = operation["channel"]["$ref"]
        for message in operation["messages"]:
            assert message["$ref"].startswith(f"{channel}/messages/")
        # Others publish the vehicle's state alone; the rest is the device's.
        assert operation["action"] == ("receive" if name == "receive_vehicle" else "send")


def test_every_parameter_of_an_address_is_described() -> None:
    for channel in DOCUMENT["channels"].values():
        wanted = {part[1:-1] for part in channel["address"].split("/") if part.startswith("{")}
        assert channel["parameters"].keys() == wanted
        assert "0" not in channel["address"]
