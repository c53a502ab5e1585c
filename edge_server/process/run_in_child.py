"""Run a function in a process of its own, which may crash, hang, or be killed at any moment.

The process ends with its parent, however the parent ends. Used by plan builds, by reading of plans
that nobody vouches for, and by doctor's probes of drivers and libraries.
"""

from __future__ import annotations

import importlib
import math
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from edge_server import errors
from edge_server.process.lifeline import end_with_parent
from edge_server.process.threads import require_wanted

if TYPE_CHECKING:
    from collections.abc import Callable

# systemd's notifications come from the daemon, not from its children.
_NOT_INHERITED = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC")
_POLL_S = 0.5
# By then a killed process has ended, or hangs in the kernel, where no signal ends it.
_KILLED_S = 2.0
_LAST_OUTPUT_BYTES = 4096
_STOPPED = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
# The process imports from the same paths as its parent, however that was started; `-c` would search
# the working directory first.
_START = """\
import sys
sys.path[:] = filter(None, dict.fromkeys([*{path!r}, *sys.path]))
from edge_server.process.run_in_child import child_main
child_main({events}, {lifeline})
"""


class ChildFailed(Exception):
    """The process gave no result; the text continues `the process …`."""


class ChildStopped(ChildFailed):
    """A signal ended the process that asks it to end: its service stops, or a person wants it."""


class ChildTimeout(ChildFailed):
    """The process was killed at its time limit."""


class ChildOptions(msgspec.Struct, frozen=True):
    """How the process runs.

    Attributes:
        background: at the lowest priority, and killed first when memory runs out.
        memory_bytes: limit of its own memory, RLIMIT_DATA; 0 is unlimited. No limit counts the
            allocations of a GPU's driver.
        account: user and groups that the function runs as, where this process is root's; the first
            group is the primary one.
    """

    background: bool = False
    memory_bytes: int = 0
    account: tuple[int, tuple[int, ...]] | None = None


class _ChildCall(msgspec.Struct, frozen=True):
    function: str
    arguments: tuple[Any, ...]
    with_events: bool
    options: ChildOptions


class _Line(msgspec.Struct, frozen=True, array_like=True):
    """One line from the process: an event, or one of its last words, `result` and `error`."""

    kind: str
    value: Any


def run_in_child(
    function: str,
    *arguments: object,
    timeout_s: float = math.inf,
    on_event: Callable[[Any], None] | None = None,
    watch: Callable[[], None] | None = None,
    options: ChildOptions | None = None,
) -> Any:
    """Return the result of `function` in plain JSON types; the process has then ended, with all its
    children.

    Args:
        function: as `package.module:name`.
        arguments: what msgspec encodes; the function gets plain JSON types.
        timeout_s: the process is killed then.
        on_event: called on this thread with each event; the function then gets another first
            argument, which sends one, on any thread.
        watch: called about twice a second; what it raises ends the process and is raised here.
        options: of the process.

    Raises:
        EdgeServerError: raised by `function`.
        ChildTimeout: no result within `timeout_s`.
        ChildStopped: the process was asked to end.
        ChildFailed: the process crashed, or `function` raised anything else.
        GivenUp: see `require_wanted`.
    """
    call = _ChildCall(function, arguments, on_event is not None, options or ChildOptions())
    ends_at = time.monotonic() + timeout_s
    with _Child(msgspec.json.encode(call)) as child:
        while (lines := child.lines(min(_POLL_S, timeout_s))) is not None:
            for line in lines:
                if line.kind == "result":
                    return line.value
                if line.kind == "error":
                    raise _ours(*line.value)
                if on_event is not None:
                    on_event(line.value)
            require_wanted()
            if watch is not None:
                watch()
            if time.monotonic() >= ends_at:
                raise ChildTimeout(f"gave no result within {timeout_s:g} s")
        raise child.ending()


def _ours(kind: str, text: str) -> Exception:
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, errors.EdgeServerError):
        return found(text)
    return ChildFailed(text)


def _import_paths() -> list[str]:
    """Return this process's import paths, without folders of packages: while another thread imports
    OpenCV, the first path is its own folder, whose `typing` would hide Python's."""
    return [path for path in sys.path if not Path(path, "__init__.py").is_file()]


