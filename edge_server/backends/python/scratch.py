"""Temporary directories of models' processes, which nothing leaves behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "edge-server-model-"


class Scratch:
    """A directory for one process, empty at first, removed when it is closed.

    One whose daemon died is removed when the next is made.

    Raises:
        OSError: there is no place for it.
    """

    def __init__(self) -> None:
        _remove_orphans()
        # It gets its name when it is held: what has the name, and nobody holds, is an orphan.
        unheld = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
        self._held = _lock(unheld)
        self.path = str(unheld.rename(unheld.with_name(unheld.name[1:])))

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._held is not None:
            os.close(self._held)


def _remove_orphans() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if (held := _lock(path)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(held)


def _lock(path: Path) -> int | None:
    """Hold that directory; None where somebody does, or it is none of ours."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            raise BlockingIOError
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd
