"""Where the model store is of a daemon that nobody told otherwise, for whoever asks beside it.

This runs on the far side of a push too: only the standard library here (`far_side.py`).
"""

from __future__ import annotations

from pathlib import Path

from edge_server.board.state_directory import state_directory

# What systemd's StateDirectory= of the unit makes.
_INSTALLED = Path("/var/lib/edge_server")


def installed_store() -> Path:
    """The installed daemon's where there is one, else that of a daemon which this user starts."""
    return (_INSTALLED if _INSTALLED.is_dir() else state_directory()) / "store"


def stores_here() -> list[Path]:
    """Where a daemon on this machine may keep its store: the installed one's, then this user's."""
    return list(dict.fromkeys([_INSTALLED / "store", state_directory() / "store"]))
