"""Temperatures of a board, and throttling by heat or current."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_server.board.kernel_files import listed, read_number, read_text

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class ThermalZone:
    """One zone of the board: cpu-thermal, gpu-thermal, tj-thermal (the hottest of the chip)."""

    name: str
    celsius: float


@dataclass(frozen=True)
class Heat:
    """Temperatures and throttling.

    Attributes:
        zones: the zones that can be read now.
        alerts: engines throttled because of heat at this moment: gpu-throttle-alert. A running fan
            is no alert.
        over_currents: number of throttlings since boot because of over-current; 0 without a
            counter. Its files are not confirmed on a board.
    """

    zones: tuple[ThermalZone, ...] = ()
    alerts: tuple[str, ...] = ()
    over_currents: int = 0

    @property
    def hottest(self) -> ThermalZone | None:
        return max(self.zones, key=lambda zone: zone.celsius, default=None)


def read_heat(root: Path) -> Heat:
    """Read the board below `root`; empty where its kernel reports nothing."""
    thermal = root / "sys/class/thermal"
    zones = []
    for zone in listed(thermal, "thermal_zone*"):
        millidegrees = read_number(zone / "temp")
        if millidegrees is not None:
            zones.append(ThermalZone(read_text(zone / "type") or zone.name, millidegrees / 1000))
    alerts = []
    for device in listed(thermal, "cooling_device*"):
        name = read_text(device / "type") or ""
        if name.endswith("-alert") and (read_number(device / "cur_state") or 0) > 0:
            alerts.append(name)
    counts = listed(root / "sys/class/hwmon", "hwmon*/oc*_event_cnt")
    return Heat(tuple(zones), tuple(alerts), sum(read_number(count) or 0 for count in counts))
