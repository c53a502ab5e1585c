"""Starts `edge-server run` from a process that has imported it, which halves what a start costs.

Run as a program, it is that process: it forks for each start that it is asked for, and tells how
each ended. In another folder or with another environment, a daemon starts from nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# What a daemon reads of its environment after its imports.
_LATE = {"NOTIFY_SOCKET", "PYTEST_CURRENT_TEST"}


class Forked:
    """A daemon; of `subprocess.Popen` what tests use."""

    def __init__(self, args: list[str], pid: int, end: int) -> None:
        self.args = args
        self.pid = pid
        self.returncode: int | None = None
        self._end = end
        # Two threads may find at once that it has ended.
        self._reading = threading.Lock()
        weakref.finalize(self, os.close, end)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            with self._reading:
                if self.returncode is None:
                    self.returncode = int(os.read(self._end, 16))
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Preloaded:
    """The process with the imports; ends with this one, or when it is closed."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._folder = os.getcwd()  # noqa: PTH109 - compared as text
        self._asked, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                # A thread of a library would not be in what is forked.
                env={**self._environment, "OPENBLAS_NUM_THREADS": "1"},
            )

    def fits(self, environment: dict[str, str]) -> bool:
        """Whether a start from nothing, here and with that environment, would import the same."""
        different = environment.items() ^ self._environment.items()
        return os.getcwd() == self._folder and {name for name, _ in different} <= _LATE  # noqa: PTH109

    def start(self, args: list[str], environment: dict[str, str], stderr: BinaryIO) -> Forked:
        """Start `edge-server` with `args`."""
        end, theirs = os.pipe()
        try:
            request = json.dumps([args, environment]).encode()
            # The descriptors come with the first byte.
            socket.send_fds(self._asked, [b"%16d" % len(request)], [stderr.fileno(), theirs])
            self._asked.sendall(request)
        finally:
            os.close(theirs)
        return Forked(args, int(self._asked.recv(16)), end)

    def close(self) -> None:
        self._asked.close()
        self._process.wait()


preloaded = functools.cache(Preloaded)


def start_daemon(
    args: list[str], environment: dict[str, str], log: Path, within: Sequence[str] = ()
) -> Forked | subprocess.Popen[bytes]:
    """Start `edge-server` with `args`; what it logs goes to `log`.

    Args:
        within: a command that runs it, where it is not started by itself.
    """
    with log.open("wb") as stderr:
        if not within and preloaded().fits(environment):
            return preloaded().start(args, environment, stderr)
        command = [*within, sys.executable, "-m", "edge_server", *args]
        return subprocess.Popen(command, stderr=stderr, env=environment)


def _serve(asked: socket.socket) -> list[str]:
    """Fork for each request; returns in the process that is to be a daemon, with its arguments."""
    # Ends `select` when a daemon has ended.
    ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    ends: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([asked, ended], [], [])
        if ended in ready:
            os.read(ended, 64)
            for pid in list(ends):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    with (
                        os.fdopen(ends.pop(pid), "wb") as end,
                        contextlib.suppress(BrokenPipeError),
                    ):
                        end.write(b"%d" % os.waitstatus_to_exitcode(status))
        if asked not in ready:
            continue
        length, descriptors, _, _ = socket.recv_fds(asked, 16, 2)
        if not length:
            sys.exit()
        args, environment = json.loads(asked.recv(int(length), socket.MSG_WAITALL))
        stderr, end = descriptors
        assert len(os.listdir("/proc/self/task")) == 1, "an import began a thread"  # noqa: PTH208
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, before)
            os.dup2(stderr, 2)
            for each in (asked.detach(), ended, wakeup, stderr, end, *ends.values()):
                os.close(each)
            os.environ.clear()
            os.environ.update(environment)
            return list(args)
        os.close(stderr)
        ends[pid] = end
        asked.sendall(b"%16d" % pid)


if __name__ == "__main__":
    # As `python -m` has it.
    sys.path[0] = os.getcwd()  # noqa: PTH109
    importlib.import_module("edge_server.daemon.daemon")
    from edge_server.__main__ import main

    sys.argv[1:] = _serve(socket.socket(fileno=int(sys.argv[1])))
    main()
