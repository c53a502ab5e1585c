"""Payloads: JSON that is the proto3 mapping of lanes.proto, and says how far it may be trusted."""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields, replace
from importlib import resources
from typing import Any, Literal

import numpy as np
import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from lane_frame_schema import lane_frame_schema

from edge_server.board.board import Identity
from edge_server.board.update import UpdateRecord
from edge_server.board.watch import ClockState
from edge_server.errors import InvalidRequest, Reason
from edge_server.lanes.types import (
    Departure,
    Ego,
    GroundLane,
    Lane,
    LaneFrame,
    LineDistance,
    Polynomial,
    StageLatency,
    VehicleState,
)
from edge_server.mqtt import payloads
from edge_server.pipeline import messages
from edge_server.pipeline.messages import LaneMessage
from edge_server.pipeline.perception import Detections, NetworkFrame
from edge_server.proto.edge.lanes.v1 import lane_service_pb2, lanes_pb2

IDENTITY = Identity("truck-7", "0.1.0", "5f1a7a3e-3f62-4c5c-9a55-1f0c4e0c9b11", "edge-truck-7-0")
PUBLISHED_V1 = resources.files("edge_server.proto.edge.lanes.v1")
PUBLISHED_PERCEPTION = resources.files("edge_server.proto.edge.perception.v1")
SCHEMA: Any = json.loads((PUBLISHED_V1 / "lane_frame.schema.json").read_text())
CAPTURE_NS = 81_234_567_890_123


def lane(xs: list[float], ys: list[float], score: float = 0.9) -> Lane:
    return Lane(np.array([xs, ys], np.float32).T, score)


def frame(*lanes: Lane, epoch_ns: int = 1_790_000_000_123_456_789) -> LaneFrame:
    return LaneFrame(
        camera="front",
        frame_id=1200,
        dropped=13,
        capture_mono_ns=CAPTURE_NS,
        capture_epoch_ns=epoch_ns,
        width=1280,
        height=720,
        model_name="lane_detection",
        model_version="1",
        latency_us=StageLatency(queue=800, preprocess=1900, infer=14200, postprocess=950),
        lanes=lanes,
        clock="rtp",
        wall_clock="synchronized",
        uncertainty_ns=12_000_000,
        calibration_id="front-2026-09",
    )


def to_json(value: LaneFrame, *, seq: int = 1187, age_ns: int = 21_500_000) -> Any:
    return json.loads(messages.frame_payload(value, IDENTITY, seq, CAPTURE_NS + age_ns))


GROUND = GroundLane(
    points=np.array([[6.1, 1.812], [9.4, 1.83], [18.7, 1.9], [48.2, 2.41]], np.float32),
    polynomial=Polynomial(
        np.array([1.79, 0.0028, 0.00021, 0.0]), np.diag([4e-4, 1e-5, 1e-8, 0.0]), 6.1, 48.2
    ),
)
EXAMPLE = replace(
    frame(
        replace(
            lane([412.5, 455.08, 501.32, 548.04], [710, 610, 510, 410], 0.97),
            id=17,
            index=-1,
            type="dashed",
            color="white",
            ground=GROUND,
        ),
        replace(lane([1010.21, 842.66, 702.4], [710, 560, 410], 0.881649), predicted=True),
    ),
    ego=Ego(
        lateral_offset_m=-0.12,
        lateral_offset_std_m=0.03,
        heading_error_rad=0.0021,
        departure=Departure("withheld", "left", "indicator"),
        heading_error_std_rad=0.0014,
        left=LineDistance(0.21, 0.032, 0.42),
        right=LineDistance(1.42, 0.041, None),
    ),
    vehicle=VehicleState(CAPTURE_NS - 40_000_000, 22.5, None, "left"),
)
OF_FRAME = {each.name: getattr(frame(), each.name) for each in fields(LaneFrame)}
NETWORK_EXAMPLE = NetworkFrame(
    **OF_FRAME
    | {
        "dropped": 1102,
        "model_name": "objects",
        "latency_us": StageLatency(queue=29000, preprocess=2100, infer=31200, postprocess=640),
    },
    network="objects",
    task="detection",
    result=Detections(
        np.array([[612.04, 341.5, 702.88, 420.1], [31.2, 398.0, 68.6, 491.4]]),
        np.array([2, 1]),
        np.array([0.8124, 0.3391]),
        ("person", "bicycle", "car"),
        ids=np.array([7, 0]),
        ground=np.array([[23.412, -0.873], [np.nan, np.nan]]),
        covariance=np.array([[[1.44, 0.02], [0.02, 0.09]], np.zeros((2, 2))]),
    ),
)


