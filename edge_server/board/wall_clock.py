"""The board's clock and its plausibility: without a battery the clock starts at 1970, or at its
last value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge_server.board.kernel_files import is_there

# The lower bounds of a plausible time: systemd's own, and the release file of JetPack.
_WITNESSES = ("usr/lib/clock-epoch", "etc/nv_tegra_release")


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
