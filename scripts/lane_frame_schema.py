"""The JSON Schemas of messages on MQTT, made from `lanes.proto`, `health.proto` and
`perception.proto`.

A message is the proto3 JSON mapping with every field present that is not optional; what the types
of the proto cannot express stands in the tables here.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import FieldDescriptor as Field

from edge_server.mqtt.payloads import HEALTH_SCHEMA
from edge_server.pipeline.messages import EVENT_SCHEMA, LANES_SCHEMA, PERCEPTION_SCHEMA
from edge_server.proto.edge.lanes.v1 import health_pb2, lanes_pb2
from edge_server.proto.edge.perception.v1 import perception_pb2

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message

_PACKAGES = {each.DESCRIPTOR.package for each in (lanes_pb2, perception_pb2)}
_UINT32 = {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**32}
# A double holds only 53 bits of a 64-bit integer.
_INT64 = {"type": "string", "pattern": r"^-?[0-9]{1,19}$"}
_TYPES: dict[int, dict[str, Any]] = {
    Field.TYPE_STRING: {"type": "string"},
    Field.TYPE_UINT32: _UINT32,
    Field.TYPE_INT64: _INT64,
    Field.TYPE_UINT64: {"type": "string", "pattern": r"^[0-9]{1,20}$"},
    Field.TYPE_SINT32: {"type": "integer", "minimum": -(2**31), "exclusiveMaximum": 2**31},
    Field.TYPE_BOOL: {"type": "boolean"},
    Field.TYPE_FLOAT: {"type": "number"},
    Field.TYPE_DOUBLE: {"type": "number"},
}
_TIMESTAMP = {"type": "string", "pattern": r"^[0-9-]{10}T[0-9:]{8}\.[0-9]{6}Z$"}
_DESCRIPTIONS = {
    "LaneFrame": "The lanes of one camera frame; readers ignore fields that they do not know.",
    "Reason": "A code for programs, and the same for people.",
    "UsedVehicleState": "What the vehicle said of itself, as this frame's tracking used it.",
    "FrameTime": "When the frame was captured, and how old it was when the message was made.",
    "CaptureClock": "How the time of the capture is known.",
    "StageLatency": "Where the time of the frame went, in microseconds; the whole is time.age_us.",
    "ImageSize": "Of the original frame, in pixels.",
    "ModelVersion": "The model that answered.",
    "Lane": "One lane boundary.",
    "ImagePoints": (
        "x[i] belongs to y[i]: px of the original frame, origin top left, bottom of image first."
    ),
    "GroundLane": "The boundary on the flat road; ISO 8855: x forward, y to the left, m.",
    "GroundPoints": "x[i] belongs to y[i]: metres, the nearest first.",
    "Polynomial": "y(x) = c0 + c1 x + c2 x^2 + c3 x^3 in metres, for x_min_m <= x <= x_max_m.",
    "Ego": "The vehicle in its lane; a field is absent where it cannot be measured.",
    "Departure": "Whether the vehicle leaves its lane, and whether that is warned of.",
    "LineDistance": "How far the vehicle is from one boundary of its lane.",
    "SetVehicleStateRequest": (
        "What the vehicle measures, ISO 8855; used while it is at most 0.5 s old. mono_ns is "
        "CLOCK_MONOTONIC of the device, 0 is the arrival."
    ),
    "DeviceHealth": "The health of the device's hardware; what is not known is absent.",
    "HealthTime": "When the message was made, and how far its wall clock can be believed.",
    "HealthEngine": "A CPU cluster, the GPU or an NVDLA core.",
    "HealthTemperature": "One thermal zone.",
    "HealthRail": "The power of one monitored rail.",
    "HealthMemory": "CPU and GPU of a Jetson share it.",
    "HealthStorage": "One drive.",
    "HealthCounter": "Throttlings by the supply since boot.",
    "Event": "A change of state; at least once, so readers drop ids that they have seen.",
    "Calibration": "How the camera sees and where it is mounted.",
    "NetworkFrame": "What one network found in one camera frame, by its contract.",
    "Box": "A rectangle in px of the whole picture, origin top left.",
    "Detection": "One object.",
    "RoadPoint": "On the flat road, ISO 8855, m; covariance is xx, xy, yy.",
    "Segmentation": "Row by row, run_lengths[i] cells have the class run_classes[i].",
    "Outline": "x[i] belongs to y[i]: px of the whole picture.",
    "ClassScore": "One class.",
    "TensorShape": "A tensor of the response; its numbers are not sent.",
    "HealthDisk": "The free space of a directory that the daemon writes to.",
}
# Messages that are absent where there is nothing to say.
_OPTIONAL = {
    "LaneFrame.ego",
    "LaneFrame.vehicle",
    "Lane.ground",
    "Ego.departure",
    "Ego.left",
    "Ego.right",
    "UsedVehicleState.indicator",
    *(
        f"NetworkFrame.{name}"
        for name in ("detections", "segmentation", "classes", "tensors", "lanes")
    ),
    "Detection.ground",
} | {
    # What is absent in a message to the device has its default.
    f"SetVehicleStateRequest.{name}"
    for name in ("indicator", "mono_ns")
}
_NARROWER: dict[str, dict[str, Any]] = {
    "NetworkFrame.schema": {"enum": [PERCEPTION_SCHEMA]},
    "Detection.confidence": {"type": "number", "minimum": 0, "maximum": 1},
    "RoadPoint.covariance": {"minItems": 3, "maxItems": 3},
    "LaneFrame.schema": {"enum": [LANES_SCHEMA]},
    "DeviceHealth.schema": {"enum": [HEALTH_SCHEMA]},
    "Event.schema": {"enum": [EVENT_SCHEMA]},
    "Lane.confidence": {"type": "number", "minimum": 0, "maximum": 1},
    "ImagePoints.x": {"minItems": 2},
    "ImagePoints.y": {"minItems": 2},
    "Polynomial.covariance": {"minItems": 10},
}


def lane_frame_schema() -> dict[str, Any]:
    """Return the schema of the lane message."""
    return _schema(lanes_pb2.LaneFrame)


def network_frame_schema() -> dict[str, Any]:
    """Return the schema of the message of a network."""
    return _schema(perception_pb2.NetworkFrame)


def health_schema() -> dict[str, Any]:
    """Return the schema of the health message."""
    return _schema(health_pb2.DeviceHealth)


def _schema(message: type[Message]) -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$ref": f"#/$defs/{message.DESCRIPTOR.name}",
        "$defs": definitions(message),
    }


def definitions(message: type[Message]) -> dict[str, Any]:
    """Return the schemas of a message and of those in it, which refer to `#/$defs/`."""
    found: dict[str, Any] = {}
    _gather(message.DESCRIPTOR, found)
    return {name: _message(descriptor) for name, descriptor in found.items()}


def _gather(message: Any, found: dict[str, Any]) -> None:
    found[message.name] = message
    for field in message.fields:
        below = field.message_type
        if below is not None and below.file.package in _PACKAGES and below.name not in found:
            _gather(below, found)


def _message(message: Descriptor) -> dict[str, Any]:
    return {
        "title": message.name,
        "description": _DESCRIPTIONS[message.name],
        "type": "object",
        "properties": {
            field.name: _field(field, _NARROWER.get(f"{message.name}.{field.name}", {}))
            for field in message.fields
        },
        "required": [field.name for field in message.fields if not _is_optional(message, field)],
    }


def _is_optional(message: Descriptor, field: Field) -> bool:
    # A field declared `optional` is in a oneof of its own.
    return f"{message.name}.{field.name}" in _OPTIONAL or field.containing_oneof is not None


def _field(field: Field, narrower: dict[str, Any]) -> dict[str, Any]:
    if "type" in narrower or "enum" in narrower:
        return narrower
    if field.enum_type is not None:
        # Zero is what proto3 reads where a field is missing; it is never sent.
        value: dict[str, Any] = {
            "enum": sorted(each.name for each in field.enum_type.values if each.number)
        }
    elif field.message_type is None:
        value = _TYPES[field.type]
    elif field.message_type.full_name == "google.protobuf.Timestamp":
        value = _TIMESTAMP
    else:
        value = {"$ref": f"#/$defs/{field.message_type.name}"}
    return {"type": "array", "items": value, **narrower} if field.is_repeated else value


if __name__ == "__main__":
    schemas = {
        "lane_frame": lane_frame_schema,
        "health": health_schema,
        "network_frame": network_frame_schema,
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("message", choices=schemas)
    print(json.dumps(schemas[parser.parse_args().message](), indent=1))