def _pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    """Return both ends of a new pipe; each stack closes its end."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    reader.callback(os.close, reading)
    writer.callback(os.close, writing)
    return reading, writing


class _Child:
    """The process, seen from its parent."""

    def __init__(self, call: bytes) -> None:
        with ExitStack() as parents_ends, ExitStack() as childs_ends:
            # The kernel kills the process when the parent's end of the lifeline closes.
            lifeline, _ = _pipe(childs_ends, parents_ends)
            self._events, events = _pipe(parents_ends, childs_ends)
            self._output, output = _pipe(parents_ends, childs_ends)
            start = _START.format(path=_import_paths(), events=events, lifeline=lifeline)
            self._popen = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-c", start],
                env={k: v for k, v in os.environ.items() if k not in _NOT_INHERITED},
                stdin=subprocess.PIPE,
                # A library's own output must not mix with the result.
                stdout=output,
                stderr=output,
                pass_fds=(events, lifeline),
                start_new_session=True,
            )
            parents_ends.callback(self._kill)
            self._unread = self._last_output = b""
            self._poll = select.poll()
            self._poll.register(self._events, select.POLLIN)
            self._poll.register(self._output, select.POLLIN)
            # The end of the process counts, not only that of the pipe, which a process that it
            # forked may hold open.
            self._ended = os.pidfd_open(self._popen.pid)
            parents_ends.callback(os.close, self._ended)
            self._poll.register(self._ended, select.POLLIN)
            assert self._popen.stdin is not None  # noqa: S101 - it was asked for
            with suppress(BrokenPipeError), self._popen.stdin as stdin:
                stdin.write(call)
            self._stack = parents_ends.pop_all()

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def lines(self, timeout_s: float) -> list[_Line] | None:
        """Return the lines of the process within `timeout_s`; None when it has ended."""
        ready = [descriptor for descriptor, _ in self._poll.poll(1e3 * timeout_s)]
        if self._output in ready:
            self._read_output()
        if self._events not in ready:
            return None if self._ended in ready else []
        data = os.read(self._events, 1 << 16)
        if not data:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        try:
            return [msgspec.json.decode(line, type=_Line) for line in lines]
        except msgspec.MsgspecError as error:
            raise ChildFailed(f"sent something unreadable: {error}") from None

    def ending(self) -> ChildFailed:
        """Return the error that says how the process ended, with its last words."""
        poll = select.poll()
        poll.register(self._ended, select.POLLIN)
        has_ended = bool(poll.poll(1e3 * _KILLED_S))
        self._kill()
        while any(descriptor == self._output for descriptor, _ in self._poll.poll(0)):
            self._read_output()
        code = self._popen.returncode if has_ended else None
        if code == -signal.SIGKILL:
            return ChildFailed("was killed: most likely for want of memory")
        if code in _STOPPED:
            return ChildStopped(f"was ended by {signal.Signals(-code).name}")
        if code is not None and code < 0:
            names = {each.value: each.name for each in signal.Signals}
            how = f"died of {names.get(-code, f'signal {-code}')}"
        else:
            how = f"ended with code {code} and no result"
        words = self._last_output.decode(errors="replace").strip().splitlines()
        return ChildFailed(f"{how}: {words[-1]}" if words else how)

    def _read_output(self) -> None:
        data = os.read(self._output, 1 << 16)
        if not data:
            self._poll.unregister(self._output)
        self._last_output = (self._last_output + data)[-_LAST_OUTPUT_BYTES:]

    def _kill(self) -> None:
        # Before the process is reaped: then its group's number may be another's.
        if self._popen.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(_KILLED_S)


def child_main(events: int, lifeline: int) -> None:
    """Run the call on standard input, and end this process without any destructor: those of
    TensorRT crash on half-made objects, and at the interpreter's end."""
    code = 1
    try:
        end_with_parent(lifeline)
        call = msgspec.json.decode(sys.stdin.buffer.read(), type=_ChildCall)
        _limit(call.options)
        sending = threading.Lock()

        def send(kind: str, value: object) -> None:
            line = msgspec.json.encode(_Line(kind, value)) + b"\n"
            with sending, os.fdopen(events, "wb", closefd=False) as file:
                file.write(line)

        send(*_last_line(call, lambda event: send("event", event)))
        code = 0
    except BaseException:  # noqa: BLE001 - its last words
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _last_line(call: _ChildCall, send_event: Callable[[object], None]) -> tuple[str, object]:
    try:
        module, _, name = call.function.partition(":")
        function = getattr(importlib.import_module(module), name)
        if call.options.account is not None:
            # Switched only now: that user may lack the right to read this Python.
            user, groups = call.options.account
            os.setgroups(groups)
            os.setgid(groups[0])
            os.setuid(user)
        first = (send_event,) if call.with_events else ()
        return "result", function(*first, *call.arguments)
    except errors.EdgeServerError as error:
        return "error", (type(error).__name__, str(error))
    except MemoryError:
        return "error", ("Unavailable", "its limit of memory was not enough")
    except Exception as error:  # noqa: BLE001 - reported to the parent
        text = traceback.format_exception_only(error)[-1].strip()
        return "error", ("", f"failed: {text}")


def _limit(options: ChildOptions) -> None:
    if options.background:
        # The kernel derives the I/O priority from the niceness.
        os.nice(19)
        Path("/proc/self/oom_score_adj").write_text("1000")
    if options.memory_bytes:
        # Not RLIMIT_AS: CUDA reserves far more addresses than the board has memory.
        resource.setrlimit(resource.RLIMIT_DATA, (options.memory_bytes, options.memory_bytes))
