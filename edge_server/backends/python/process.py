"""A fresh interpreter for a user's model, and the resources shared with it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import wait
from contextlib import ExitStack, suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import edge_server
from edge_server.backends.python import messages as m
from edge_server.backends.python.child.sandbox import decide
from edge_server.backends.python.shared_memory import ArenaReader, ArenaWriter, make_arena_file
from edge_server.process.channel import CHUNK_BYTES, ChannelClosed
from edge_server.process.child import Child, another_python, environ_for, signal_name
from edge_server.process.disk import make_locked_directory, orphans
from edge_server.process.threads import LOOK_S, require_wanted, start_future

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.backends.python.context import ModelLog

_PREFIX = "edge-server-model-"
# The time limit of a removal: a model can leave more files than a stopping daemon has time to
# remove.
_REMOVE_S = 2.0
_REMOVE = 'rm -rf -- "$1" || { chmod -R u+rwx -- "$1"; rm -rf -- "$1"; }'


class Scratch:
    """A directory for one process, empty at first, removed when closed.

    Making a new directory also removes the directories that a crashed daemon has left.

    Raises:
        OSError: the directory cannot be made.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        for orphan, held in orphans(parent, _PREFIX):
            _remove(str(orphan), held)
        made, self._held = make_locked_directory(parent, _PREFIX)
        self.path = str(made)

    def close(self) -> None:
        _remove(self.path, self._held)
        os.close(self._held)


def _remove(path: str, held: int) -> None:
    """Remove the tree, in a program that continues where that takes longer than `_REMOVE_S`.

    `shutil.rmtree` would raise a RecursionError for a thousand nested directories, and skips
    directories that are not readable. The program inherits the lock, so the directory is no orphan
    until the program has ended.
    """

    def run() -> None:
        with suppress(OSError):
            subprocess.run(  # noqa: S603 - a fixed program
                ["/bin/sh", "-c", _REMOVE, "sh", path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(held,),
                check=False,
            )

    if (removing := start_future("remove", run)) is not None:
        wait([removing], _REMOVE_S)


_CHILD = "edge_server.backends.python.child"
_ROOT = Path(edge_server.__file__).parent.parent
# That of the daemon's service manager.
_CREDENTIALS = "CREDENTIALS_DIRECTORY"
_MAIN = """
from edge_server.backends.python.child.__main__ import main
main(sys.argv[1:])
"""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# A crashed process may write a core dump before it ends.
_END_S = 5.0
# Linux's limit of what waits in a Unix socket is 208 KiB (net.core.wmem_default); with room.
_SOCKET_BYTES = 1 << 19


class ChildProcess(Child[m.FromChild]):
    """The process of an instance, and the memory that it shares with the daemon.

    Args:
        arena_bytes: size limit of the shared memory of each direction.
        log: receives the lines that the model logs and prints.
        interpreter: the Python to start, which has msgspec and numpy; empty is the daemon's own.

    Raises:
        OSError: the system cannot start another process.
    """

    def __init__(self, name: str, arena_bytes: int, log: ModelLog, interpreter: str = "") -> None:
        self._log = log
        self._how = ""
        program = (
            [interpreter, "-c", another_python(_MAIN)]
            if interpreter
            else [sys.executable, "-m", _CHILD]
        )
        with ExitStack() as stack, ExitStack() as until_inherited:
            scratch = Scratch()
            stack.callback(scratch.close)
            outbox, inbox = (
                _owned(make_arena_file(f"edge-server {name}", arena_bytes), until_inherited)
                for name in ("outbox", "inbox")
            )
            self.outbox = ArenaWriter(outbox)
            self.inbox = ArenaReader(inbox, writable=False)
            super().__init__(
                lambda *fds: [*program, name, *map(str, (fds[0], inbox, outbox, fds[1]))],
                {
                    # ONNX Runtime in a model sends telemetry only where the user has asked for it.
                    "ORT_DISABLE_TELEMETRY": "1",
                    **{k: v for k, v in environ_for(interpreter).items() if k != _CREDENTIALS},
                    "TMPDIR": scratch.path,
                },
                m.FromChild,
                longest_received_bytes=m.LONGEST_FROM_CHILD_BYTES,
                on_output=log.printed,
                inherited=(inbox, outbox),
                cwd=_ROOT,
            )
            # With the first byte the sandbox is closed, before any code of the model runs.
            self.watched[self.connection.fileno()] = self._take_listener
            self._resources = stack.pop_all()

    def start(
        self, start: m.Start, within_s: float, take: Callable[[m.FromChild], None]
    ) -> m.Started | None:
        """Send the first message, and return the response to it; None after `within_s`.

        A response that has arrived by then is returned, however late the daemon gets to read it.

        Args:
            take: called with each other message.

        Raises:
            ChannelClosed: the process has ended.
            NotUnderstood: a message is malformed.
            GivenUp: see `require_wanted`.
        """
        until = time.monotonic() + within_s
        self.channel.send(start)
        started = None
        # Past the limit, only as often as it takes to read what the socket can hold.
        reads_left = _SOCKET_BYTES // CHUNK_BYTES
        while started is None and reads_left > 0:
            require_wanted()
            left_s = max(0.0, until - time.monotonic())
            reads_left -= left_s == 0.0
            for message in self.receive(min(LOOK_S, left_s)):
                if isinstance(message, m.Started):
                    started = message
                else:
                    take(message)
        return started

    def receive(self, timeout_s: float = inf) -> list[m.FromChild]:
        messages: list[m.FromChild] = []
        for message in super().receive(timeout_s):
            if isinstance(message, m.LogLine):
                self._log.line(message.level, message.text)
            else:
                messages.append(message)
        return messages

    def cpu_s(self) -> float:
        """Return the processor time that the process has used, in s, with its ended children."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return 0.0
        # proc(5): utime, stime, cutime and cstime, the 14th field and those behind it; the second,
        # in brackets, may have blanks.
        fields = stat.rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / _TICKS_PER_S

    def ending(self) -> str:
        """End the process if it is still running, release all resources, and return how it ended.

        Views on its tensors stay valid.
        """
        if not self._how:
            self.wait(_END_S)
            code = self.end() or 0
            self._log.end()
            self.close()
            self._resources.close()
            self._how = (
                f"it exited with code {code}" if code >= 0 else f"it died of {signal_name(code)}"
            )
        return self._how

    def _take_listener(self) -> None:
        """Take the first byte, and with it the seccomp listener on which the kernel asks about
        system calls."""
        try:
            first, listeners, _, _ = socket.recv_fds(self.connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise ChannelClosed(f"the peer is gone: {error}") from error
        if not first:
            raise ChannelClosed("the peer is gone")
        del self.watched[self.connection.fileno()]
        for listener in listeners:
            self.watch(_owned(listener, self._resources), partial(decide, listener, self.pid))


def _owned(fd: int, stack: ExitStack) -> int:
    stack.callback(os.close, fd)
    return fd
