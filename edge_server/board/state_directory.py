"""The directory of the daemon's state that survives a restart."""

from __future__ import annotations

import os
from pathlib import Path


def state_directory() -> Path:
    """Return systemd's state directory, otherwise the user's."""
    state = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if state:
        return Path(state)
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "edge_server"
