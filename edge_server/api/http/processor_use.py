"""What the kernel says of processors and memory, for Triton's CPU metrics."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_KIB = 1024


class MemoryUse(NamedTuple):
    """Of the board, in bytes."""

    total_bytes: int
    used_bytes: int


class ProcessorUse:
    """How busy the processors were since the last look.

    Args:
        proc: where the kernel's files are.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._before = self._times()

    def utilization(self) -> float | None:
        """The share of time that was not idle since the last call, 0..1; None where not known."""
        before, self._before = self._before, self._times()
        if before is None or self._before is None:
            return None
        total = self._before[0] - before[0]
        return min(1.0, max(0.0, (self._before[1] - before[1]) / total)) if total > 0 else 0.0

    def memory(self) -> MemoryUse | None:
        """Used is what could not be given to somebody new; None where not known."""
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
        """All and busy ticks since boot; proc(5): idle and iowait are the fourth and fifth."""
        try:
            first = (self._proc / "stat").read_text(encoding="ascii").splitlines()[0]
            ticks = [int(text) for text in first.removeprefix("cpu").split()[:8]]
            return sum(ticks), sum(ticks) - ticks[3] - ticks[4]
        except (OSError, ValueError, LookupError):
            return None
