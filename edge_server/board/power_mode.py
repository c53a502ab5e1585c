"""The power mode that nvpmodel has set, read from its files: the command itself needs root."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_server.board.kernel_files import read_text

if TYPE_CHECKING:
    from pathlib import Path

_MODE = re.compile(r"^< *POWER_MODEL +ID=(\d+) +NAME=(\S+) *>", re.MULTILINE)
_DEFAULT = re.compile(r"^< *PM_CONFIG +DEFAULT=(\d+) *>", re.MULTILINE)
_SET = re.compile(r"\bpmode:(\d+)")
_WATTS = re.compile(r"(\d+)W", re.IGNORECASE)


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
