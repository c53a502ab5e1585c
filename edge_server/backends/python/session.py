"""A model's process, what is shared with it, and one session of it, from its start to its end."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import wait
from contextlib import ExitStack, suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import edge_server
from edge_server.backends.contract import Phases
from edge_server.backends.python import messages as m
from edge_server.backends.python.calls import ModelCalls
from edge_server.backends.python.in_flight import InFlight, ResponsePump, latest_deadline
from edge_server.backends.python.sandbox import decide
from edge_server.backends.python.shared_memory import (
    ArenaFull,
    ArenaReader,
    ArenaWriter,
    make_arena_file,
    pack_all,
    take_back,
    unpack_all,
)
from edge_server.errors import EdgeServerError, InternalError, Unavailable
from edge_server.process.child import (
    CHUNK_BYTES,
    ChannelClosed,
    Child,
    MessageTooLong,
    NotUnderstood,
    another_python,
    environ_for,
    signal_name,
)
from edge_server.process.disk import make_locked_directory, orphans
from edge_server.process.threads import LOOK_S, require_wanted, start_future
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edge_server.backends.contract import ExecuteRequest
    from edge_server.backends.python.context import ModelContext, ModelLog
    from edge_server.backends.python.in_flight import ExecuteBatch

log = logging.getLogger(__name__)

_PREFIX = "edge-server-model-"
# The time limit of a removal: a model can leave more files than a stopping daemon has time to
# remove.
_REMOVE_S = 2.0
_REMOVE = 'rm -rf -- "$1" || { chmod -R u+rwx -- "$1"; rm -rf -- "$1"; }'


class Scratch:
    """A directory for one process, removed when closed; making it also removes those that a crashed
    daemon has left."""

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
    """Remove the tree, in a program that continues where that takes longer than `_REMOVE_S`;
    `shutil.rmtree` raises a RecursionError for a thousand nested directories, and skips unreadable
    ones. It inherits the lock, so the directory is no orphan until the program has ended."""

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
from edge_server.backends.python.child import main
main(sys.argv[1:])
"""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# A crashed process may write a core dump before it ends.
_END_S = 5.0
# Linux's limit of what waits in a Unix socket is 208 KiB (net.core.wmem_default); with room.
_SOCKET_BYTES = 1 << 19


