"""The process of one instance of a Python model.

    python -m edge_server.backends.python.child NAME CONNECTION OUTBOX INBOX LIFELINE GATE DAEMON

NAME is shown in the list of processes, DAEMON is the process id of the daemon, the others are
inherited descriptors.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.backends.python.channel import Channel, ChannelClosed
from edge_server.backends.python.child import sandbox
from edge_server.backends.python.messages import LONGEST_FROM_CHILD_BYTES, FromDaemon, Start

if TYPE_CHECKING:
    from collections.abc import Sequence

_WRITER_PATIENCE_S = 5.0


def main(arguments: list[str]) -> None:
    name = arguments[0]
    connection, outbox, inbox, lifeline, gate, daemon = map(int, arguments[1:])
    sandbox.tie_to(daemon)
    _die_with_daemon(lifeline)
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
    channel: Channel[FromDaemon] = Channel(
        socket.socket(fileno=connection),
        FromDaemon,
        longest_sent_bytes=LONGEST_FROM_CHILD_BYTES,
    )
    heard: Sequence[FromDaemon] = ()
    with suppress(ChannelClosed):
        while not heard:
            heard = channel.receive()
    refused = ""
    if heard and isinstance(heard[0], Start):
        refused = _close_off(heard[0], gate)
    os.close(gate)
    _run(name, channel, heard, (outbox, inbox), refused)
    # Ends threads that the model has started and left running.
    sys.stdout.flush()
    os._exit(0)


def _close_off(start: Start, gate: int) -> str:
    """Apply the sandbox of `start`; return why it failed, or an empty text."""
    try:
        listener = sandbox.close_off(start.rules, str(Path(start.directory).parent))
    except OSError as error:
        return f'its sandbox cannot be made: {error}; [python] sandbox = "off" runs it without'
    if listener is not None:
        with socket.socket(fileno=os.dup(gate)) as connection:
            socket.send_fds(connection, [b"\0"], [listener])
        # The holder of the listener decides the calls.
        os.close(listener)
    return ""


def _run(
    name: str,
    channel: Channel[FromDaemon],
    heard: Sequence[FromDaemon],
    arenas: tuple[int, int],
    refused: str,
) -> None:
    # These imports start threads, which must be in the sandbox too.
    from edge_server.backends.python.arena import (  # noqa: PLC0415
        ArenaReader,
        ArenaWriter,
    )
    from edge_server.backends.python.child import link as links  # noqa: PLC0415
    from edge_server.backends.python.child.runner import ModelRunner  # noqa: PLC0415

    for module in ("triton_python_backend_utils", "c_python_backend_utils"):
        sys.modules[module] = importlib.import_module(f"edge_server.backends.python.child.{module}")
    # `-m` put the directory of edge_server at the front of sys.path.
    if sys.path[0] == str(Path.cwd()):
        del sys.path[0]
    outbox, inbox = arenas
    link = links.DaemonLink(
        channel,
        ArenaWriter(outbox, _WRITER_PATIENCE_S),
        ArenaReader(inbox, writable=True),
        on_end=_kill_group,
    )
    os.close(outbox)
    os.close(inbox)
    links.here.link = link
    for message in heard:
        link.take(message)
    link.start()
    with suppress(ChannelClosed):
        ModelRunner(name, link, refused).run()


def _die_with_daemon(lifeline: int) -> None:
    """Let the kernel kill this process and its children when the daemon's end closes.

    The kill works whatever code runs here, even where no Python thread gets the GIL.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)


def _end_by_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _kill_group() -> None:
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
