"""How the board runs at this moment, from files of the kernel and of L4T alone.

The one reader of them for metrics, MQTT, the lanes' reasons, `doctor` and the support bundle.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import TimeoutError as TooLate
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from edge_server.board.resources import BoardMemory, listed, read_memory, read_number, read_text
from edge_server.process.threads import start_future

# 17000000.gpu on JetPack 6 and on Orin with JetPack 7.2, 17000000.ga10b on 5, gpu-gpc-0 on Thor.
_GPUS = ("*.gpu", "*.ga10b", "gpu-gpc-*")
# Where a kernel has no such devfreq device; the last one is JetPack 5's.
_GPU_LOADS = (
    "sys/devices/platform/bus@0/*.gpu/load",
    "sys/devices/platform/*gpu*/load",
    "sys/devices/gpu.*/load",
)
_NVDLA_DEVICES = (
    "sys/devices/platform/bus@0/*.host1x/*.nvdla*",
    "sys/devices/platform/*.host1x/*.nvdla*",
    "sys/devices/platform/host1x/*.nvdla*",
)
# JESD84-B51, EXT_CSD: 1 is up to 10 % of the life used, 10 up to 100 %, 11 beyond it; 0 is unknown.
_LIFE_STEPS = range(1, 12)
_PRE_EOL = {"0x01": "normal", "0x02": "warning", "0x03": "urgent"}

# Tegra's power controller; its driver names the sources of the last reset.
_RESET_REASONS = (
    "sys/devices/platform/bus@0/*.pmc/reset_reason",
    "sys/devices/platform/*.pmc/reset_reason",
)
# Searching takes longer than reading, and devices stay: one that appears is found after so long.
_SEARCH_S = 60.0


def _devices(root: Path, patterns: tuple[str, ...]) -> tuple[Path, ...]:
    """Return the matches of `patterns` below `root`, as of the last minute."""
    return _devices_at(root, patterns, int(time.monotonic() / _SEARCH_S))


@lru_cache(maxsize=16)
def _devices_at(root: Path, patterns: tuple[str, ...], _period: int) -> tuple[Path, ...]:
    return tuple(path for pattern in patterns for path in listed(root, pattern))


@dataclass(frozen=True)
class BoardEngine:
    """One engine; None where the kernel does not report the fact.

    Attributes:
        name: `cpu 0` is the cluster of core 0; `gpu`, `nvdla0`.
        load: share of busy time in the kernel's last interval, 0..1.
        now_hz: the kernel varies it with the load up to `highest_hz`.
        powered: the kernel has the engine switched on, which only NVDLA cores report.
    """

    name: str
    load: float | None = None
    now_hz: int | None = None
    highest_hz: int | None = None
    powered: bool | None = None


def read_engines(root: Path) -> tuple[BoardEngine, ...]:
    engines = []
    for policy in listed(root / "sys/devices/system/cpu/cpufreq", "policy*"):
        khz = (read_number(policy / f"scaling_{name}_freq") for name in ("cur", "max"))
        now, highest = (None if each is None else each * 1000 for each in khz)
        if now is not None:
            name = f"cpu {policy.name.removeprefix('policy')}"
            engines.append(BoardEngine(name, None, now, highest))
    if (gpu := _gpu(root)) is not None:
        engines.append(gpu)
    return (*engines, *_nvdla(root))


def _gpu(root: Path) -> BoardEngine | None:
    device = next(iter(_devices(root / "sys/class/devfreq", _GPUS)), None)
    loads = list(_devices(root, _GPU_LOADS))
    if device is not None:
        loads.insert(0, device / "device/load")
    load = next((found for each in loads if (found := _load(each)) is not None), None)
    hz = (None, None) if device is None else _devfreq(device)
    return None if load is None and hz[0] is None else BoardEngine("gpu", load, *hz)


def _nvdla(root: Path) -> list[BoardEngine]:
    """Return the NVDLA cores. That they report a load, and their clock, is not confirmed on a
    board."""
    engines: dict[str, BoardEngine] = {}
    for device in _devices(root, _NVDLA_DEVICES):
        name = device.name.rpartition(".")[2]
        status = read_text(device / "power/runtime_status")
        hz = _devfreq(root / "sys/class/devfreq" / device.name)
        load = _load(device / "load")
        if name not in engines and (status is not None or hz[0] is not None):
            powered = None if status is None else status == "active"
            engines[name] = BoardEngine(name, load, *hz, powered)
    return [engines[name] for name in sorted(engines)]


def _devfreq(device: Path) -> tuple[int | None, int | None]:
    return read_number(device / "cur_freq"), read_number(device / "max_freq")


def _load(path: Path) -> float | None:
    """Return the share of busy time; NVIDIA's drivers report it in thousandths."""
    thousandths = read_number(path)
    if thousandths is None or not 0 <= thousandths <= 1000:
        return None
    return thousandths / 1000


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
class StorageDevice:
    """One disk. The wear of an NVMe is not among its files: `doctor` asks the drive, as root.

    Attributes:
        worn: upper bound of the used share of its life, 0..1; beyond 1 it may fail any time.
        end_of_life: `normal`, `warning` (80 % of its spare blocks are used) or `urgent`.
        celsius: of an NVMe.
    """

    name: str
    model: str | None = None
    worn: float | None = None
    end_of_life: str | None = None
    celsius: float | None = None


