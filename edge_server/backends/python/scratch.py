"""Temporary directories of models' processes, removed even after a crash."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

_PREFIX = "edge-server-model-"
# The time limit of a removal: a model can leave more files than a stopping daemon has time to
# remove.
_REMOVE_S = 2.0
_REMOVE = 'rm -rf -- "$1" || { chmod -R u+rwx -- "$1"; rm -rf -- "$1"; }'


class Scratch:
    """A directory for one process, empty at first, removed when closed.

    Making a new directory also removes the directories that a crashed daemon has left.

    Raises:
        OSError: the directory cannot be made.
    """

    def __init__(self) -> None:
        _remove_orphans()
        # The directory gets its final name only once it is locked: an unlocked directory of that
        # name is an orphan.
        unheld = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
        self._held = _lock(unheld)
        self.path = str(unheld.rename(unheld.with_name(unheld.name[1:])))

    def close(self) -> None:
        _remove(self.path, self._held)
        if self._held is not None:
            os.close(self._held)


def _remove_orphans() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if (held := _lock(path)) is not None:
            _remove(str(path), held)
            os.close(held)


def _remove(path: str, held: int | None) -> None:
    """Remove the tree, in a child program that continues where the removal takes longer than
    `_REMOVE_S`.

    `shutil.rmtree` would raise a RecursionError for a thousand nested directories, and skips
    directories that are not readable.
    """
    remover = threading.Thread(target=_run_remover, args=(path, held), daemon=True)
    # The system may refuse another thread.
    with suppress(RuntimeError):
        remover.start()
        remover.join(_REMOVE_S)


def _run_remover(path: str, held: int | None) -> None:
    with suppress(OSError):
        subprocess.run(  # noqa: S603 - a fixed program
            ["/bin/sh", "-c", _REMOVE, "sh", path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # The program inherits the lock, so the directory is no orphan until the program has
            # ended.
            pass_fds=() if held is None else (held,),
            check=False,
        )


def _lock(path: Path) -> int | None:
    """Lock the directory; return None where another process holds the lock or another user owns the
    directory."""
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
