"""Run TensorRT in a separate process; this module never imports it."""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

import edge_server
from edge_server import errors
from edge_server.backends.tensorrt.build.messages import (
    BuildJob,
    PlanBuilt,
    Event,
    FactsJob,
    Failed,
    Found,
    Job,
    Looked,
    LookJob,
    Working,
)

if TYPE_CHECKING:
    import threading

    from edge_server.backends.tensorrt.build.facts import DeviceFacts

_CHILD = "edge_server.backends.tensorrt.build.child"
_ROOT = Path(edge_server.__file__).parent.parent
# systemd's notifications come from the daemon, not from its children.
_NOT_INHERITED = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC")
_LOOK_S = 0.5
_MEMINFO = Path("/proc/meminfo")

OnEvent = Callable[[Event], None]
_Result = TypeVar("_Result", PlanBuilt, Looked, Found)


@dataclass(frozen=True)
class BuildLimits:
    """Memory limits of a build process.

    Attributes:
        memory_bytes: of the host's memory, RLIMIT_DATA; 0 is unlimited.
        leave_free_bytes: the process is killed when the board's available memory falls below this.
            On a Jetson the GPU allocates from the same memory, which no process limit counts.
    """

    memory_bytes: int = 0
    leave_free_bytes: int = 256 << 20


USUAL_LIMITS = BuildLimits()
# An inspection takes little memory, and must work on a board with full memory too.
_NO_LIMITS = BuildLimits(leave_free_bytes=0)
# CUDA and TensorRT take seconds to start, on a busy board many.
_PATIENCE_S = 120.0


def build(
    job: BuildJob,
    on_event: OnEvent,
    limits: BuildLimits = USUAL_LIMITS,
    stop: threading.Event | None = None,
) -> PlanBuilt:
    """Build a plan; takes minutes.

    Args:
        job: the plan to build.
        on_event: called with each event of the process, on this thread.
        limits: of the process's memory.
        stop: kills the process when set.

    Raises:
        EdgeServerError: the failure that the process reported.
        Cancelled: `stop` was set.
    """
    return _run(job, PlanBuilt, on_event, limits, stop=stop)


def look(job: LookJob) -> str:
    """Return the description of a plan by TensorRT's inspector, in JSON.

    Raises:
        EdgeServerError: the failure that the process reported.
    """
    return _run(job, Looked, _ignore, _NO_LIMITS, patience_s=_PATIENCE_S).information


def probe_device(patience_s: float = _PATIENCE_S) -> DeviceFacts:
    """Return the facts of this device; `reason` says why it cannot build or run plans.

    Raises:
        EdgeServerError: the process failed, or exceeded `patience_s`.
    """
    return _run(FactsJob(), Found, _ignore, _NO_LIMITS, patience_s=patience_s).facts


def _ignore(event: Event) -> None:
    del event


def _run(
    job: Job,
    result: type[_Result],
    on_event: OnEvent,
    limits: BuildLimits,
    *,
    stop: threading.Event | None = None,
    patience_s: float = math.inf,
) -> _Result:
    answer: _Result | None = None
    over_at = time.monotonic() + patience_s
    with _Child(job, limits) as child:
        while (events := child.events(_LOOK_S)) is not None:
            for event in events or [Working()]:
                if isinstance(event, Failed):
                    raise _error(event)
                if isinstance(event, result):
                    answer = event
                on_event(event)
            if stop is not None and stop.is_set():
                raise errors.Cancelled("the build was ended before it was through")
            if answer is None and time.monotonic() > over_at:
                raise errors.Unavailable(f"TensorRT does not answer here, after {patience_s:g} s")
            free_bytes = available_bytes()
            if answer is None and free_bytes < limits.leave_free_bytes:
                raise errors.Unavailable(
                    f"the build was ended: it left {free_bytes >> 20} MiB of the board's memory, "
                    f"and {limits.leave_free_bytes >> 20} shall stay free; end other programs, or "
                    "give layers less with --workspace"
                )
        if answer is None:
            raise errors.InternalError(f"the process that works with TensorRT {child.end()}")
        return answer


class _Child:
    """The process; it has ended, with all its children, at the end of the `with` block at the
    latest."""

    def __init__(self, job: Job, limits: BuildLimits) -> None:
        with ExitStack() as stack:
            lifeline_end, lifeline = os.pipe2(os.O_CLOEXEC)
            stack.callback(os.close, lifeline)
            reading, writing = os.pipe2(os.O_CLOEXEC)
            stack.callback(os.close, reading)
            arguments = [writing, lifeline_end, limits.memory_bytes]
            try:
                self._popen = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                    [sys.executable, "-m", _CHILD, *map(str, arguments)],
                    cwd=_ROOT,
                    env={k: v for k, v in os.environ.items() if k not in _NOT_INHERITED},
                    stdin=subprocess.PIPE,
                    # TensorRT prints to either stream; stdout goes to stderr.
                    stdout=2,
                    pass_fds=(writing, lifeline_end),
                    start_new_session=True,
                )
            finally:
                os.close(writing)
                os.close(lifeline_end)
            stack.callback(self._kill)
            self._reading = reading
            self._unread = b""
            self._poll = select.poll()
            self._poll.register(reading, select.POLLIN)
            assert self._popen.stdin is not None  # noqa: S101 - it was asked for
            with suppress(BrokenPipeError), self._popen.stdin as stdin:
                stdin.write(msgspec.json.encode(job))
            self._stack = stack.pop_all()

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def events(self, timeout_s: float) -> list[Event] | None:
        """Return the events of the process within `timeout_s`; None when it has ended."""
        if not self._poll.poll(1e3 * timeout_s):
            return []
        data = os.read(self._reading, 1 << 16)
        if not data:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [msgspec.json.decode(line, type=Event) for line in lines]

    def end(self) -> str:
        """Return how the process ended, as the rest of a sentence."""
        code = self._popen.wait()
        if code == -signal.SIGKILL:
            return "was killed: most likely for want of memory"
        if code < 0:
            return f"died of {signal.Signals(-code).name}"
        return f"ended with code {code} and no answer"

    def _kill(self) -> None:
        if self._popen.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()


def available_bytes(meminfo: Path = _MEMINFO) -> int:
    """The memory that the kernel reports as available."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return sys.maxsize


def _error(event: Failed) -> errors.EdgeServerError:
    kind = getattr(errors, event.kind, errors.InternalError)
    error: errors.EdgeServerError = kind(event.text)
    return error
