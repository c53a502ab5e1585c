"""Temporary directories of models' processes, removed even after a crash."""

from __future__ import annotations

import os
import subprocess
import tempfile
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path

from edge_server.process.disk import make_locked_directory, orphans
from edge_server.process.threads import start_future

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
        parent = Path(tempfile.gettempdir())
        for orphan, held in orphans(parent, _PREFIX):
            _remove(str(orphan), held)
        made, self._held = make_locked_directory(parent, _PREFIX)
        self.path = str(made)

    def close(self) -> None:
        _remove(self.path, self._held)
        os.close(self._held)


def _remove(path: str, held: int) -> None:
    """Remove the tree, in a child program that continues where the removal takes longer than
    `_REMOVE_S`.

    `shutil.rmtree` would raise a RecursionError for a thousand nested directories, and skips
    directories that are not readable.
    """
    removing = start_future("remove", lambda: _run_remover(path, held))
    if removing is not None:
        wait([removing], _REMOVE_S)


def _run_remover(path: str, held: int) -> None:
    with suppress(OSError):
        subprocess.run(  # noqa: S603 - a fixed program
            ["/bin/sh", "-c", _REMOVE, "sh", path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # The program inherits the lock, so the directory is no orphan until the program has
            # ended.
            pass_fds=(held,),
            check=False,
        )
