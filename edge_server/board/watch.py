"""BoardWatch: samples the board once a second, and knows what is wrong with it."""

from __future__ import annotations

import ctypes
import logging
import time
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.board.facts import UNDERVOLTAGE_COUNTER, BoardFacts, read_board_facts
from edge_server.board.resources import is_directory, is_there
from edge_server.errors import Reason
from edge_server.process.threads import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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
    """The clock's time, the date of the newest release file, and whether a time daemon has
    synchronized the clock; None where nothing reports it."""

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
    if _libc().adjtimex(ctypes.byref(timex)) < 0:
        return None
    status = ctypes.c_int.from_address(ctypes.addressof(timex) + 5 * ctypes.sizeof(ctypes.c_long))
    return not status.value & _STA_UNSYNC


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def wall_and_boot_ns() -> tuple[int, int]:
    """Return CLOCK_REALTIME and CLOCK_BOOTTIME, read together."""
    return time.time_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class ClockWatch:
    """Follows how far the wall clock can be believed, and counts its steps against CLOCK_BOOTTIME.
    Only one thread calls `look`.

    Args:
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
    def reasons(self) -> tuple[Reason, ...]:
        """`clock_unsynchronized` and the state while the clock is not believed, else nothing."""
        state = self.state
        return (Reason(CLOCK_UNSYNCHRONIZED, state.value),) if state in self._unbelieved else ()

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
        is_believed = self.state not in self._unbelieved
        if is_believed != self._was_believed:
            self._was_believed = is_believed
            shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(clock.now_s))
            if is_believed:
                log.info("clock: %s: can be believed now", shown)
            else:
                log.warning("clock: %s: not believed: %s", shown, clock.state.value)


PERIOD_S = 1.0
# A condition that comes and goes with every second is one condition: it ends when it was not seen
# for so long.
HOLD_S = 10.0
# Older facts say nothing of now: a read hangs.
STALE_S = 5.0

THROTTLED = "throttled"
OVER_CURRENT = "over_current"
UNDERVOLTAGE = "undervoltage"
REASONS = (THROTTLED, OVER_CURRENT, UNDERVOLTAGE)
# Of parts of the daemon; without the last two lanes go on.
NO_GPU = "no_gpu"
NOT_RECORDED = "not_recorded"
HTTP_CLOSED = "http_closed"


@dataclass(frozen=True)
class DeviceReport:
    """The board at one moment, for lanes, broker, metrics and page. Two are equal where the same is
    wrong: the readings do not count.

    Attributes:
        reasons: each with a code of `REASONS`, `no_gpu`, `not_recorded`, `http_closed` or
            `clock_unsynchronized`.
        clock_steps: how often the wall clock was set since the daemon started.
        facts: of the last sample; None where there is none of the last seconds.
        age_s: how long ago the last sample was taken.
    """

    reasons: tuple[Reason, ...] = ()
    clock: ClockState = ClockState.UNKNOWN
    clock_steps: int = 0
    facts: BoardFacts | None = field(default=None, compare=False)
    age_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True)
class _Sample:
    at_s: float
    facts: BoardFacts
    reasons: tuple[Reason, ...]


class BoardWatch:
    """Samples the board's facts on its own thread, and follows the wall clock.

    No frame and no request waits for it: readers get the last sample. A file that hangs costs the
    facts and their reasons, which are gone after `STALE_S`, and nothing else: no supervisor watches
    this worker.

    Args:
        parts: returns which parts of the daemon do not work, and why: reasons as those of
            `DeviceReport`.

    Attributes:
        latest: `report` at the last `check` or sample, for every frame.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        clock: ClockWatch | None = None,
        *,
        read: Callable[[Path], BoardFacts] = read_board_facts,
        now_s: Callable[[], float] = time.monotonic,
        parts: Callable[[], Sequence[Reason]] = tuple,
    ) -> None:
        self.latest = DeviceReport()
        self._root = root
        self._clock = ClockWatch(root) if clock is None else clock
        self._read = read
        self._now_s = now_s
        self._parts = parts
        self._worker = Worker("board", self._tick)
        self._sample: _Sample | None = None
        self._seen: dict[str, tuple[float, str]] = {}  # word: when it was seen last, the details
        self._counts: dict[str, int] = {}
        self._hangs = False

    def start(self) -> None:
        """Look at the clock at once, so that the first messages have its state; then sample."""
        self._clock.look()
        self.latest = self.report
        self._worker.start()

    def stop(self) -> None:
        # A read that hangs is not waited for.
        self._worker.stop(timeout_s=0.2)

    @property
    def report(self) -> DeviceReport:
        """The state of the board now."""
        sample, clock = self._sample, self._clock
        age_s = None if sample is None else self._now_s() - sample.at_s
        if age_s is None or age_s > STALE_S:
            sample = None
        return DeviceReport(
            (*(sample.reasons if sample else ()), *self._parts(), *clock.reasons),
            clock.state,
            clock.steps,
            sample.facts if sample else None,
            age_s,
        )

    def check(self) -> None:
        """Look at the clock, and log where a read of the board hangs; for the main loop, which
        reads none of its sensors itself."""
        self._clock.look()
        self.latest = self.report
        hangs = self._sample is not None and self.latest.facts is None
        if hangs and not self._hangs:
            log.warning(
                "board: a file of its sensors cannot be read; temperatures, power and "
                "throttling are not known"
            )
        self._hangs = hangs

    def _tick(self, now: float) -> None:
        self.sample()
        self._worker.wait(max(0.0, PERIOD_S - (self._now_s() - now)))

    def sample(self) -> None:
        """Read the board once."""
        facts = self._read(self._root)
        now_s = self._now_s()
        for word, details in self._found(facts):
            if word not in self._seen:
                log.warning("board: %s: %s", word, details)
            self._seen[word] = now_s, details
        for word in [word for word, (at_s, _) in self._seen.items() if now_s - at_s >= HOLD_S]:
            del self._seen[word]
            log.info("board: %s: no longer", word)
        reasons = tuple(Reason(word, self._seen[word][1]) for word in REASONS if word in self._seen)
        self._sample = _Sample(now_s, facts, reasons)
        self.latest = self.report

    def _found(self, facts: BoardFacts) -> Iterator[tuple[str, str]]:
        heat = facts.heat
        if heat.throttled:
            yield THROTTLED, ", ".join(heat.throttled)
        # The counters count since boot: what was before the first sample is over.
        news = [
            event.name
            for event in heat.supply_events
            if event.count > self._counts.get(event.name, event.count)
        ]
        self._counts = {event.name: event.count for event in heat.supply_events}
        low = (*heat.low_voltage, *(name for name in news if name == UNDERVOLTAGE_COUNTER))
        if low:
            yield UNDERVOLTAGE, ", ".join(low)
        currents = [name for name in news if name != UNDERVOLTAGE_COUNTER]
        if currents:
            yield OVER_CURRENT, ", ".join(currents)