def read_storage(root: Path) -> tuple[StorageDevice, ...]:
    """Read the NVMe drives and eMMC or SD cards of the board below `root`."""
    drives = []
    for drive in listed(root / "sys/class/nvme", "nvme*"):
        # The kernel's hwmon of a drive; its place differs between kernels.
        sensors = [*listed(drive, "hwmon*/temp1_input"), *listed(drive, "hwmon/hwmon*/temp1_input")]
        millidegrees = next(map(read_number, sensors), None)
        celsius = None if millidegrees is None else millidegrees / 1000
        drives.append(StorageDevice(drive.name, read_text(drive / "model"), celsius=celsius))
    for card in listed(root / "sys/block", "mmcblk[0-9]"):
        device = card / "device"
        # Two estimates, of the blocks of one bit per cell and of the others.
        steps = [_hex(word) for word in (read_text(device / "life_time") or "").split()]
        worst = max((step for step in steps if step in _LIFE_STEPS), default=None)
        drives.append(
            StorageDevice(
                card.name,
                read_text(device / "name"),
                None if worst is None else worst / 10,
                _PRE_EOL.get(read_text(device / "pre_eol_info") or ""),
            )
        )
    return tuple(drives)


def _hex(word: str) -> int:
    try:
        return int(word, 16)
    except ValueError:
        return 0


@dataclass(frozen=True)
class BoardFacts:
    """What the files of a board report now. What they do not report is absent, never zero: None, or
    missing in a tuple.

    Attributes:
        boot_reason: the source of the last reset in the words of Tegra's driver.
    """

    engines: tuple[BoardEngine, ...] = ()
    heat: Heat = field(default_factory=Heat)
    rails: tuple[PowerRail, ...] = ()
    power_modes: PowerModes | None = None
    memory: BoardMemory = field(default_factory=BoardMemory)
    storage: tuple[StorageDevice, ...] = ()
    uptime_s: float | None = None
    boot_reason: str | None = None

    @property
    def power_mode(self) -> str | None:
        """The name of the present mode of nvpmodel."""
        modes = self.power_modes
        return None if modes is None or modes.current is None else modes.current.name


def read_board_facts(root: Path = Path("/")) -> BoardFacts:
    """Read the facts of the system below `root`; run no program, and never raise for a file that
    is missing, unreadable or of another content.

    A read of a broken sensor's file may take seconds, or never end: see `read_within` and
    `BoardWatch`.
    """
    return BoardFacts(
        engines=read_engines(root),
        heat=read_heat(root),
        rails=read_power_rails(root),
        power_modes=read_power_modes(root),
        memory=read_memory(root),
        storage=read_storage(root),
        uptime_s=_uptime_s(root),
        boot_reason=_boot_reason(root),
    )


def read_within(timeout_s: float, root: Path = Path("/")) -> BoardFacts | None:
    """Return the facts, or None where a file of the board cannot be read in time; the thread that
    waits for it stays until that read ends."""
    found = start_future("board", lambda: read_board_facts(root))
    try:
        return None if found is None else found.result(timeout_s)
    except TooLate:
        return None


def _uptime_s(root: Path) -> float | None:
    try:
        return float((read_text(root / "proc/uptime") or "").partition(" ")[0])
    except ValueError:
        return None


def _boot_reason(root: Path) -> str | None:
    return next(filter(None, map(read_text, _devices(root, _RESET_REASONS))), None)
