"""A directory of this process alone, for files that it shall find as it left them."""

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
# Between being made and being locked, which gives it its name.
_NEW_S = 60.0


class PrivateDirectory:
    """Made when it is first needed, in `TMPDIR` or else in /var/tmp, removed at the end.

    /tmp is memory on many systems, and too small for models. What a process that was killed has
    left is removed by the next one. As the directory is locked, systemd-tmpfiles leaves it alone.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._root: Path | None = None
        self._lock = -1

    def path(self) -> Path:
        """Raises: OSError: it cannot be made."""
        with self._mutex:
            if self._root is None:
                parent, user = _parent(), os.geteuid()
                new, named = f".edge-server-{user}-", f"edge-server-{user}-"
                _remove_left(parent, new, _NEW_S)
                _remove_left(parent, named)
                # mkdtemp lets only its owner in.
                made = Path(tempfile.mkdtemp(prefix=new, dir=parent))
                self._lock = _locked(made)
                self._root = made.rename(parent / made.name.replace(new, named))
            return self._root

    def close(self) -> None:
        """Remove it with all that is in it, in use or not."""
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
    """A descriptor that keeps it locked.

    Raises:
        OSError: it is no directory of this user, or another process has it.
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
    """Remove what no process has locked, if it is that old."""
    for place in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            status = place.lstat()
            if stat.S_ISDIR(status.st_mode) and time.time() - status.st_mtime > age_s:
                lock = _locked(place)
                shutil.rmtree(place, ignore_errors=True)
                os.close(lock)
