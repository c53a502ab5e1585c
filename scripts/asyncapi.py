"""docs/asyncapi.json: every topic of a device as AsyncAPI 3, made from `Topics` and the protos."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple, get_args

from lane_frame_schema import definitions

from edge_server.lanes import e2e
from edge_server.lanes.agreement import Outcome
from edge_server.lanes.types import LONGEST_AGE_S
from edge_server.mqtt.payloads import CameraState, DeviceState, Topics, content_type
from edge_server.proto.edge.lanes.v1 import (
    events_pb2,
    health_pb2,
    lane_service_pb2,
    lanes_pb2,
)
from edge_server.proto.edge.perception.v1 import perception_pb2
from edge_server.settings.sections import EventKind

FILE = Path(__file__).parents[1] / "docs/asyncapi.json"

# Names that no topic has otherwise; they become the parameters of the addresses.
DEVICE, CAMERA, MODEL, NETWORK = "0device", "0camera", "0model", "0network"
CHANNEL = "0channel"
_PARAMETERS = {
    "device": "[device] id of the settings, else the host's name.",
    "camera": "Name of the table [cameras.NAME] of the settings.",
    "model": "Name of the model in the repository.",
    "network": "Name of the table [cameras.NAME.networks.NETWORK] of the settings.",
    "channel": "Name of the table [repository.channels.NAME] of the settings.",
}


class Row(NamedTuple):
    """A topic.

    Attributes:
        channel: its id in the document.
        address: the topic of `DEVICE`, `CAMERA`, `MODEL` and `NETWORK`.
        message: the name of its schema.
        summary: when it is published.
        kind: state (retained, QoS 1), live (QoS 0), event (QoS 1, not retained), or input (QoS 0,
            not retained, published by others).
    """

    channel: str
    address: str
    message: str
    summary: str
    kind: str = "state"


def rows() -> list[Row]:
    """Return the topics that a device publishes, and that it reads."""
    topics = Topics(DEVICE)
    of_cameras = ("lane_departure", "lane_change", "camera", "degraded")
    events = [
        Row(
            f"{kind}_events" if not camera else f"camera_{kind}_events",
            topics.event(kind, camera),
            "Event",
            f"When {kind} begins and ends; at least once, in order.",
            "event",
        )
        for camera, kinds in ((CAMERA, of_cameras), ("", ("model", "degraded")))
        for kind in kinds
    ]
    assert {row.address.rpartition("/")[2] for row in events} == set(get_args(EventKind))
    return [
        Row("status", topics.status, "Status", "When it changes; offline is also the last will."),
        Row("meta", topics.meta, "Meta", "The birth message; when a part of it changes."),
        Row("health", topics.health, "DeviceHealth", "Every 10 s, and when its reasons change."),
        Row("update", topics.update, "Update", "What became of the last update."),
        Row("plans", topics.plans, "Plans", "How far the builds of TensorRT plans are."),
        Row("acknowledged", topics.acknowledged, "Acknowledged", "At most twice a second."),
        Row("model_state", topics.model_state(MODEL), "ModelState", "When it changes."),
        Row("channel", topics.channel(CHANNEL), "Channel", "When its state or index changes."),
        Row("camera_status", topics.camera_status(CAMERA), "CameraStatus", "When it changes."),
        Row("calibration", topics.calibration(CAMERA), "Calibration", "Once for each camera."),
        Row("lanes", topics.lanes(CAMERA), "LaneFrame", "Every frame; the newest wins.", "live"),
        Row(
            "network",
            topics.network(CAMERA, NETWORK),
            "NetworkFrame",
            "Every frame that the network takes; the newest wins.",
            "live",
        ),
        Row(
            "verdict",
            topics.verdict(CAMERA, NETWORK),
            "Verdict",
            "Of a candidate for the lanes, while frames are compared.",
        ),
        *events,
        Row(
            "vehicle",
            topics.vehicle,
            "SetVehicleStateRequest",
            "Ten times a second, by the vehicle, where mqtt.vehicle_state is on.",
            "input",
        ),
    ]


def _object(description: str, optional: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "description": description,
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
    }


_TEXT = {"type": "string"}
_NUMBER = {"type": "number"}
_TEXTS = {"type": "array", "items": _TEXT}

# What is no message of the protos.
_STATES: dict[str, dict[str, Any]] = {
    "Status": _object(
        "Whether the device serves.",
        ("no_lanes", "restart_needed", "not_reloaded"),
        state={"type": "string", "enum": list(get_args(DeviceState))},
        version=_TEXT,
        no_lanes={**_TEXTS, "description": "Cameras without lanes at present."},
        restart_needed={**_TEXTS, "description": "Settings that wait for a restart."},
        not_reloaded={**_TEXT, "description": "Why the last reload changed nothing."},
    ),
    "Meta": _object(
        "What a reader needs to know before the first lanes.",
        device=_TEXT,
        version=_TEXT,
        boot_id=_TEXT,
        client_id=_TEXT,
        session=_TEXT,
        schemas=_TEXTS,
        payload={"type": "string", "enum": ["json", "protobuf"]},
        cameras={"type": "array", "items": _object("A camera.", name=_TEXT, calib_id=_TEXT)},
        models={"type": "array", "items": _object("A model.", name=_TEXT, versions=_TEXTS)},
    ),
    "Update": _object(
        "The version that runs, and what became of the last update.",
        version=_TEXT,
        slot=_TEXT,
        state={"enum": ["none", "pending", "committed", "rolled_back", "failed", "cancelled"]},
        target=_TEXT,
        result=_TEXT,
        engine=_TEXT,
        since=_TEXT,
    ),
    "Plans": _object("The progress of the builds.", state=_TEXT, model=_TEXT, text=_TEXT),
    "Acknowledged": _object(
        "The newest event that the broker has acknowledged: what the device needs to know of a "
        "broker that comes back.",
        event={"type": "string", "pattern": "^[0-9]{1,15}$"},
        log={**_TEXT, "description": "The identity of the event's log."},
    ),
    "ModelState": _object(
        "Whether a model serves.",
        ("configuration",),
        model=_TEXT,
        state={"enum": ["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]},
        reason=_TEXT,
        configuration={
            **_TEXT,
            "description": "The configuration that serves, its devices, and why it is not another.",
        },
    ),
    "Channel": _object(
        "What a channel of a registry says, and what became of its model on this device.",
        channel=_TEXT,
        source=_TEXT,
        state={
            "enum": [
                *("none", "not_in_share", "waiting", "ended", "due", "loading", "on_trial"),
                *("good", "waits", "refused", "rolled_back", "replaced"),
            ]
        },
        reason=_TEXT,
        fault={
            **_TEXT,
            "description": "Why the channel is unreachable, refused or failed, behind that word.",
        },
        serial={"type": "integer", "minimum": 0},
        model=_TEXT,
        content={**_TEXT, "description": "The digest of the model that the channel names."},
        share={**_NUMBER, "description": "Of the vehicles, in percent."},
        serves={**_TEXT, "description": "The digest of the model that serves."},
        since={
            "type": ["string", "null"],
            "description": "When the channel last placed a model; null for never.",
        },
    ),
    "Verdict": _object(
        "How the lanes of a candidate agree with those served.",
        network=_TEXT,
        model=_TEXT,
        served=_TEXT,
        outcome={"type": "string", "enum": list(get_args(Outcome))},
        text=_TEXT,
        frames={"type": "integer", "minimum": 0},
        measures={
            "type": "array",
            "items": _object(
                "A measure with the interval in which it is, to 99 %, and what may be.",
                name=_TEXT,
                value=_NUMBER,
                low=_NUMBER,
                high=_NUMBER,
                limit=_NUMBER,
            ),
        },
        lateral_m={
            "description": "The mean distance of matched lines, m, by the range in m.",
            "type": "object",
            "additionalProperties": _NUMBER,
        },
    ),
    "CameraStatus": _object(
        "Whether a camera delivers, and, where it has a lane model, whether its frames get lanes.",
        ("lanes", "networks"),
        state={"type": "string", "enum": list(get_args(CameraState))},
        last_frame_age_ms={"type": ["integer", "null"], "minimum": 0},
        lanes={"type": "string", "enum": ["ok", "failing"]},
        reason=_TEXT,
        text=_TEXT,
        since=_TEXT,
        networks={
            "description": "Whether frames get results of each other network, by its name.",
            "type": "object",
            "additionalProperties": _object(
                "A network.", state={"type": "string", "enum": ["ok", "failing"]}, text=_TEXT
            ),
        },
    ),
}


def document() -> dict[str, Any]:
    """Return the AsyncAPI document."""
    table = rows()
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "edge_server on MQTT",
            "version": "1",
            "description": (
                "What a lane-detection device publishes, and the state of its vehicle, which it "
                "receives. The protos in edge_server/proto are the "
                "source of truth; JSON is their proto3 mapping. Readers ignore fields that they do "
                "not know; a removal makes a new prefix. Lanes and events have the user property "
                f"{e2e.PROPERTY}, a counter and a CRC: see edge_server/lanes/e2e.py."
            ),
        },
        "defaultContentType": "application/json",
        "servers": {
            "broker": {
                "host": "localhost:1883",
                "protocol": "mqtt",
                "protocolVersion": "5.0",
                "description": "[mqtt] host and port of the settings; mqtts with ca_file.",
            }
        },
        "channels": {row.channel: _channel(row) for row in table},
        "operations": {f"{_action(row)}_{row.channel}": _operation(row) for row in table},
        "components": {
            "messages": {row.channel: _message(row) for row in table},
            "schemas": _schemas(),
        },
    }


def _channel(row: Row) -> dict[str, Any]:
    address = row.address
    parameters = {}
    for name, stand_in in zip(_PARAMETERS, (DEVICE, CAMERA, MODEL, NETWORK, CHANNEL), strict=True):
        if stand_in in address:
            address = address.replace(stand_in, f"{{{name}}}")
            parameters[name] = {"description": _PARAMETERS[name]}
    return {
        "address": address,
        "parameters": parameters,
        "messages": {row.channel: {"$ref": f"#/components/messages/{row.channel}"}},
    }


def _action(row: Row) -> str:
    return "receive" if row.kind == "input" else "send"


def _operation(row: Row) -> dict[str, Any]:
    expiry = {"messageExpiryInterval": LONGEST_AGE_S} if row.kind == "live" else {}
    return {
        "action": _action(row),
        "summary": row.summary,
        "channel": {"$ref": f"#/channels/{row.channel}"},
        "messages": [{"$ref": f"#/channels/{row.channel}/messages/{row.channel}"}],
        "bindings": {
            "mqtt": {
                "qos": int(row.kind in {"state", "event"}),
                "retain": row.kind == "state",
                **expiry,
            }
        },
    }


def _message(row: Row) -> dict[str, Any]:
    protected = {}
    description = f"{row.message} of the schemas."
    if row.kind != "state":
        other = content_type("protobuf", row.message)
        description = f'With payload = "protobuf" of [mqtt], content type {other}.'
    if row.kind in {"live", "event"}:
        pattern = {"type": "string", "pattern": e2e.PATTERN}
        protected = {"headers": _object("User properties.", (), **{e2e.PROPERTY: pattern})}
    if row.kind == "event":
        protected["correlationId"] = {
            "description": "MQTT's correlation data: the id of the event that began it.",
            "location": "$message.payload#/begin_id",
        }
    return {
        "name": row.message,
        "title": row.summary,
        "description": description,
        "contentType": content_type("json", row.message),
        **protected,
        "payload": {"$ref": f"#/components/schemas/{row.message}"},
        "bindings": {"mqtt": {"payloadFormatIndicator": 1, "bindingVersion": "0.2.0"}},
    }


def _schemas() -> dict[str, Any]:
    made: dict[str, Any] = {}
    for message in (
        lanes_pb2.LaneFrame,
        perception_pb2.NetworkFrame,
        events_pb2.Event,
        health_pb2.DeviceHealth,
        lane_service_pb2.Calibration,
        lane_service_pb2.SetVehicleStateRequest,
    ):
        made |= definitions(message)
    text = json.dumps(made).replace("#/$defs/", "#/components/schemas/")
    return {**json.loads(text), **_STATES}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="1 where the committed one differs")
    check = parser.parse_args().check
    text = json.dumps(document(), indent=1) + "\n"
    if not check:
        FILE.write_text(text)
    elif FILE.read_text() != text:
        print(f"{FILE} is not current; run scripts/asyncapi.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
