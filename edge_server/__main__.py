"""`python -m edge_server` and the command `edge-server`."""

from __future__ import annotations

import io
import os
import signal
import sys


def main() -> None:
    if sys.argv[1:2] == ["run"]:
        # Before the imports, which take longer than all else here: until `run` has its own handlers
        # there is nothing to stop, and an end as requested is no end by a signal.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: os._exit(0))
    from edge_server.cli.main import run_command

    # A file's name that is not UTF-8 may be printed; stderr is so by itself.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
