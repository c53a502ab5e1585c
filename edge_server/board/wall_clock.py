"""Whether the wall clock can be believed, and whether it was set while the daemon ran.

A board without a battery starts in 1970, or at the time of its last shutdown, and jumps by hours
once a time server responds. Everything in the daemon that measures a duration uses the monotonic
clock; what the wall clock dates (messages, logs, certificates) depends on this.
"""

from __future__ import annotations

import ctypes
import logging
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.board.kernel_files import is_directory, is_there

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

# The word in messages that were made while the clock was not believed.
CLOCK_UNSYNCHRONIZED = "clock_unsynchronized"
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


def read_wall_clock(root: Path, now_s: float) -> WallClock:
    """Read the facts of the system below `root`, whose clock is at `now_s`.

    Args:
        root: the root directory of the files.
        now_s: Unix time.
    """
    return WallClock(now_s, built_s(root), _timesyncd(root))


def _timesyncd(root: Path) -> bool | None:
    """Return whether systemd-timesyncd has synchronized the clock; None where it does not run."""
    if is_there(root / "run/systemd/timesync/synchronized"):
        return True
    return False if is_directory(root / "run/systemd/timesync") else None


def built_s(root: Path) -> float | None:
    """Return the date of the newest release file below `root` or of edge-server, as Unix time."""
    times = []
    for path in (*(root / name for name in _WITNESSES), Path(__file__)):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)


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


def wall_and_boot_ns() -> tuple[int, int]:
    """Return CLOCK_REALTIME and CLOCK_BOOTTIME, read together."""
    return time.time_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class ClockWatch:
    """Follows how far the wall clock can be believed, and finds its steps: it is compared with the
    clock that nobody sets. Only one thread calls `look`.

    Attributes:
        state: at the last look.
        steps: number of steps so far.

    Args:
        root: the root directory of the files that witness the time.
        required: an unsynchronized clock is not believed, and not only one that is wrong.
        clocks_ns: returns CLOCK_REALTIME and CLOCK_BOOTTIME, which counts while the board sleeps.
        synchronized: returns whether the kernel's clock is; None where that is not known.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        required: bool = False,
        clocks_ns: Callable[[], tuple[int, int]] = wall_and_boot_ns,
        synchronized: Callable[[], bool | None] = kernel_synchronized,
    ) -> None:
        self.state = ClockState.UNKNOWN
        self.steps = 0
        self._root = root
        self._clocks_ns = clocks_ns
        self._synchronized = synchronized
        self._built_s = built_s(root)
        self._unbelieved = {ClockState.WRONG}
        if required:
            self._unbelieved |= {ClockState.UNSYNCHRONIZED, ClockState.UNKNOWN}
        self._offset_ns: int | None = None
        self._was_believed = True

    @property
    def reasons(self) -> tuple[str, ...]:
        """`clock_unsynchronized` and the state while the clock is not believed, else nothing."""
        state = self.state
        return (f"{CLOCK_UNSYNCHRONIZED}: {state.value}",) if state in self._unbelieved else ()

    def look(self) -> None:
        """Read the clock, and log what became of it."""
        wall_ns, boot_ns = self._clocks_ns()
        offset_ns = wall_ns - boot_ns
        before_ns, self._offset_ns = self._offset_ns, offset_ns
        if before_ns is not None and abs(offset_ns - before_ns) >= _STEP_NS:
            self.steps += 1
            step_s = (offset_ns - before_ns) / 1e9
            log.warning("clock: was set by %+.1f s; nothing is measured with it", step_s)
        kernel = self._synchronized()
        synchronized = _timesyncd(self._root) if kernel is None else kernel
        clock = WallClock(wall_ns / 1e9, self._built_s, synchronized)
        self.state = clock.state
        is_believed = not self.reasons
        if is_believed != self._was_believed:
            self._was_believed = is_believed
            shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(clock.now_s))
            if is_believed:
                log.info("clock: %s: can be believed now", shown)
            else:
                log.warning("clock: %s: not believed: %s", shown, clock.state.value)
