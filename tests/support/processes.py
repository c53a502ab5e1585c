"""Processes that tests look after."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether that process has not ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def resident_bytes(pid: int | str = "self") -> int:
    """Memory of a process, or of this one."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def first_to_kill(pid: int) -> int:
    """Its child that the kernel shall kill first where memory runs out, as a build is, or 0."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in children.read_text().split():
                with suppress(OSError):
                    if Path(f"/proc/{child}/oom_score_adj").read_text() == "1000\n":
                        return int(child)
    return 0
