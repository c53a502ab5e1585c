"""The process's side of `child.run_in_child`: it runs one function and sends what comes of it.

Any Python from 3.10 can import this module: a framework's interpreter may have no package of ours.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_server import errors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# As `channel.Channel` has it; the message is JSON.
LENGTH_BYTES = 4


def end_with_parent(lifeline: int) -> None:
    """Let the kernel kill this process's group when the last writing end of a pipe closes.

    The kill works even where no Python thread gets the GIL.

    Args:
        lifeline: reading end of the pipe, whose writing end only the parent has.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
    poll = select.poll()
    poll.register(lifeline, 0)
    if poll.poll(0):
        # The parent has ended before.
        os._exit(1)


def child_main(connection: int, lifeline: int) -> None:
    """Run the call that `connection` brings, and end this process without any destructor: those of
    TensorRT and of frameworks crash on half-made objects, and at the interpreter's end."""
    code = 1
    sending = threading.Lock()
    try:
        end_with_parent(lifeline)
        peer = socket.socket(fileno=connection)
        with peer.makefile("rb") as file:
            call = json.loads(file.read(int.from_bytes(file.read(LENGTH_BYTES), "little")))

        def send(kind: str, value: object) -> None:
            # The value is a text of JSON itself, which carries NaN, and paths that are no UTF-8.
            text = json.dumps(value, default=_builtins)
            body = json.dumps([kind, text]).encode()
            with sending:
                peer.sendall(len(body).to_bytes(LENGTH_BYTES, "little") + body)

        _limit(call["options"])
        kind, value = _last_line(call, lambda event: send("event", event))
        sys.stdout.flush()
        sys.stderr.flush()
        send(kind, value)
        code = 0
    except BaseException:  # noqa: BLE001 - its last words
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def missing(modules: Sequence[str]) -> list[str]:
    """Return which of the modules this Python cannot import; nothing is imported for that."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def examined(modules: Sequence[str]) -> tuple[str, list[str]]:
    """Return the version of this Python, like 3.11, and which of the modules it cannot import."""
    return f"{sys.version_info.major}.{sys.version_info.minor}", missing(modules)


def _builtins(value: object) -> object:
    # A function that returns one of our structs has imported msgspec.
    import msgspec  # noqa: PLC0415

    return msgspec.to_builtins(value)


def _last_line(call: Mapping[str, Any], send_event: Callable[[object], None]) -> tuple[str, object]:
    try:
        module, _, name = call["function"].partition(":")
        function = getattr(importlib.import_module(module), name)
        if call["options"]["account"] is not None:
            # Switched only now: that user may lack the right to read this Python.
            user, groups = call["options"]["account"]
            os.setgroups(groups)
            os.setgid(groups[0])
            os.setuid(user)
        first = (send_event,) if call["with_events"] else ()
        return "result", function(*first, *json.loads(call["arguments"]))
    except errors.EdgeServerError as error:
        return "error", (type(error).__name__, str(error))
    except MemoryError:
        return "error", ("Unavailable", "its limit of memory was not enough")
    except Exception as error:  # noqa: BLE001 - reported to the parent
        text = traceback.format_exception_only(error)[-1].strip()
        return "error", ("", f"failed: {text}")


def _limit(options: Mapping[str, Any]) -> None:
    if options["background"]:
        # The kernel derives the I/O priority from the niceness.
        os.nice(19)
        Path("/proc/self/oom_score_adj").write_text("1000")
    if most_bytes := options["memory_bytes"]:
        # Not RLIMIT_AS: CUDA reserves far more addresses than the board has memory.
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
