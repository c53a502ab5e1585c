"""The process of one instance of a Python model.

    python -m edge_server.backends.python.child NAME CONNECTION OUTBOX INBOX LIFELINE

NAME is shown in the list of processes, the others are inherited descriptors.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import signal
import site
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.backends.python import sandbox
from edge_server.backends.python.messages import LONGEST_FROM_CHILD_BYTES, FromDaemon, Start
from edge_server.process.child import Channel, ChannelClosed
from edge_server.process.in_child import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Sequence

# How long a tensor waits for room in the shared memory, and a message for a busy daemon; a daemon
# that is gone closes the connection.
_ROOM_TIMEOUT_S = 5.0
_SEND_TIMEOUT_S = 60.0
# When memory runs out, the kernel kills a model's process before the daemon.
_OOM_SCORE = "500"


def main(arguments: list[str]) -> None:
    name = arguments[0]
    fd, outbox, inbox, lifeline = map(int, arguments[1:])
    end_with_parent(lifeline)
    # A container may mount the file read-only.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    # systemd sends SIGTERM to every process of the unit; the daemon lets requests finish first. A
    # function, unlike SIG_IGN, is not inherited by programs that the model starts, so
    # `multiprocessing` can terminate its workers.
    signal.signal(signal.SIGTERM, lambda *_: None)
    # Blocked during a fork, so that a SIGTERM in the meantime arrives in the child after the fork
    # and ends it.
    term = {signal.SIGTERM}
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, term),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, term),
        after_in_child=_end_by_sigterm,
    )
    # The model's output is log, and appears at once.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # The repository is read-only to the daemon; a watcher would take bytecode files for a change of
    # the model.
    sys.dont_write_bytecode = True
    # As in Triton, where the interpreter is embedded: a model that parses its arguments finds none.
    sys.argv = [""]
    connection = socket.socket(fileno=fd)
    channel: Channel[FromDaemon] = Channel(
        connection,
        FromDaemon,
        timeout_s=_SEND_TIMEOUT_S,
        longest_sent_bytes=LONGEST_FROM_CHILD_BYTES,
    )
    with suppress(ChannelClosed):
        messages: Sequence[FromDaemon] = ()
        while not messages:
            messages = channel.receive()
        refused = _close_off(messages[0], connection) if isinstance(messages[0], Start) else ""
        if isinstance(messages[0], Start) and messages[0].packages:
            _import_first(messages[0].packages)
        _run(name, channel, messages, (outbox, inbox), refused)
    # Ends threads that the model has started and left running.
    sys.stdout.flush()
    os._exit(0)


def _close_off(start: Start, connection: socket.socket) -> str:
    """Apply the sandbox of `start`, and hand its listener to the daemon with the first byte of the
    connection; return why the sandbox failed, or an empty text."""
    refused, listeners = "", []
    try:
        opened = [str(Path(start.directory).parent), start.source, start.environment]
        listeners = sandbox.close_off(start.rules, opened)
    except OSError as error:
        refused = f'its sandbox cannot be made: {error}; [python] sandbox = "off" runs it without'
    with suppress(OSError):
        socket.send_fds(connection, [b"\0"], listeners)
    # The holder of the listener decides the calls.
    for listener in listeners:
        os.close(listener)
    return refused


def _import_first(packages: str) -> None:
    """Search `packages` behind the standard library, before all other packages, and hold them as
    long as the process runs: see `environments`."""
    with suppress(OSError):
        fcntl.flock(os.open(packages, os.O_RDONLY), fcntl.LOCK_SH)
    before = list(sys.path)
    site.addsitedir(packages)
    added = sys.path[len(before) :]
    of_others = (i for i, path in enumerate(before) if path.endswith("-packages"))
    place = next(of_others, len(before))
    sys.path[:] = [*before[:place], *added, *before[place:]]


def _run(
    name: str,
    channel: Channel[FromDaemon],
    messages: Sequence[FromDaemon],
    arenas: tuple[int, int],
    refused: str,
) -> None:
    # These imports start threads, which must be in the sandbox too.
    from edge_server.backends.python import link as links  # noqa: PLC0415
    from edge_server.backends.python.runner import ModelRunner  # noqa: PLC0415
    from edge_server.backends.python.shared_memory import (  # noqa: PLC0415
        ArenaReader,
        ArenaWriter,
    )

    pb_utils = importlib.import_module("edge_server.backends.python.pb_utils")
    sys.modules["triton_python_backend_utils"] = sys.modules["c_python_backend_utils"] = pb_utils
    # `-m` put the directory of edge_server at the front of sys.path.
    if sys.path[0] == str(Path.cwd()):
        del sys.path[0]
    outbox, inbox = arenas
    link = links.DaemonLink(
        channel, ArenaWriter(outbox, _ROOM_TIMEOUT_S), ArenaReader(inbox, writable=True)
    )
    os.close(outbox)
    os.close(inbox)
    links.here.link = link
    for message in messages:
        link.dispatch(message)
    link.start()
    ModelRunner(name, link, refused).run()


def _end_by_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


if __name__ == "__main__":
    main(sys.argv[1:])