def check(value: Any, schema: dict[str, Any]) -> None:
    """Hold `value` against a JSON Schema, with the keywords that the published one has."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "integer": int,
        "number": (int, float),
    }
    assert isinstance(value, kinds[schema.get("type", "string")])
    assert value in schema.get("enum", [value])
    if isinstance(value, dict):
        assert value.keys() >= set(schema["required"])
        for key in value:
            check(value[key], schema["properties"][key])
    elif isinstance(value, list):
        assert len(value) >= schema.get("minItems", 0)
        for item in value:
            check(item, schema["items"])
    elif isinstance(value, str):
        assert re.search(schema.get("pattern", ""), value)
    else:
        assert schema.get("minimum", value) <= value <= schema.get("maximum", value)
        assert value < schema.get("exclusiveMaximum", value + 1)


def test_the_published_examples_are_what_we_send() -> None:
    assert to_json(EXAMPLE) == json.loads((PUBLISHED_V1 / "lane_frame.example.json").read_text())
    of_network = json.loads((PUBLISHED_PERCEPTION / "network_frame.example.json").read_text())
    assert to_json(NETWORK_EXAMPLE, seq=98, age_ns=64_000_000) == of_network


def test_the_json_is_the_proto3_mapping() -> None:
    sent = to_json(EXAMPLE)
    message = json_format.ParseDict(sent, lanes_pb2.LaneFrame())
    assert message.time.capture_mono_ns == CAPTURE_NS
    assert message.time.capture_time.ToMicroseconds() == message.time.capture_epoch_ns // 1000
    back = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    assert back == sent


@given(
    st.lists(
        st.tuples(
            st.floats(0, 1),
            st.lists(
                st.tuples(st.floats(-5e3, 5e3, width=32), st.floats(-5e3, 5e3, width=32)),
                min_size=2,
                max_size=5,
            ),
        ),
        max_size=4,
    ),
    st.integers(0, 2**40),
    st.integers(0, 2**62),
    st.integers(-(10**9), 10**14),
)
def test_every_frame_maps_to_the_proto_and_the_schema(
    lanes: list[tuple[float, list[tuple[float, float]]]], seq: int, epoch_ns: int, age_ns: int
) -> None:
    sent = to_json(
        frame(*(Lane(np.array(p, np.float32), score) for score, p in lanes), epoch_ns=epoch_ns),
        seq=seq,
        age_ns=age_ns,
    )
    check(sent, SCHEMA)
    message = json_format.ParseDict(sent, lanes_pb2.LaneFrame())
    assert message.seq == seq % 2**32
    assert message.time.capture_epoch_ns == epoch_ns
    for got, (score, points) in zip(message.lanes, lanes, strict=True):
        assert got.confidence == pytest.approx(score, abs=1e-4)
        columns = np.array([got.image_points.x, got.image_points.y])
        assert columns == pytest.approx(np.array(points).T, abs=0.051)


def test_the_published_schema_is_current() -> None:
    assert lane_frame_schema() == SCHEMA


@pytest.mark.parametrize(
    "wrong",
    [
        {"schema": "edge.lanes/2"},
        {"frame_id": -1},
        {"seq": 2**32},
        {"status": "FRAME_STATUS_UNSPECIFIED"},
        {"reasons": [1]},
        {"image": {"width": 1280}},
        {"lanes": [{"confidence": 2, "image_points": {"x": [1, 2], "y": [1, 2]}}]},
        {"lanes": [{"confidence": 1, "image_points": {"x": [1], "y": [1]}}]},
    ],
)
def test_the_schema_refuses_what_is_no_lane_message(wrong: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        check({**to_json(EXAMPLE), **wrong}, SCHEMA)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_lane_that_is_not_finite_is_left_out_and_reported(bad: float) -> None:
    good = lane([1, 2], [2, 1])
    for broken in (lane([1, bad], [2, 1]), lane([1, 2], [bad, bad]), lane([1, 2], [2, 1], bad)):
        sent = to_json(frame(broken, good))
        assert len(sent["lanes"]) == 1
        assert sent["status"] == "FRAME_STATUS_DEGRADED"
        assert sent["reasons"] == ["lane_not_finite"]


def test_an_old_frame_is_marked_stale() -> None:
    assert to_json(frame(), age_ns=200_000_999)["status"] == "FRAME_STATUS_OK"
    sent = to_json(frame(), age_ns=200_001_000)
    assert sent["status"] == "FRAME_STATUS_STALE"
    assert sent["reasons"] == ["age"]
    assert sent["time"]["age_us"] == 200_001


def test_state_payloads() -> None:
    assert json.loads(payloads.status(IDENTITY, "starting")) == {
        "state": "starting",
        "version": "0.1.0",
    }
    assert json.loads(payloads.status(IDENTITY, "online", no_lanes=["front", "rear"])) == {
        "state": "online",
        "version": "0.1.0",
        "no_lanes": ["front", "rear"],
    }
    assert json.loads(payloads.status(IDENTITY, "offline")) == {
        "state": "offline",
        "version": "0.1.0",
    }
    assert json.loads(
        payloads.meta(
            IDENTITY, "abc", "protobuf", {"rear": "", "front": "ab12"}, {"lanes": [10, 9]}
        )
    ) == {
        "device": "truck-7",
        "version": "0.1.0",
        "boot_id": IDENTITY.boot_id,
        "client_id": IDENTITY.client_id,
        "session": "abc",
        "schemas": ["edge.lanes/1", "edge.perception/1", "edge.event/1"],
        "payload": "protobuf",
        "cameras": [{"name": "front", "calib_id": "ab12"}, {"name": "rear", "calib_id": ""}],
        "models": [{"name": "lanes", "versions": ["9", "10"]}],
    }
    assert json.loads(payloads.camera_status("lost", None)) == {
        "state": "lost",
        "last_frame_age_ms": None,
        "lanes": "ok",
        "reason": "",
        "text": "",
        "since": "1970-01-01T00:00:00.000000Z",
    }
    assert json.loads(
        payloads.camera_status(
            "frozen",
            33,
            reason="frozen",
            text="it stands",
            since_epoch_ns=1_790_000_000_123_456_789,
        )
    ) == {
        "state": "frozen",
        "last_frame_age_ms": 33,
        "lanes": "ok",
        "reason": "frozen",
        "text": "it stands",
        "since": "2026-09-21T14:13:20.123456Z",
    }
    failing = payloads.camera_status(
        "ok", 33, lanes_fail=True, reason="model_failed", text="out of memory"
    )
    assert json.loads(failing) == {
        "state": "ok",
        "last_frame_age_ms": 33,
        "lanes": "failing",
        "reason": "model_failed",
        "text": "out of memory",
        "since": "1970-01-01T00:00:00.000000Z",
    }
    assert "lanes" not in json.loads(payloads.camera_status("ok", 33, lanes_fail=None))
    assert json.loads(payloads.model_state("m", "UNAVAILABLE", "no file")) == {
        "model": "m",
        "state": "UNAVAILABLE",
        "reason": "no file",
    }


def test_the_update_topic_has_the_version_that_runs_and_what_became_of_the_last_update() -> None:
    record = UpdateRecord("rolled_back", "B", "A", "A", "9.9", "B did not start", engine="rauc")
    assert json.loads(payloads.update(IDENTITY, record)) == {
        "version": "0.1.0",
        "slot": "A",
        "state": "rolled_back",
        "target": "B",
        "result": "B did not start",
        "engine": "rauc",
        "since": "",
    }
    since = json.loads(payloads.update(IDENTITY, UpdateRecord(changed_s=1_790_000_000)))["since"]
    assert since == "2026-09-21T14:13:20.000000Z"


def test_a_frame_that_the_model_failed_at_is_invalid_with_the_reason() -> None:
    sent = to_json(replace(frame(), failure="out of memory " + "x" * 10_000))
    assert sent["status"] == "FRAME_STATUS_INVALID"
    (reason,) = sent["reasons"]
    assert reason.startswith("model_failed: out of memory xxx")
    assert len(reason) <= 500
    assert sent["lanes"] == []
    check(sent, SCHEMA)
    message = json_format.ParseDict(sent, lanes_pb2.LaneFrame())
    assert message.status == lanes_pb2.FRAME_STATUS_INVALID


def test_a_frame_of_a_camera_that_shows_no_road_is_invalid_with_the_camera_s_reason() -> None:
    sent = to_json(replace(frame(), failure="most of it is flat", failure_reason="covered"))
    assert sent["status"] == "FRAME_STATUS_INVALID"
    assert sent["reasons"] == ["covered: most of it is flat"]
    check(sent, SCHEMA)


def test_lanes_of_a_degraded_camera_come_with_its_reason() -> None:
    sent = to_json(replace(EXAMPLE, degraded=(Reason("blurred", "no sharp edges"),)))
    assert sent["status"] == "FRAME_STATUS_DEGRADED"
    assert sent["reasons"] == ["blurred: no sharp edges"]
    assert sent["lanes"]
    check(sent, SCHEMA)


@pytest.mark.parametrize("clock", ["arrival", "sensor", "rtp", "ntp", "recording"])
def test_each_clock_has_a_name_in_the_proto(clock: Any) -> None:
    sent = to_json(replace(EXAMPLE, clock=clock))
    message = json_format.ParseDict(sent, lanes_pb2.LaneFrame())
    name = lanes_pb2.ClockSource.Name(message.time.clock.source)
    assert name == f"CLOCK_SOURCE_{clock.upper()}"


def test_a_name_that_is_not_utf_8_is_published_escaped() -> None:
    name = os.fsdecode(b"m\xff")
    assert json.loads(payloads.model_state(name, "UNAVAILABLE", f"{name}: no file")) == {
        "model": "m\\xff",
        "state": "UNAVAILABLE",
        "reason": "m\\xff: no file",
    }
    assert json.loads(payloads.camera_status("ok", 1, text=name))["text"] == "m\\xff"
    assert to_json(replace(frame(), failure=name))["reasons"] == ["model_failed: m\\xff"]


def test_what_is_wrong_with_the_device_degrades_its_lanes() -> None:
    board = (Reason("throttled", "gpu-throttle-alert"), Reason("clock_unsynchronized", "wrong"))
    words = [str(reason) for reason in board]
    sent = to_json(replace(EXAMPLE, degraded=board, wall_clock="wrong"))
    assert (sent["status"], sent["reasons"]) == ("FRAME_STATUS_DEGRADED", words)
    assert sent["time"]["wall_clock"] == "WALL_CLOCK_WRONG"
    assert len(sent["lanes"]) == len(EXAMPLE.lanes)
    late = to_json(replace(EXAMPLE, degraded=board), age_ns=10**9)
    assert (late["status"], late["reasons"]) == ("FRAME_STATUS_STALE", [*words, "age"])
    assert late["reason_details"] == [
        {"code": "REASON_CODE_THROTTLED", "text": "gpu-throttle-alert"},
        {"code": "REASON_CODE_CLOCK_UNSYNCHRONIZED", "text": "wrong"},
        {"code": "REASON_CODE_AGE", "text": ""},
    ]


@pytest.mark.parametrize("state", ClockState)
def test_each_state_of_the_clock_has_its_name_in_the_proto(state: ClockState) -> None:
    sent = to_json(replace(EXAMPLE, wall_clock=state.value))
    assert sent["time"]["wall_clock"] in dict(lanes_pb2.WallClock.items())
    check(sent, SCHEMA)


@given(st.integers(-(10**9), 10**12), st.booleans(), st.sampled_from(["", "out of memory"]))
def test_the_protobuf_payload_is_the_json_payload(age_ns: int, whole: bool, failure: str) -> None:
    """Whichever the settings choose, and whatever the frame is worth."""
    broken = lane([1, float("nan")], [2, 1])
    sent = replace(
        EXAMPLE if whole else replace(EXAMPLE, lanes=(*EXAMPLE.lanes, broken)),
        failure=failure,
        degraded=(Reason("dark", "too dark"),),
    )
    now_ns = CAPTURE_NS + age_ns
    expected = json_format.ParseDict(
        json.loads(messages.frame_payload(sent, IDENTITY, 7, now_ns)), lanes_pb2.LaneFrame()
    )
    written = messages.frame_payload(sent, IDENTITY, 7, now_ns, "protobuf")
    assert lanes_pb2.LaneFrame.FromString(written) == expected
    # As the lane service sends it.
    assert LaneMessage(sent, IDENTITY, 7).sent_at(now_ns) == expected


def test_a_vehicle_publishes_its_state_in_the_form_of_the_settings() -> None:
    sent = b'{"speed_mps": 21.5, "indicator": "INDICATOR_LEFT"}'
    expected = VehicleState(70, 21.5, None, "left")
    assert payloads.read_vehicle_state(sent, 70, "json") == expected
    request = lane_service_pb2.SetVehicleStateRequest(speed_mps=21.5, indicator=2, mono_ns=60)
    state = payloads.read_vehicle_state(request.SerializeToString(), 70, "protobuf")
    assert state == VehicleState(60, 21.5, None, "left")


@pytest.mark.parametrize(
    ("data", "payload", "named"),
    [
        (b"22.5", "json", "no SetVehicleStateRequest in json"),
        (b"\xff\xfe", "json", "no SetVehicleStateRequest in json"),
        (b'{"speed_mps": "fast"}', "json", "speed_mps"),
        (b'{"speed_mps": "NaN"}', "json", "speed_mps is nan"),
        (b'{"speed_mps": 1e300}', "json", "speed_mps is 1e\\+300: a vehicle's is from -150 to 150"),
        (b'{"speed_mps": -182.04}', "json", "speed_mps is -182.04"),
        (b'{"yaw_rate_radps": 1e308}', "json", "yaw_rate_radps is 1e\\+308"),
        (b'{"indicator": "LEFT"}', "json", "indicator"),
        (b'{"speed": 22.5}', "json", '"speed"'),
        (b'{"mono_ns": "99000000000"}', "json", "cannot be later"),
        (b"[" * 5000, "json", "no SetVehicleStateRequest in json"),
        (b'{"speed_mps": 22.5}', "protobuf", "no SetVehicleStateRequest in protobuf"),
        (b"\x18\x09", "protobuf", "indicator is 9"),
    ],
)
def test_a_vehicles_message_that_cannot_be_is_refused_with_what_is_wrong(
    data: bytes, payload: Literal["json", "protobuf"], named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named):
        payloads.read_vehicle_state(data, 70, payload)
