"""`edge-server` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from tempfile import TemporaryFile
from typing import Any

from support.preloaded import PRELOADED

ANY_PORTS = ("--grpc-port=0", "--metrics-port=0", "--http-port=0")
_TIMEOUT_S = 300.0


def run_verb(*arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a verb to its end, whatever its exit code; `more` is for `subprocess.run`.

    It is forked from a process that has imported it, unless `more` has other than `env` and `cwd`.
    """
    words = [str(each) for each in arguments]
    environment = more.get("env") or os.environ
    preloaded = PRELOADED.find(environment) if more.keys() <= {"env", "cwd"} else None
    if preloaded is None:
        return subprocess.run(
            [sys.executable, "-m", "edge_server", *words],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more},
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        verb = preloaded.start(words, environment, out, err, more.get("cwd"))
        try:
            code = verb.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            verb.kill()
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.read())
