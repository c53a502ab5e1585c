"""Temperatures with the points at which the kernel acts on them, and what slows the board down."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_server.board.kernel_files import listed, read_number, read_text

if TYPE_CHECKING:
    from pathlib import Path

# A kernel without a limit reports one beyond these.
_PLAUSIBLE_CELSIUS = range(1, 200)
# NVIDIA's cooling devices of Orin (gpu-throttle-alert), and those that the kernel makes of engines
# whose clock it may lower. Neither a fan is one of them nor hot-surface-alert, which at 70 degrees
# warns who might touch the board. Names of JetPack 7 are not confirmed on a board.
_THROTTLES = re.compile(r".*throttle-alert\Z|(thermal-)?(cpufreq|devfreq)\b.*")
# Orin's counters by NVIDIA's developer guide, "Over-current throttling".
UNDERVOLTAGE_COUNTER = "oc1"


@dataclass(frozen=True)
class ThermalZone:
    """One zone of the board: cpu-thermal, gpu-thermal, tj-thermal (the hottest of the chip).

    Attributes:
        throttle_celsius: the kernel slows engines down from there on; None where it never does.
        critical_celsius: the kernel shuts the board down there.
    """

    name: str
    celsius: float
    throttle_celsius: float | None = None
    critical_celsius: float | None = None


@dataclass(frozen=True)
class EventCounter:
    """Throttlings by the supply since boot: oc1 by undervoltage, oc2 by the average current, oc3 by
    its peaks."""

    name: str
    count: int


@dataclass(frozen=True)
class Heat:
    """Temperatures and throttling.

    Attributes:
        zones: the zones that can be read now; a zone whose engine is off cannot.
        throttled: the engines slowed down because of heat at this moment: gpu-throttle-alert. A
            running fan is none.
        supply_events: empty where the board has no such counters.
        low_voltage: the inputs whose monitor reports a voltage below its limit at this moment.
    """

    zones: tuple[ThermalZone, ...] = ()
    throttled: tuple[str, ...] = ()
    supply_events: tuple[EventCounter, ...] = ()
    low_voltage: tuple[str, ...] = ()

    @property
    def hottest(self) -> ThermalZone | None:
        return max(self.zones, key=lambda zone: zone.celsius, default=None)


def read_heat(root: Path) -> Heat:
    """Read the board below `root`; empty where its kernel reports nothing."""
    thermal = root / "sys/class/thermal"
    zones = (_zone(path) for path in listed(thermal, "thermal_zone*"))
    hwmon = root / "sys/class/hwmon"
    events = [
        EventCounter(path.name.removesuffix("_event_cnt"), count)
        for path in listed(hwmon, "hwmon*/oc*_event_cnt")
        if (count := read_number(path)) is not None
    ]
    return Heat(
        tuple(zone for zone in zones if zone is not None),
        tuple(_throttled(thermal)),
        tuple(sorted(events, key=lambda event: event.name)),
        tuple(
            _input_name(alarm)
            for kind in ("min", "lcrit")
            for alarm in listed(hwmon, f"hwmon*/in*_{kind}_alarm")
            if read_number(alarm)
        ),
    )


def _zone(path: Path) -> ThermalZone | None:
    millidegrees = read_number(path / "temp")
    if millidegrees is None:
        return None
    slowed = _slowed_at(path)
    trips: dict[str, list[float]] = {}
    for trip in listed(path, "trip_point_*_type"):
        at = read_number(trip.with_name(trip.name.replace("_type", "_temp")))
        kind, number = read_text(trip) or "", trip.name.split("_")[2]
        if kind == "passive" and not slowed.get(number, True):
            continue
        if at is not None and at // 1000 in _PLAUSIBLE_CELSIUS:
            trips.setdefault(kind, []).append(at / 1000)
    return ThermalZone(
        read_text(path / "type") or path.name,
        millidegrees / 1000,
        min(trips.get("passive", ()), default=None),
        min(trips.get("critical", ()), default=None),
    )


def _slowed_at(zone: Path) -> dict[str, bool]:
    """Return the numbers of the zone's trip points at which cooling devices act, and whether one of
    those slows an engine down."""
    slowed: dict[str, bool] = {}
    for trip in listed(zone, "cdev*_trip_point"):
        number = read_text(trip) or ""
        device = trip.with_name(trip.name.removesuffix("_trip_point"))
        slows = _THROTTLES.match(read_text(device / "type") or "") is not None
        slowed[number] = slowed.get(number, False) or slows
    return slowed


def _throttled(thermal: Path) -> list[str]:
    names = []
    for device in listed(thermal, "cooling_device*"):
        name = read_text(device / "type") or ""
        if _THROTTLES.match(name) and (read_number(device / "cur_state") or 0) > 0:
            names.append(name)
    return names


def _input_name(alarm: Path) -> str:
    number = alarm.name.partition("_")[0]
    chip = read_text(alarm.with_name("name")) or alarm.parent.name
    return read_text(alarm.with_name(f"{number}_label")) or f"{chip} {number}"
