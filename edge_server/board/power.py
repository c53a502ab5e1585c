"""The power that a Jetson takes by its monitors (INA3221), and the power mode that bounds it: read
from files, and set with NVIDIA's nvpmodel and jetson_clocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from edge_server.board.resources import listed, read_number, read_text
from edge_server.errors import SettingsError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator
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
    """Temperatures and throttling at this moment.

    Attributes:
        zones: those that can be read; a zone whose engine is off cannot.
        throttled: the engines slowed down because of heat: gpu-throttle-alert. A fan is none.
        low_voltage: the inputs whose monitor reports a voltage below its limit.
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


_MODE = re.compile(r"^< *POWER_MODEL +ID=(\d+) +NAME=(\S+) *>", re.MULTILINE)
_DEFAULT = re.compile(r"^< *PM_CONFIG +DEFAULT=(\d+) *>", re.MULTILINE)
_SET = re.compile(r"\bpmode:(\d+)")
_WATTS = re.compile(r"(\d+)W", re.IGNORECASE)
_MONITOR = "ina3221"
# The sum of shunt voltages of an INA3221, which is no rail; `NC` is a channel without one.
_SUM_CHANNEL = 7
_NOT_CONNECTED = "NC"
Clocks = Literal["auto", "max"]
# Runs a command without input; its exit code, and all that it printed.
RunCommand = Callable[[Sequence[str]], tuple[int, str]]

NVPMODEL = "/usr/sbin/nvpmodel"
JETSON_CLOCKS = "/usr/bin/jetson_clocks"
# `nvpmodel -q`: NV Power Mode: MAXN, and the number on a line of its own.
_CURRENT = re.compile(r"^NV Power Mode: *(\S+)\s+(\d+)\s*$", re.MULTILINE)
# nvpmodel asks whether to reboot where the mode switches parts of the GPU that was used already.
_REBOOT = re.compile(r"reboot", re.IGNORECASE)


@dataclass(frozen=True)
class PowerRail:
    """One channel of a power monitor. VDD_IN is the whole of an Orin NX or Nano; on an AGX the
    rails add up to it.

    Attributes:
        alarms: `crit` and `max` where the monitor reports a current beyond that limit now.
    """

    name: str
    volts: float
    amperes: float
    alarms: tuple[str, ...] = ()

    @property
    def watts(self) -> float:
        return self.volts * self.amperes


def read_power_rails(root: Path) -> tuple[PowerRail, ...]:
    """Read the rails of the board below `root`; these reads wait for the I2C bus."""
    rails = []
    for chip in listed(root / "sys/class/hwmon", "hwmon*"):
        if read_text(chip / "name") != _MONITOR:
            continue
        for label in listed(chip, "in*_label"):
            number = label.name.removeprefix("in").removesuffix("_label")
            name = read_text(label)
            if not name or name == _NOT_CONNECTED or number == str(_SUM_CHANNEL):
                continue
            millivolts = read_number(chip / f"in{number}_input")
            milliamperes = read_number(chip / f"curr{number}_input")
            if millivolts is None or milliamperes is None:
                continue
            alarms = tuple(
                kind for kind in ("crit", "max") if read_number(chip / f"curr{number}_{kind}_alarm")
            )
            rails.append(PowerRail(name, millivolts / 1000, milliamperes / 1000, alarms))
    return tuple(rails)


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
class PowerControl:
    """The power mode and the clocks of the board below `root`.

    Attributes:
        run: runs nvpmodel and jetson_clocks; it needs root's rights.
        kept_clocks: a file that holds the clocks as they were before `max`, until the next boot.
    """

    root: Path
    run: RunCommand
    kept_clocks: Path

    def apply(self, mode: str | None, clocks: Clocks | None) -> Iterator[str]:
        """Set what is not None, and yield a line for each part.

        A mode that already applies is not set again. Nothing here reboots the board.

        Args:
            mode: the name or the number of a mode in /etc/nvpmodel.conf.
            clocks: `max` pins CPU, GPU and memory to the highest clocks of the mode; `auto` undoes
                that, if it was done since boot, and leaves the clocks to the kernel.

        Raises:
            SettingsError: the board has no such mode.
            Unavailable: nvpmodel or jetson_clocks is missing or fails, or the mode needs a reboot.
        """
        if mode is not None:
            yield self._set_mode(mode)
        if clocks is not None:
            yield self._set_clocks(clocks)

    def _set_mode(self, name: str) -> str:
        wanted = self._mode(name)
        if self._current() == wanted.id:
            return f"power mode {wanted.name} ({wanted.id}) as before"
        # Pinned clocks would outlast the mode that they belong to.
        self._restore_clocks()
        code, printed = self.run((NVPMODEL, "-m", str(wanted.id)))
        if self._current() == wanted.id:
            return f"power mode {wanted.name} ({wanted.id}) set"
        if _REBOOT.search(printed):
            raise Unavailable(
                f"power.mode: {wanted.name} needs a reboot, and nothing reboots by itself: run "
                f"`sudo nvpmodel -m {wanted.id}` and confirm it"
            )
        raise Unavailable(f"power.mode: nvpmodel -m {wanted.id}: {_last(code, printed)}")

    def _mode(self, name: str) -> PowerMode:
        modes = read_power_modes(self.root)
        if modes is None:
            raise Unavailable(
                "power.mode: this machine has no power modes: /etc/nvpmodel.conf is missing; on a "
                "Jetson: apt install nvidia-l4t-nvpmodel; elsewhere take [power] out"
            )
        for each in modes.known:
            if name.casefold() in (each.name.casefold(), str(each.id)):
                return each
        known = ", ".join(f"{each.name} ({each.id})" for each in modes.known)
        raise SettingsError(f"power.mode: this board has no mode '{name}'; it has: {known}")

    def _current(self) -> int:
        code, printed = self.run((NVPMODEL, "-q"))
        found = _CURRENT.search(printed)
        if found is None:
            raise Unavailable(f"power.mode: nvpmodel -q: {_last(code, printed)}")
        return int(found[2])

    def _set_clocks(self, clocks: Clocks) -> str:
        if clocks == "auto":
            return "clocks restored" if self._restore_clocks() else "clocks as the kernel sets them"
        if not self.kept_clocks.exists():
            self._jetson_clocks("--store", str(self.kept_clocks))
        self._jetson_clocks()
        return "clocks at their highest"

    def _restore_clocks(self) -> bool:
        if not self.kept_clocks.exists():
            return False
        self._jetson_clocks("--restore", str(self.kept_clocks))
        self.kept_clocks.unlink(missing_ok=True)
        return True

    def _jetson_clocks(self, *arguments: str) -> None:
        code, printed = self.run((JETSON_CLOCKS, *arguments))
        if code:
            raise Unavailable(f"power.clocks: jetson_clocks: {_last(code, printed)}")


def _last(code: int, printed: str) -> str:
    lines = printed.strip().splitlines()
    return f"ended with {code}: {lines[-1] if lines else 'printed nothing'}"
