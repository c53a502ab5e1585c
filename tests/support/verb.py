"""`edge-server` in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

ANY_PORTS = ("--grpc-port=0", "--metrics-port=0", "--http-port=0")
_TIMEOUT_S = 300.0


def run_verb(*arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a verb to its end, whatever its exit code; `more` is for `subprocess.run`."""
    return subprocess.run(
        [sys.executable, "-m", "edge_server", *map(str, arguments)],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more},
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
