"""ProcessorUse: the kernel's counters of processors and memory, for Triton's CPU metrics."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_KIB = 1024


class MemoryUse(NamedTuple):
    """Memory of the board, in bytes."""

    total_bytes: int
    used_bytes: int


class ProcessorUse:
    """Utilization of the processors since the last call.

    Args:
        proc: the directory of the kernel's files.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._before = self._times()

    def utilization(self) -> float | None:
        """Return the share of busy time since the last call, 0..1; None if unknown."""
        before, self._before = self._before, self._times()
        if before is None or self._before is None:
            return None
        total = self._before[0] - before[0]
        return min(1.0, max(0.0, (self._before[1] - before[1]) / total)) if total > 0 else 0.0

    def memory(self) -> MemoryUse | None:
        """Return the memory use; used is all that is unavailable to a new process. None if
        unknown."""
        try:
            lines = (self._proc / "meminfo").read_text(encoding="ascii").splitlines()
            kib = {
                name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)
            }
            total = kib["MemTotal"] * _KIB
            return MemoryUse(total, total - kib["MemAvailable"] * _KIB)
        except (OSError, ValueError, LookupError):
            return None

    def _times(self) -> tuple[int, int] | None:
        """Return total and busy ticks since boot; proc(5): idle and iowait are fields 4 and 5."""
        try:
            first = (self._proc / "stat").read_text(encoding="ascii").splitlines()[0]
            ticks = [int(text) for text in first.removeprefix("cpu").split()[:8]]
            return sum(ticks), sum(ticks) - ticks[3] - ticks[4]
        except (OSError, ValueError, LookupError):
            return None