class ChildProcess(Child[m.FromChild]):
    """The process of an instance, and the memory that it shares with the daemon."""

    def __init__(self, name: str, context: ModelContext, log: ModelLog) -> None:
        interpreter, arena_bytes = context.program.interpreter, context.parameters.arena_bytes
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
        self, start: m.Start, within_s: float, other: Callable[[m.FromChild], None]
    ) -> m.Started | None:
        """Send the first message, and return the response to it; None after `within_s`. One that
        has arrived by then is returned, however late the daemon gets to read it. `other` is called
        with each other message. Raises ChannelClosed, and GivenUp of `require_wanted`."""
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
                    other(message)
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
        Views on its tensors stay valid."""
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


READY_S = 5.0
# The minimum duration granted to an execution, even where its callers' deadlines are shorter: short
# deadlines must not kill a slow process that other callers use.
LEAST_EXECUTION_S = 1.0
# Limits of an execution whose model has no parameter `execution_timeout_s`: without processor time,
# and in all.
IDLE_S = 30.0
LONGEST_S = 600.0
# How often the processor time is read, and how much of it in between is work: an idle interpreter
# with a few waiting threads uses less.
_LOOK_S = 5.0
_WORK_S = 0.1
_ALLOWS_MORE = "parameter '%s' allows more"


class ChildSession:
    """Talks to one process; sends a last response to every request, even if the process dies."""

    def __init__(self, name: str, context: ModelContext, process: ChildProcess) -> None:
        self._name = name
        self._context = context
        self._model = context.config.name
        self._outputs = context.outputs
        self._process = process
        self._in_flight = InFlight(
            name, self._pump if context.config.decoupled else None, self._forget
        )
        self._calls = ModelCalls(name, context, process, self._in_flight.callers)
        self._numbers = itertools.count(1)
        self._is_started = self._checks_ready = False
        self._checking_ready = threading.Lock()
        self._ready: queue.Queue[bool] = queue.Queue(1)
        self._handlers: dict[type[m.Message], Callable[[Any], None]] = {
            m.Responded: self._responded,
            m.Executed: self._executed,
            m.CallModel: self._calls.call,
            m.Cancel: self._calls.cancel,
            m.Query: self._calls.query,
            m.ChangeMetric: context.metrics.change,
            m.Ready: self._is_ready,
        }

    @property
    def why_over(self) -> str:
        """Why the process accepts no further requests; empty while it does."""
        return self._in_flight.why_over

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def up(self) -> bool:
        return self._is_started and not self.why_over

    def run(self, start: m.Start, started: Callable[[], None]) -> str:
        """Start the model, receive messages until the process has ended; return why it ended."""
        try:
            self._start(start, started)
            while True:
                for message in self._process.receive():
                    self._dispatch(message)
        except NotUnderstood as error:
            self.end(f"it sent an invalid message: {error}")
        except ChannelClosed:
            pass
        except (ValueError, LookupError) as error:
            # E.g. a tensor outside the place that its message names, or a metric that was never
            # made.
            self.end(f"it sent an invalid message: {error}")
        except Exception as error:
            log.exception("model %s: instance %s: unforeseen error", self._model, self._name)
            self.end(f"the server could not take what it sent: {error!r}")
        how = self._process.ending()
        self.end(how)
        self._calls.close()
        return self.why_over

    def end(self, why: str) -> None:
        self._process.kill()
        self._in_flight.end(why)

    def finish(self, within_s: float) -> None:
        """Let a started model finalize, then end the process; kill it after `within_s`."""
        if self._is_started:
            with suppress(ChannelClosed):
                self._process.channel.send(m.Finish())
                if not self._process.wait(within_s):
                    log.warning(
                        "model %s: instance %s was killed: 'finalize' did not return within %g s",
                        self._model,
                        self._name,
                        within_s,
                    )
        self.end("it is closed")

    def execute(
        self,
        requests: Sequence[ExecuteRequest],
        progressed: Callable[[], None] = lambda: None,
    ) -> Phases:
        """Execute a batch; return when the batch is done or the process has ended. It is killed
        when the execution has taken `execution_timeout_s`, or without that parameter has used no
        processor time for `IDLE_S` or has taken `LONGEST_S`, or when no request waits for it any
        more. `progressed` is called every few seconds while it is within these limits."""
        began = time.monotonic()
        began_ns = time.monotonic_ns()
        batch = self._send(requests)
        sent_ns = time.monotonic_ns()
        if batch is not None:
            given_up_at = max(latest_deadline(requests), began + LEAST_EXECUTION_S)
            if why := self._wait(batch, began, given_up_at, progressed):
                self.end(f"it was killed: 'execute' {why}{self._calls.loading()}")
        after_ns = time.monotonic_ns() - sent_ns
        # The process may have begun before this thread noticed that the whole batch was sent.
        infer_ns = min(batch.execute_ns, after_ns) if batch is not None else 0
        return Phases(sent_ns - began_ns, infer_ns, after_ns - infer_ns)

    def _wait(
        self,
        batch: ExecuteBatch,
        began: float,
        given_up_at: float,
        progressed: Callable[[], None],
    ) -> str:
        """Wait for the end of `batch`; return why the process is to be killed, or ""."""
        limit_s = self._context.parameters.execution_timeout_s
        until = min(given_up_at, began + (limit_s or LONGEST_S))
        cpu_s, worked_at = self._process.cpu_s(), began
        while not batch.done.wait(max(0.0, min(_LOOK_S, until - time.monotonic()))):
            now = time.monotonic()
            if now >= until:
                more = "" if until == given_up_at else f"; {_ALLOWS_MORE % 'execution_timeout_s'}"
                return f"did not return within {until - began:.1f} s{more}"
            progressed()
            used_s = self._process.cpu_s()
            if used_s - cpu_s >= _WORK_S or self._calls.under_way:
                cpu_s, worked_at = used_s, now
            if limit_s is None and now - worked_at >= IDLE_S:
                return (
                    f"has used no processor time for {now - worked_at:.0f} s, so it hangs; "
                    f"{_ALLOWS_MORE % 'execution_timeout_s'}"
                )
        return ""

    def not_ready_reason(self) -> str:
        if self.why_over or not self._checks_ready or self._in_flight.callers():
            # A process that executes is ready; it could respond to the question only after its
            # execution.
            return self.why_over
        late = f"is_ready did not return within {READY_S:g} s"
        if not self._checking_ready.acquire(timeout=READY_S):
            return late
        try:
            while not self._ready.empty():
                self._ready.get_nowait()
            self._process.channel.send(m.CheckReady())
            return "" if self._ready.get(timeout=READY_S) else "is_ready returned False"
        except ChannelClosed:
            return "the process is gone"
        except queue.Empty:
            # An execution may have started in between.
            return "" if self._in_flight.callers() else late
        finally:
            self._checking_ready.release()

    def _start(self, start: m.Start, started: Callable[[], None]) -> None:
        within_s = self._context.parameters.initialize_timeout_s
        response = self._process.start(start, within_s, self._dispatch)
        if response is None:
            self.end(
                f"it was killed: 'initialize' did not return within {within_s:g} s; "
                f"{_ALLOWS_MORE % 'initialize_timeout_s'}{self._calls.loading()}"
            )
        elif failure := response.failure or self._disagreement(response.completed):
            self.end(m.shortened(failure))
        else:
            self._checks_ready = response.checks_ready
            self._is_started = True
            started()

    def _disagreement(self, completed: str) -> str:
        try:
            self._context.program.check(completed)
        except EdgeServerError as error:
            return str(error)
        return ""

    def _send(self, requests: Sequence[ExecuteRequest]) -> ExecuteBatch | None:
        """Send the batch; return None where every request already has its last response."""
        messages: list[m.ChildRequest] = []
        again = [self._in_flight.number_again(request) for request in requests]
        number, batch, error = next(self._numbers), None, None
        try:
            for known, request in zip(again, requests, strict=True):
                messages.append(self._message(known or next(self._numbers), request))
            batch = self._in_flight.add(number, [each.number for each in messages], requests)
        except ArenaFull as full:
            error = InternalError(
                f"Failed to process the request(s) for model instance '{self._name}', message: the "
                f"inputs: {full}; parameter 'shared_memory_limit_mib' allows more"
            )
        if batch is None:
            self._take_back(messages)
            for known in filter(None, again):
                self._in_flight.forget(known)
            for request in requests:
                request.respond(error or unhealthy(self._name, self.why_over), True)
            return None
        try:
            self._process.channel.send(m.Execute(number, messages))
        except ChannelClosed:
            self._process.kill()
        except MessageTooLong as too_long:
            self._take_back(messages)
            self._in_flight.executed(m.Executed(number, 0, f"model '{self._model}': {too_long}"))
        else:
            for message, request in zip(messages, requests, strict=True):
                if message.number not in again:
                    self._pass_on_cancellation(message.number, request)
        return batch

    def _take_back(self, messages: Sequence[m.ChildRequest]) -> None:
        for message in messages:
            take_back(message.inputs, self._process.outbox)

    def _message(self, number: int, request: ExecuteRequest) -> m.ChildRequest:
        caller = request.request
        contents = [(name, t.datatype, t.array) for name, t in request.host_inputs().items()]
        place = caller.sequence
        flags = 0
        if place is not None:
            flags = m.SEQUENCE_START * place.start + m.SEQUENCE_END * place.end
        return m.ChildRequest(
            number,
            caller.id,
            pack_all(contents, self._process.outbox),
            [name for name in self._outputs if name in request.outputs],
            0 if place is None else place.id,
            flags,
            caller.timeout_us,
            dict(caller.parameters),
            self._model,
            self._context.version,
        )

    def _pass_on_cancellation(self, number: int, request: ExecuteRequest) -> None:
        def cancel() -> None:
            if self._in_flight.waits(number):
                with suppress(ChannelClosed):
                    self._process.channel.send(m.Cancel(number))

        if request.request.cancellation is not None:
            request.request.cancellation.when_cancelled(cancel)

    def _dispatch(self, message: m.FromChild) -> None:
        # The process may send another `Started`, which has no effect.
        if (handler := self._handlers.get(type(message))) is not None:
            handler(message)

    def _executed(self, message: m.Executed) -> None:
        for response in message.responses:
            self._responded(response)
        self._in_flight.executed(message)

    def _responded(self, message: m.Responded) -> None:
        # Unpack even the responses of finished requests, so that their memory becomes free.
        arrays = unpack_all(message.places, self._process.inbox)
        tensors = {name: Tensor(array) for name, array in arrays.items()}
        delivered = self._in_flight.responded(message, tensors)
        if self._context.config.decoupled and not (delivered or message.final):
            self._delivered(message.number, 1)

    def _forget(self, number: int) -> None:
        self._in_flight.forget(number)
        with suppress(ChannelClosed):
            self._process.channel.send(m.Cancel(number))

    def _is_ready(self, message: m.Ready) -> None:
        # The process may send it unasked.
        with suppress(queue.Full):
            self._ready.put_nowait(message.ready)

    def _pump(self, number: int, request: ExecuteRequest) -> ResponsePump:
        return ResponsePump(self._name, request.respond, partial(self._delivered, number))

    def _delivered(self, number: int, count: int) -> None:
        with suppress(ChannelClosed):
            self._process.channel.send(m.Delivered(number, count))


def unhealthy(name: str, why: str) -> Unavailable:
    return Unavailable(
        f"Stub process '{name}' is not healthy. Reason: {why}; it is being restarted"
    )
