"""Whether the wall clock can be believed, and whether it was set while the daemon ran.

A board without a battery starts in 1970, or at the time of its last shutdown, and jumps by hours
once a time server responds. Everything in the daemon that measures a duration uses the monotonic
clock; what the wall clock dates (messages, logs, certificates) depends on this.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from edge_server.board.kernel_files import is_there

# The lower bounds of a plausible time: systemd's own, and the release file of JetPack.
_WITNESSES = ("usr/lib/clock-epoch", "etc/nv_tegra_release")
# timex.h: adjtimex(2)'s flag for an unsynchronized clock, and the size of its struct.
_STA_UNSYNC = 0x0040
_TIMEX_LONGS = 64
# A time daemon slews smaller differences; a larger one was set.
_STEP_NS = 500_000_000


class ClockState(Enum):
    """How far the wall clock can be believed.

    WRONG is before the date of the installed software; UNKNOWN is where the kernel does not let the
    daemon read the state, and no other witness is there.
    """

    SYNCHRONIZED = "synchronized"
    UNSYNCHRONIZED = "unsynchronized"
    WRONG = "wrong"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class WallClock:
    """The clock's time, compared with earlier dates of known files.

    Attributes:
        now_s: Unix time of the clock.
        built_s: date of the newest release file of the system or of edge-server.
        synchronized: whether a time daemon has synchronized the clock; None where nothing reports
            it.
    """

    now_s: float
    built_s: float | None = None
    synchronized: bool | None = None

    @property
    def is_behind(self) -> bool:
        """Return whether the clock is behind the date of the installed software."""
        return self.built_s is not None and self.now_s < self.built_s

    @property
    def state(self) -> ClockState:
        if self.is_behind:
            return ClockState.WRONG
        if self.synchronized is None:
            return ClockState.UNKNOWN
        return ClockState.SYNCHRONIZED if self.synchronized else ClockState.UNSYNCHRONIZED


def read_wall_clock(root: Path, now_s: float, kernel: bool | None = None) -> WallClock:
    """Read the facts of the system below `root`, whose clock is at `now_s`.

    Args:
        root: the root directory of the files.
        now_s: Unix time.
        kernel: what `kernel_synchronized` returned; None leaves it to systemd-timesyncd's file.
    """
    times = []
    for path in (*(root / name for name in _WITNESSES), Path(__file__)):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    if kernel is None and is_there(root / "run/systemd/timesync/synchronized"):
        kernel = True
    return WallClock(now_s, max(times, default=None), kernel)


def kernel_synchronized() -> bool | None:
    """Return whether a time daemon keeps the kernel's clock synchronized; None where this process
    may not read it (systemd: ProtectClock=)."""
    # struct timex has 208 bytes on 64-bit Linux: modes (an int), offset, freq, maxerror, esterror,
    # status (an int). With modes 0 the call only reads.
    timex = (ctypes.c_long * _TIMEX_LONGS)()
    if ctypes.CDLL(None).adjtimex(ctypes.byref(timex)) < 0:
        return None
    status = ctypes.c_int.from_address(ctypes.addressof(timex) + 5 * ctypes.sizeof(ctypes.c_long))
    return not status.value & _STA_UNSYNC


class ClockSteps:
    """Finds the steps of the wall clock: it is compared with the clock that nobody sets.

    Attributes:
        count: number of steps so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._offset_ns: int | None = None

    def look(self, wall_ns: int, boot_ns: int) -> float:
        """Return by how many seconds the wall clock was set since the last look; 0.0 where it was
        not.

        Args:
            wall_ns: CLOCK_REALTIME.
            boot_ns: CLOCK_BOOTTIME, which counts while the board sleeps.
        """
        offset_ns = wall_ns - boot_ns
        before, self._offset_ns = self._offset_ns, offset_ns
        if before is None or abs(offset_ns - before) < _STEP_NS:
            return 0.0
        self.count += 1
        return (offset_ns - before) / 1e9


def wall_and_boot_ns() -> tuple[int, int]:
    """Return CLOCK_REALTIME and CLOCK_BOOTTIME, read together."""
    return time.time_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
