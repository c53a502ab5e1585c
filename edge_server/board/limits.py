"""How much memory and how many processors there are, for the board and for this process's group."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from edge_server.board.kernel_files import read_number, read_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True)
class BoardMemory:
    """Of the board: on a Jetson, CPU and GPU share it. None is what the kernel does not tell."""

    total_bytes: int | None = None
    available_bytes: int | None = None


@dataclass(frozen=True)
class GroupLimits:
    """What cgroups (version 2) allow this process; None is no limit of theirs."""

    memory_bytes: int | None = None
    processors: float | None = None


def read_memory(root: Path) -> BoardMemory:
    """From /proc/meminfo below `root`."""
    kib: dict[str, int] = {}
    for line in (read_text(root / "proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdecimal():
            kib[name] = int(words[0])
    total, available = kib.get("MemTotal"), kib.get("MemAvailable")
    return BoardMemory(
        None if total is None else total * 1024, None if available is None else available * 1024
    )


def read_group_limits(root: Path) -> GroupLimits:
    """The tightest of this process's cgroup and those around it, below `root`."""
    memory = [read_number(group / "memory.max") for group in _groups(root)]
    processors = [_processors(group / "cpu.max") for group in _groups(root)]
    return GroupLimits(
        min((each for each in memory if each is not None), default=None),
        min((each for each in processors if each is not None), default=None),
    )


def _groups(root: Path) -> Iterator[Path]:
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition("::")
        if number == "0":
            path = PurePosixPath(rest).relative_to("/") if rest.startswith("/") else None
            for each in () if path is None else (path, *path.parents):
                yield root / "sys/fs/cgroup" / each


def _processors(path: Path) -> float | None:
    """From `200000 100000`: of so many microseconds so many may be used; `max` is no limit."""
    words = (read_text(path) or "").split()
    if len(words) != 2 or not all(word.isdecimal() for word in words) or not int(words[1]):
        return None
    return int(words[0]) / int(words[1])
