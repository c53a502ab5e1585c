"""The default places of a daemon's model store, for programs beside the daemon.

The remote agent runs this module, too, so it uses only the standard library (see
`remote_agent.py`).
"""

from __future__ import annotations

from pathlib import Path

from edge_server.board.state_directory import state_directory

# The directory that StateDirectory= of the systemd unit creates.
_INSTALLED = Path("/var/lib/edge_server")


def installed_store() -> Path:
    """Return the store of the installed daemon if there is one, otherwise this user's store."""
    return (_INSTALLED if _INSTALLED.is_dir() else state_directory()) / "store"


def stores_here() -> list[Path]:
    """Return the possible stores on this machine: the installed daemon's, then this user's."""
    return list(dict.fromkeys([_INSTALLED / "store", state_directory() / "store"]))
