"""How the board runs now: power mode, clock rates, temperatures, wall clock."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from edge_server.board.kernel_files import is_there, listed, read_number, read_text

_MODE = re.compile(r"^< *POWER_MODEL +ID=(\d+) +NAME=(\S+) *>", re.MULTILINE)
_DEFAULT = re.compile(r"^< *PM_CONFIG +DEFAULT=(\d+) *>", re.MULTILINE)
_SET = re.compile(r"\bpmode:(\d+)")
_WATTS = re.compile(r"(\d+)W", re.IGNORECASE)
# The lower bounds of a plausible time: systemd's own, and the release file of JetPack.
_WITNESSES = ("usr/lib/clock-epoch", "etc/nv_tegra_release")


@dataclass(frozen=True)
class PowerMode:
    """One of a board's modes: `sudo nvpmodel -m ID` sets it."""

    id: int
    name: str


@dataclass(frozen=True)
class PowerModes:
    """The modes of /etc/nvpmodel.conf, and the current one; None where it is unknown."""

    current: PowerMode | None
    known: tuple[PowerMode, ...]

    @property
    def highest(self) -> PowerMode | None:
        """Return the fastest mode: MAXN_SUPER, else MAXN, else the one with the most watts in
        its name."""
        return max(self.known, key=_rank, default=None)


def read_power_modes(root: Path) -> PowerModes | None:
    """Read the modes of the board below `root`; None without nvpmodel."""
    text = read_text(root / "etc/nvpmodel.conf")
    if text is None:
        return None
    known = tuple(PowerMode(int(number), name) for number, name in _MODE.findall(text))
    # `status` keeps the last chosen mode; without it a boot sets the default.
    number = _SET.search(read_text(root / "var/lib/nvpmodel/status") or "") or _DEFAULT.search(text)
    chosen = None if number is None else int(number[1])
    return PowerModes(next((mode for mode in known if mode.id == chosen), None), known)


def _rank(mode: PowerMode) -> tuple[int, int]:
    unlimited = ("MAXN", "MAXN_SUPER")
    if mode.name.upper() in unlimited:
        return 1 + unlimited.index(mode.name.upper()), 0
    watts = _WATTS.search(mode.name)
    return 0, int(watts[1]) if watts else -1


@dataclass(frozen=True)
class ClockRate:
    """The rate of one engine; the kernel varies it with the load between `lowest_hz` and
    `highest_hz`."""

    engine: str
    now_hz: int
    lowest_hz: int | None = None
    highest_hz: int | None = None


def read_clock_rates(root: Path) -> tuple[ClockRate, ...]:
    """Read the rates of each CPU cluster and the GPU of the board below `root`."""
    rates = []
    for policy in listed(root / "sys/devices/system/cpu/cpufreq", "policy*"):
        khz = [read_number(policy / f"scaling_{name}_freq") for name in ("cur", "min", "max")]
        hz = [None if each is None else each * 1000 for each in khz]
        if hz[0] is not None:
            rates.append(ClockRate(f"cpu {policy.name.removeprefix('policy')}", hz[0], *hz[1:]))
    # 17000000.gpu on JetPack 6, 17000000.ga10b on 5; on others unverified.
    for pattern in ("*.gpu", "*.ga10b", "gpu-gpc-*"):
        for device in listed(root / "sys/class/devfreq", pattern):
            hz = [read_number(device / f"{name}_freq") for name in ("cur", "min", "max")]
            if hz[0] is not None:
                rates.append(ClockRate("gpu", hz[0], *hz[1:]))
    return tuple(rates)


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


@dataclass(frozen=True)
class WallClock:
    """The clock's time, compared with earlier dates of known files.

    Attributes:
        now_s: Unix time of the clock.
        built_s: date of the newest release file of the system or of edge-server.
        synchronized: systemd-timesyncd's report; None without one, e.g. where chrony runs.
    """

    now_s: float
    built_s: float | None = None
    synchronized: bool | None = None

    @property
    def is_behind(self) -> bool:
        """Return whether the clock is behind the date of the installed software."""
        return self.built_s is not None and self.now_s < self.built_s


def read_wall_clock(root: Path, now_s: float) -> WallClock:
    """Read the facts of the system below `root`, whose clock is at `now_s`."""
    times = []
    for path in (*(root / name for name in _WITNESSES), Path(__file__)):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    synchronized = True if is_there(root / "run/systemd/timesync/synchronized") else None
    return WallClock(now_s, max(times, default=None), synchronized)
