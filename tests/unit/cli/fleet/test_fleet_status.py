"""`fleet status` shows what vehicles of any version have retained, and who is silent."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

import msgspec
from msgspec.structs import replace

from edge_server.cli import fleet
from edge_server.mqtt import payloads
from edge_server.pipeline import messages
from edge_server.repository.channel import ChannelReport

NOW_S = 1_800_000_000.0
GOOD = ChannelReport(
    *("lanes", "oci://registry/lanes:stable", "good", "", "", 7, "net", "b" * 64, 10.0, "b" * 64),
    datetime.fromtimestamp(NOW_S - 60, timezone.utc),
)


def retained(
    device: str, *channels: ChannelReport, heard_s: float = 5.0, state: str = "online"
) -> Any:
    at = f"{payloads.PREFIX}/{device}"
    health = {"time": {"time": messages.rfc3339(int((NOW_S - heard_s) * 1e9))}}
    return {
        f"{at}/status": json.dumps({"state": state, "version": "1.0"}).encode(),
        f"{at}/health": json.dumps(health).encode(),
        **{f"{at}/channels/{each.channel}": msgspec.json.encode(each) for each in channels},
    }


def lines(found: dict[str, bytes]) -> list[str]:
    return fleet.lines(fleet.vehicles(found, NOW_S))


def test_each_vehicle_has_a_row_with_what_serves_and_since_when() -> None:
    rolled_back = replace(GOOD, state="rolled_back", reason="requests fail", serves="a" * 64)
    head, first, second, *rest = lines(
        {**retained("truck-1", GOOD), **retained("truck-2", rolled_back)}
    )
    assert head.split()[:3] == ["VEHICLE", "STATUS", "VERSION"]
    assert first.split() == [
        *("truck-1", "online", "1.0", "lanes", "7", "net", "b" * 12, "2027-01-15T07:59", "good")
    ]
    assert second.split()[-3:] == ["a" * 12, "2027-01-15T07:59", "rolled_back"]
    assert rest == [
        "truck-2: lanes: requests fail",
        "vehicles: 2 online",
        "lanes: 1 good, 1 rolled_back",
    ]


def test_who_is_offline_or_not_heard_is_silent() -> None:
    found = {
        **retained("truck-1", GOOD, heard_s=61),
        **retained("truck-2", GOOD, state="offline", heard_s=86_400),
        **retained("truck-3"),
    }
    assert {each.vehicle: each.status for each in fleet.vehicles(found, NOW_S)} == {
        "truck-1": "silent",
        "truck-2": "offline",
        "truck-3": "online",
    }
    assert any("offline, 1 d 0 h" in line for line in lines(found))


def test_a_channel_that_is_unreachable_shows_beside_its_models_state() -> None:
    found = retained("truck-1", replace(GOOD, fault="unreachable: no route"))
    assert lines(found)[-1] == "lanes: 1 good (channel unreachable)"


def test_what_other_clients_publish_there_ends_nothing() -> None:
    found = {
        "edge/v1/truck-1/status": b"\xff",
        "edge/v1/truck-1/health": b'{"time":{"time":3}}',
        "edge/v1/truck-2/channels/lanes": b'{"serial":"x","reason":"\\u001b[2J","share":null}',
        "edge/v1/truck-3/channels/lanes": b"[" * 10_000,
    }
    assert [each.status for each in fleet.vehicles(found, NOW_S)] == ["silent"] * 3
    assert "\x1b" not in "".join(lines(found))
    assert lines({})[1:] == ["vehicles: "]
