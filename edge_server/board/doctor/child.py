"""The process of one probe: calls a function and prints its dict as JSON."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback


def main() -> None:
    """Run `FUNCTION PATIENCE_S ACCOUNT ARGUMENT...`; end the process without any destructor.

    ACCOUNT is `UID:GID,GID...`, the account that runs the function; or empty. Destructors are
    skipped because TensorRT's crash on half-made objects.
    """
    function, patience_s, account, *arguments = sys.argv[1:]
    signal.setitimer(signal.ITIMER_REAL, float(patience_s) + 1)
    # A library's own output must not mix with the result.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, _, name = function.partition(":")
    code = 1
    try:
        asked = getattr(importlib.import_module(module), name)
        # Switched only now: that user may lack the right to read this Python.
        _become(account)
        found = asked(*arguments)
        json.dump(found, answers)
        answers.flush()
        code = 0
    except Exception:  # noqa: BLE001 - the last line of the traceback is the result
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _become(account: str) -> None:
    if account:
        uid, _, groups = account.partition(":")
        gids = [int(gid) for gid in groups.split(",")]
        os.setgroups(gids)
        os.setgid(gids[0])
        os.setuid(int(uid))
