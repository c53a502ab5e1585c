"""A fresh interpreter for somebody's model, and everything that is shared with it."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import edge_server
from edge_server.backends.python.arena import ArenaReader, ArenaWriter, make_arena_file
from edge_server.backends.python.channel import Channel, ChannelClosed
from edge_server.backends.python.messages import FromChild

_CHILD = "edge_server.backends.python.child"
_ROOT = Path(edge_server.__file__).parent.parent
# systemd speaks with the daemon, not with its children.
_NOT_INHERITED = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC")
# A process that has crashed may write a core dump first.
_END_S = 5.0


class ChildProcess:
    """A process in a group of its own, which ends, with all it started, when this one does.

    It inherits nothing but standard error, which is its standard output too, its end of the
    channel, and the shared memory.

    Args:
        name: of the instance, for the list of processes.
        arena_bytes: how much memory the tensors of each side may take.

    Raises:
        OSError: the system has no room for another process.
    """

    def __init__(self, name: str, arena_bytes: int) -> None:
        self._killing = threading.Lock()
        self._closed = False
        with ExitStack() as stack:
            ours, theirs = socket.socketpair()
            stack.callback(ours.close)
            lifeline_end, _ = (_owned(fd, stack) for fd in os.pipe2(os.O_CLOEXEC))
            with theirs, ExitStack() as until_inherited:
                outbox, inbox = (
                    _owned(make_arena_file(f"edge-server {name}", arena_bytes), until_inherited)
                    for name in ("outbox", "inbox")
                )
                self.outbox = ArenaWriter(outbox)
                stack.callback(self.outbox.close)
                self.inbox = ArenaReader(inbox, writable=False)
                inherited = (theirs.fileno(), inbox, outbox, lifeline_end)
                self._popen = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                    [sys.executable, "-m", _CHILD, name, *map(str, inherited)],
                    cwd=_ROOT,
                    env={
                        # A model that uses ONNX Runtime tells nobody of it, but where asked to.
                        "ORT_DISABLE_TELEMETRY": "1",
                        **{k: v for k, v in os.environ.items() if k not in _NOT_INHERITED},
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    pass_fds=inherited,
                    start_new_session=True,
                )
            self._ended = _owned(os.pidfd_open(self._popen.pid), stack)
            self.channel: Channel[FromChild] = Channel(ours, FromChild)
            self._connection = ours.fileno()
            self._poll = select.poll()
            self._poll.register(self._connection, select.POLLIN)
            self._poll.register(self._ended, select.POLLIN)
            self._stack = stack.pop_all()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def receive(self, timeout_s: float | None) -> list[FromChild]:
        """What the process says next; nothing, when `timeout_s` is over.

        Raises:
            ChannelClosed: it has ended.
            NotUnderstood: it speaks nonsense.
        """
        # The process's end counts, not the socket's alone: what it forked may hold that open.
        ready = {fd for fd, _ in self._poll.poll(None if timeout_s is None else 1e3 * timeout_s)}
        if not ready or self._connection in ready:
            return self.channel.receive() if ready else []
        raise ChannelClosed("the process has ended")

    def kill(self) -> None:
        """The process and whatever it has started; a second call does nothing."""
        with self._killing:
            if not self._closed:
                self._kill_group()

    def wait(self, timeout_s: float) -> bool:
        """Whether the process ends within `timeout_s`."""
        poll = select.poll()
        poll.register(self._ended, select.POLLIN)
        return bool(poll.poll(1e3 * timeout_s))

    def close(self) -> str:
        """End the process if it has not ended, and release everything; how it ended.

        Views on its tensors stay valid.
        """
        self.wait(_END_S)
        with self._killing:
            # Before it is reaped: from then on its number may be another's.
            self._kill_group()
            self._closed = True
        code = self._popen.wait()
        self._stack.close()
        return f"it exited with code {code}" if code >= 0 else f"it died of {_signal_name(-code)}"

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _owned(fd: int, stack: ExitStack) -> int:
    stack.callback(os.close, fd)
    return fd
