"""Processes that tests look after."""

from __future__ import annotations

from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether that process has not ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
