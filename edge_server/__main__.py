"""`python -m edge_server` and the command `edge-server`."""

from __future__ import annotations

import sys

from edge_server.cli import run_command


def main() -> None:
    sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
