"""Encodes the health of the device as the JSON of `edge/lanes/v1/health.proto`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from edge_server.mqtt.payloads import rfc3339
from edge_server.process.utf8 import as_utf8

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.board.facts import BoardFacts
    from edge_server.board.identity import Identity
    from edge_server.board.resources import BoardMemory
    from edge_server.board.watch import BoardCondition

SCHEMA = "edge.health/1"

_UINT32 = 2**32
_MIB = 1 << 20
_encode = msgspec.json.Encoder().encode


def health(
    identity: Identity,
    facts: BoardFacts | None,
    condition: BoardCondition,
    free_bytes: Mapping[str, int],
    *,
    mono_ns: int,
    epoch_ns: int,
) -> bytes:
    """Return the JSON of the device's health.

    Args:
        identity: of this device.
        facts: None where the sensors do not let themselves be read.
        condition: what is wrong with the board.
        free_bytes: directory → its free space.
        mono_ns: `time.monotonic_ns()` now.
        epoch_ns: `time.time_ns()` now.
    """
    status = "OK" if facts is not None else "UNKNOWN"
    if condition.reasons:
        status = "DEGRADED"
    known = {} if facts is None else _facts(facts)
    uptime_s = None if facts is None else facts.uptime_s
    uptime = {} if uptime_s is None else {"uptime_s": int(uptime_s) % _UINT32}
    return _encode(
        {
            "schema": SCHEMA,
            "device": identity.device,
            "boot_id": identity.boot_id,
            "status": f"HEALTH_STATUS_{status}",
            "reasons": [as_utf8(reason) for reason in condition.reasons],
            "time": {
                "mono_ns": str(mono_ns),
                "time": rfc3339(epoch_ns),
                "clock": f"HEALTH_CLOCK_{condition.clock.name}",
                "clock_steps": condition.clock_steps % _UINT32,
                **uptime,
            },
            **(_NOTHING | known),
            "disks": [
                {"directory": as_utf8(directory), "free_mib": count // _MIB % _UINT32}
                for directory, count in free_bytes.items()
            ],
        }
    )


_NOTHING: dict[str, Any] = {
    "engines": [],
    "temperatures": [],
    "rails": [],
    "memory": {},
    "storage": [],
    "supply_events": [],
}


def _facts(facts: BoardFacts) -> dict[str, Any]:
    modes = facts.power_modes
    mode = None if modes is None or modes.current is None else modes.current.name
    return _known(power_mode=mode, boot_reason=facts.boot_reason) | {
        "engines": [
            {"name": engine.name}
            | _known(
                load=engine.load,
                clock_mhz=_mega(engine.now_hz),
                highest_clock_mhz=_mega(engine.highest_hz),
            )
            for engine in facts.engines
        ],
        "temperatures": [
            {"zone": as_utf8(zone.name), "celsius": zone.celsius}
            | _known(throttle_celsius=zone.throttle_celsius)
            for zone in facts.heat.zones
        ],
        "rails": [
            {"name": as_utf8(rail.name), "watts": round(rail.watts, 3)} for rail in facts.rails
        ],
        "memory": _memory(facts.memory),
        "storage": [
            {"name": drive.name} | _known(worn=drive.worn, celsius=drive.celsius)
            for drive in facts.storage
        ],
        "supply_events": [
            {"name": event.name, "count": event.count % _UINT32}
            for event in facts.heat.supply_events
        ],
    }


def _memory(memory: BoardMemory) -> dict[str, Any]:
    swap_used = None
    if memory.swap_total_bytes is not None and memory.swap_free_bytes is not None:
        swap_used = memory.swap_total_bytes - memory.swap_free_bytes
    return _known(
        total_mib=_mib(memory.total_bytes),
        available_mib=_mib(memory.available_bytes),
        swap_used_mib=_mib(swap_used),
    )


def _known(**values: Any) -> dict[str, Any]:
    return {
        name: as_utf8(value) if isinstance(value, str) else value
        for name, value in values.items()
        if value is not None
    }


def _mega(hz: int | None) -> int | None:
    return None if hz is None else hz // 1_000_000 % _UINT32


def _mib(count: int | None) -> int | None:
    return None if count is None else max(0, count) // _MIB % _UINT32
