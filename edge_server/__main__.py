"""`python -m edge_server` and the command `edge-server`."""

from __future__ import annotations

import io
import sys

from edge_server.cli.main import run_command


def main() -> None:
    # A file's name that is not UTF-8 may be printed; stderr is so by itself.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
