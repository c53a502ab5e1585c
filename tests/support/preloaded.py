"""Starts `edge-server` from a process that has imported it, which is most of what a start costs.

Run as a program, it is that process: it forks for each start that it is asked for, and tells how
each ended. There is one for the tests' own environment, and for each other place of libraries and
modules that is asked for again. With any other environment `edge-server` starts from nothing.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING, BinaryIO, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

# What `edge-server` reads of its environment after its imports, as do the simulations.
_LATE = {"NOTIFY_SOCKET", "PYTEST_CURRENT_TEST", "STATE_DIRECTORY", "XDG_STATE_HOME"}
_OF_SIMULATIONS = ("EDGE_SIMULATED_", "SIMULATED_")
# Where libraries and modules are found, the simulated GPU among them.
_FOUND_BY = {"LD_LIBRARY_PATH", "PYTHONPATH"}


class Forked:
    """`edge-server`; of `subprocess.Popen` what tests use."""

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

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._early = _early(environment)
        self._asked, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                # A thread of a library would not be in what is forked.
                env={**environment, "OPENBLAS_NUM_THREADS": "1"},
            )

    def different(self, environment: Mapping[str, str]) -> set[str]:
        """Which variables would make a start from nothing import something else."""
        return {name for name, _ in _early(environment).items() ^ self._early.items()}

    def start(
        self,
        args: Sequence[str],
        environment: Mapping[str, str],
        stdout: BinaryIO | TextIO | None,
        stderr: BinaryIO | TextIO,
        folder: Path | str | None = None,
    ) -> Forked:
        """Start `edge-server` with `args` in `folder`, or here."""
        end, theirs = os.pipe()
        try:
            place = str(folder or os.getcwd())  # noqa: PTH109 - compared as text
            request = json.dumps([list(args), dict(environment), place]).encode()
            descriptors = [theirs, stderr.fileno(), *([stdout.fileno()] if stdout else [])]
            # The descriptors come with the first byte.
            socket.send_fds(self._asked, [b"%16d" % len(request)], descriptors)
            self._asked.sendall(request)
        finally:
            os.close(theirs)
        command = [sys.executable, "-m", "edge_server", *args]  # as if it were started so
        return Forked(command, int(self._asked.recv(16)), end)

    def close(self) -> None:
        self._asked.close()
        self._process.wait()


class PreloadedProcesses:
    """What is preloaded while a session of tests runs."""

    def __init__(self) -> None:
        # With the environment that the session began with.
        self._usual: Preloaded | None = None
        # With libraries and modules of their own; None for those that were asked for once.
        self._others: dict[tuple[str, ...], Preloaded | None] = {}

    def begin(self) -> None:
        self._usual = Preloaded(os.environ)

    def find(self, environment: Mapping[str, str]) -> Preloaded | None:
        """Return the one that has imported what a start from nothing would; else None."""
        if self._usual is None:
            return None
        different = self._usual.different(environment)
        if not different:
            return self._usual
        if not different <= _FOUND_BY:
            return None
        place = tuple(environment.get(name, "") for name in sorted(_FOUND_BY))
        if place not in self._others:
            self._others[place] = None
            return None
        found = self._others[place] or Preloaded(environment)
        self._others[place] = found
        return found

    def end(self) -> None:
        for each in filter(None, (self._usual, *self._others.values())):
            each.close()
        self._usual = None
        self._others.clear()


PRELOADED = PreloadedProcesses()


def start_daemon(
    args: list[str], environment: dict[str, str], log: Path, within: Sequence[str] = ()
) -> Forked | subprocess.Popen[bytes]:
    """Start `edge-server` with `args`; what it logs goes to `log`.

    Args:
        within: a command that runs it, where it is not started by itself.
    """
    with log.open("wb") as stderr:
        if not within and (preloaded := PRELOADED.find(environment)):
            return preloaded.start(args, environment, None, stderr)
        command = [*within, sys.executable, "-m", "edge_server", *args]
        return subprocess.Popen(command, stderr=stderr, env=environment)


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name not in _LATE and not name.startswith(_OF_SIMULATIONS)
    }


def _serve(asked: socket.socket) -> list[str]:
    """Fork for each request; returns in the process that is to be a daemon, with its arguments."""
    # Ends `select` when a daemon has ended.
    ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    ends: dict[int, int] = {}
    sources: list[socket.socket | int] = [asked, ended]
    # What a collection does not touch, no process has to copy.
    gc.collect()
    gc.freeze()
    while True:
        ready, _, _ = select.select(sources, [], [])
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
        length, descriptors, _, _ = socket.recv_fds(asked, 16, 3)
        if not length:
            sys.exit()
        args, environment, folder = json.loads(asked.recv(int(length), socket.MSG_WAITALL))
        end, stderr, *stdout = descriptors
        assert len(os.listdir("/proc/self/task")) == 1, "an import began a thread"  # noqa: PTH208
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, before)
            os.dup2(stderr, 2)
            for each in stdout:
                os.dup2(each, 1)
            for each in (asked.detach(), ended, wakeup, *descriptors, *ends.values()):
                os.close(each)
            os.chdir(folder)
            # As `python -m` has it.
            sys.path[0] = folder
            os.environ.clear()
            os.environ.update(environment)
            return list(args)
        for each in (stderr, *stdout):
            os.close(each)
        ends[pid] = end
        asked.sendall(b"%16d" % pid)


if __name__ == "__main__":
    # Not what is beside this file.
    sys.path[0] = os.getcwd()  # noqa: PTH109
    verbs = importlib.import_module("edge_server.cli")
    names = [each.name for each in pkgutil.iter_modules(verbs.__path__, "edge_server.cli.")]
    for name in ("edge_server.daemon.daemon", *names):
        # What cannot be imported here is the fault of whoever is forked, too.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    from edge_server.__main__ import main

    sys.argv[1:] = _serve(socket.socket(fileno=int(sys.argv[1])))
    main()
