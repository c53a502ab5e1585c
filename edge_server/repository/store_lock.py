"""The lock of a model store's directory, which only one process may use at a time."""

from __future__ import annotations

import fcntl
import os
import stat
from typing import TYPE_CHECKING

from edge_server.errors import AlreadyRunning, SettingsError
from edge_server.process.paths import error_of_place

if TYPE_CHECKING:
    from pathlib import Path

_LOCK = "lock"


def lock_store(directory: Path) -> int:
    """Create `directory` if missing and lock it; return the descriptor that holds the lock.

    Raises:
        AlreadyRunning: another process has locked the directory.
        SettingsError: the directory is unsafe, or holds other files.
        Unavailable: the directory cannot be created or written; its disk may be mounted, or have
            space, later.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own(directory)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(directory / _LOCK, flags, 0o600)
    except OSError as error:
        raise error_of_place(
            error,
            f"model store {directory}: {error.strerror}; give it a directory that the daemon may "
            "write to (systemd: StateDirectory=)",
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise AlreadyRunning(
            f"model store {directory}: another daemon keeps its models there; stop it, or give "
            "this one a directory of its own with repository.store (--repository-copies)"
        ) from None
    return lock


def _require_own(directory: Path) -> None:
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise SettingsError(
            f"model store {directory}: it belongs to another user; chown it, or choose another"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SettingsError(
            f"model store {directory}: others could put models there; chmod go-w it"
        )
    # The store removes unknown files in its directory, which must therefore be no repository.
    there = {entry.name for entry in directory.iterdir()} - {"lost+found"}
    if there and _LOCK not in there:
        raise SettingsError(
            f"model store {directory}: holds something else ({min(there)}); choose an empty "
            "directory"
        )
