"""Whether the board knows what time it is: without a battery it begins at 1970, or where it was."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge_server.board.kernel_files import is_there

# What systemd itself takes as the earliest time that can be, and what a JetPack and we came with.
_WITNESSES = ("usr/lib/clock-epoch", "etc/nv_tegra_release")


@dataclass(frozen=True)
class WallClock:
    """What the clock says, held against what must have been before.

    Attributes:
        now_s: since the epoch, as the clock says.
        built_s: when the newest of the system's and our own release files was written.
        synchronized: systemd-timesyncd says so; None where it says nothing, as where chrony runs.
    """

    now_s: float
    built_s: float | None = None
    synchronized: bool | None = None

    @property
    def is_behind(self) -> bool:
        """Whether it cannot be right: what runs was built later."""
        return self.built_s is not None and self.now_s < self.built_s


def read_wall_clock(root: Path, now_s: float) -> WallClock:
    """Of the system below `root`, whose clock says `now_s`."""
    times = []
    for path in (*(root / name for name in _WITNESSES), Path(__file__)):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    synchronized = True if is_there(root / "run/systemd/timesync/synchronized") else None
    return WallClock(now_s, max(times, default=None), synchronized)
