"""Where the daemon keeps what a restart shall know."""

from __future__ import annotations

import os
from pathlib import Path


def state_directory() -> Path:
    """Where systemd lets the daemon keep its state, else where the user's programs do."""
    state = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if state:
        return Path(state)
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "edge_server"
