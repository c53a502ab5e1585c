"""Processes that open a model store and change all that can be changed: to be killed at it.

    store_writer.py REPOSITORY

For each store that it reads the path of, a line, it prints the number of a new process, which
begins when it is sent SIGCONT, and how that ended: its exit status, 3 where the store refused to go
on, or the negative number of the signal. One process loads the code for all of them.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from edge_server.errors import InternalError, SettingsError, Unavailable
from edge_server.repository.scan import scan_model
from edge_server.repository.store import ModelStore


def write(directory: Path, repository: Path) -> int:
    try:
        store = ModelStore(directory, boot="1")
        staged = store.stage(scan_model(repository, "m"))
        with store.loading(staged):
            pass
        store.commit(staged)
        store.quarantine("0" * 64, "it answers nonsense")
        store.release("1" * 64)
        store.forget("other")
        store.stage(scan_model(repository, "m"))
    except (InternalError, SettingsError, Unavailable):
        return 3
    return 0


def main() -> None:
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(write(Path(line.strip()), Path(sys.argv[1])))
        os.waitpid(process, os.WUNTRACED)
        print(process, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
