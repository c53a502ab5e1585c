"""The power that the board takes by its monitors (INA3221), and the power mode that bounds it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_server.board.kernel_files import listed, read_number, read_text

if TYPE_CHECKING:
    from pathlib import Path

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
        watts: the product of volts and amperes.
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
