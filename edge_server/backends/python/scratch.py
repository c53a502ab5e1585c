"""Temporary directories of models' processes, which nothing leaves behind."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

_PREFIX = "edge-server-model-"
# A model can leave more files than a daemon that stops has time to remove.
_REMOVE_S = 2.0
_REMOVE = 'rm -rf -- "$1" || { chmod -R u+rwx -- "$1"; rm -rf -- "$1"; }'


class Scratch:
    """A directory for one process, empty at first, removed when it is closed.

    The next one that is made removes what a daemon that died has left.

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
        _remove(self.path, self._held)
        if self._held is not None:
            os.close(self._held)


def _remove_orphans() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if (held := _lock(path)) is not None:
            _remove(str(path), held)
            os.close(held)


def _remove(path: str, held: int | None) -> None:
    """Remove that tree, by a program that goes on where it takes longer than `_REMOVE_S`.

    `shutil.rmtree` would end in a RecursionError where a model has made a thousand directories
    within each other, and passes by those that nobody may list.
    """
    remover = threading.Thread(target=_run_remover, args=(path, held), daemon=True)
    # The system may have no room for another thread.
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
            # The directory stays held, and is no orphan, until the program has ended.
            pass_fds=() if held is None else (held,),
            check=False,
        )


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
