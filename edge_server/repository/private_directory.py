"""A private, locked directory of this process for files that no other process changes."""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import stat
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

_USUAL = Path("/var/tmp")  # noqa: S108 - only for a directory that `mkdtemp` makes there
# The longest time between the creation and the lock, after which the directory gets its name.
_NEW_S = 60.0


class PrivateDirectory:
    """Creates the directory at first use, in `TMPDIR` or else in /var/tmp, and removes it at close.

    /tmp is in memory on many systems, and too small for models. The next process removes the
    directory of a killed one. Because the directory is locked, systemd-tmpfiles does not remove it.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._root: Path | None = None
        self._lock = -1

    def path(self) -> Path:
        """Return the directory, created at the first call.

        Raises:
            OSError: the directory cannot be created.
        """
        with self._mutex:
            if self._root is None:
                parent, user = _parent(), os.geteuid()
                new, named = f".edge-server-{user}-", f"edge-server-{user}-"
                _remove_left(parent, new, _NEW_S)
                _remove_left(parent, named)
                # mkdtemp gives access to the owner only.
                made = Path(tempfile.mkdtemp(prefix=new, dir=parent))
                self._lock = _locked(made)
                self._root = made.rename(parent / made.name.replace(new, named))
            return self._root

    def close(self) -> None:
        """Remove the directory with all its contents, even files in use."""
        with self._mutex:
            root, self._root = self._root, None
            if root is not None:
                shutil.rmtree(root, ignore_errors=True)
                os.close(self._lock)


def _parent() -> Path:
    if not os.environ.get("TMPDIR") and os.access(_USUAL, os.W_OK | os.X_OK):
        return _USUAL
    return Path(tempfile.gettempdir())


def _locked(directory: Path) -> int:
    """Lock `directory` and return the descriptor that holds the lock.

    Raises:
        OSError: `directory` is not a directory of this user, or another process has locked it.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(directory, flags)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(f"{directory}: of another user")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_left(parent: Path, prefix: str, age_s: float = -math.inf) -> None:
    """Remove the directories with `prefix` that no process has locked and that are older than
    `age_s` seconds."""
    for place in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            status = place.lstat()
            if stat.S_ISDIR(status.st_mode) and time.time() - status.st_mtime > age_s:
                lock = _locked(place)
                shutil.rmtree(place, ignore_errors=True)
                os.close(lock)
