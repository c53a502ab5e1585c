"""The health of the device is the proto3 mapping of health.proto; what is not known is absent."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf import json_format
from lane_frame_schema import health_schema
from support.boards import plant

from edge_server.board.board import Identity
from edge_server.board.facts import BoardFacts, read_board_facts
from edge_server.board.watch import ClockState, DeviceReport
from edge_server.errors import Reason
from edge_server.mqtt.payloads import health
from edge_server.proto.edge.lanes.v1 import health_pb2

if TYPE_CHECKING:
    from pathlib import Path

IDENTITY = Identity("truck-7", "0.1.0", "5f1a7a3e-3f62-4c5c-9a55-1f0c4e0c9b11", "edge-truck-7-0")
PUBLISHED_V1 = resources.files("edge_server.proto.edge.lanes.v1")
THROTTLED = DeviceReport((Reason("throttled", "gpu-throttle-alert"),), ClockState.SYNCHRONIZED, 1)


def sent(facts: BoardFacts | None, report: DeviceReport = THROTTLED) -> Any:
    free = {"/var/lib/edge_server": 50 << 30}
    payload = health(
        IDENTITY,
        replace(report, facts=facts),
        free,
        mono_ns=5 * 10**9,
        epoch_ns=1_790_000_000_123_456_000,
    )
    return json.loads(payload)


@pytest.mark.parametrize("tree", ["orin_nx_jetpack6", "agx_orin_jetpack7", None])
def test_the_json_is_the_proto3_mapping(tmp_path: Path, tree: str | None) -> None:
    value = sent(read_board_facts(plant(tree, tmp_path)) if tree else None)
    message = json_format.ParseDict(value, health_pb2.DeviceHealth())
    back = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    # A float of the proto has 32 bits.
    assert _rounded(back) == _rounded(value)


def test_it_has_what_a_fleet_looks_at(tmp_path: Path) -> None:
    value = sent(read_board_facts(plant("orin_nx_jetpack6", tmp_path)))
    assert value["status"] == "HEALTH_STATUS_DEGRADED"
    assert value["reasons"] == ["throttled: gpu-throttle-alert"]
    assert value["reason_details"] == [
        {"code": "REASON_CODE_THROTTLED", "text": "gpu-throttle-alert"}
    ]
    assert value["power_mode"] == "25W"
    assert value["boot_reason"] == "SYS_RESET_N"
    gpu = {"name": "gpu", "load": 0.734, "clock_mhz": 408, "highest_clock_mhz": 408}
    assert gpu in value["engines"]
    assert {"zone": "tj-thermal", "celsius": 63.781} in value["temperatures"]
    assert {"name": "VDD_IN", "watts": 9.31} in value["rails"]
    assert value["memory"] == {"total_mib": 15289, "available_mib": 11718, "swap_used_mib": 195}
    assert value["disks"] == [{"directory": "/var/lib/edge_server", "free_mib": 51200}]
    assert value["time"]["uptime_s"] == 3605
    assert value["time"]["clock"] == "HEALTH_CLOCK_SYNCHRONIZED"


def test_what_is_not_known_is_absent() -> None:
    value = sent(BoardFacts(), DeviceReport())
    assert value["status"] == "HEALTH_STATUS_OK"
    assert value["engines"] == value["temperatures"] == value["rails"] == []
    assert value["memory"] == {}
    assert not {"power_mode", "boot_reason"} & value.keys()
    assert "uptime_s" not in value["time"]
    assert sent(None, DeviceReport())["status"] == "HEALTH_STATUS_UNKNOWN"


def test_it_is_small(tmp_path: Path) -> None:
    value = sent(read_board_facts(plant("agx_orin_jetpack7", tmp_path)))
    assert len(json.dumps(value)) < 2000


def test_the_published_schema_is_the_protos() -> None:
    published = json.loads((PUBLISHED_V1 / "health.schema.json").read_text())
    assert published == health_schema()
    required = published["$defs"]["DeviceHealth"]["required"]
    assert "engines" in required
    assert "power_mode" not in required


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value
