"""Whether systemd runs, and the daemon's installed unit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_server.board.kernel_files import is_directory, read_text

if TYPE_CHECKING:
    from pathlib import Path

UNIT = "edge-server.service"
# In systemd's order: the first unit hides the others.
_DIRECTORIES = ("etc/systemd/system", "run/systemd/system", "usr/lib/systemd/system")
_USER = re.compile(r"^User=(\S+)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class UnitFile:
    """The daemon's unit; `user` is None where it runs as root."""

    path: str
    user: str | None


def systemd_runs(root: Path) -> bool:
    """Return whether systemd started the system below `root`, by the test of sd_booted(3)."""
    return is_directory(root / "run/systemd/system")


def find_unit_file(root: Path) -> UnitFile | None:
    """Return the daemon's unit below `root`; drop-ins are not read."""
    for directory in _DIRECTORIES:
        text = read_text(root / directory / UNIT)
        if text is not None:
            user = _USER.findall(text)
            return UnitFile(f"/{directory}/{UNIT}", user[-1] if user else None)
    return None
