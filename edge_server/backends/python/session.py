"""One session of a model's process: from its start to its end, whatever ends it."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from edge_server.backends.contract import Phases
from edge_server.backends.python import messages as m
from edge_server.backends.python.calls import ModelCalls
from edge_server.backends.python.in_flight import InFlight, ResponsePump, latest_deadline
from edge_server.backends.python.shared_memory import ArenaFull, pack_all, take_back, unpack_all
from edge_server.errors import EdgeServerError, InternalError, Unavailable
from edge_server.process.channel import ChannelClosed, MessageTooLong, NotUnderstood
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edge_server.backends.contract import ExecuteRequest
    from edge_server.backends.python.context import ModelContext
    from edge_server.backends.python.in_flight import ExecuteBatch
    from edge_server.backends.python.process import ChildProcess

log = logging.getLogger(__name__)

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
    def up(self) -> bool:
        return self._is_started and not self.why_over

    def run(self, start: m.Start, started: Callable[[], None]) -> str:
        """Start the model, receive messages until the process has ended; return why it ended."""
        try:
            self._start(start, started)
            while True:
                for message in self._process.receive():
                    self._take(message)
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
        """Execute a batch; return when the batch is done or the process has ended.

        The process is killed when the execution has taken `execution_timeout_s`, or without that
        parameter has used no processor time for `IDLE_S` or has taken `LONGEST_S`, or when no
        request waits for it any more.

        Args:
            progressed: called every few seconds while the execution is within these limits.
        """
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
        cpu_s, worked_at, warned = self._process.cpu_s(), began, False
        while not batch.done.wait(max(0.0, min(_LOOK_S, until - time.monotonic()))):
            now = time.monotonic()
            if now >= until:
                more = "" if until == given_up_at else f"; {_ALLOWS_MORE % 'execution_timeout_s'}"
                return f"did not return within {now - began:.1f} s{more}"
            progressed()
            used_s = self._process.cpu_s()
            if used_s - cpu_s >= _WORK_S or self._calls.under_way:
                cpu_s, worked_at = used_s, now
            if limit_s is not None:
                continue
            if now - worked_at >= IDLE_S:
                return (
                    f"has used no processor time for {now - worked_at:.0f} s, so it hangs; "
                    f"{_ALLOWS_MORE % 'execution_timeout_s'}"
                )
            if now - began >= IDLE_S and not warned:
                warned = True
                log.warning(
                    "model %s: instance %s: 'execute' has computed for %.0f s and is killed after "
                    "%g s; parameter 'execution_timeout_s' sets the limit",
                    self._model,
                    self._name,
                    now - began,
                    LONGEST_S,
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
        response = self._process.start(start, within_s, self._take)
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
        error: EdgeServerError | None = None
        again = [self._in_flight.number_again(request) for request in requests]
        try:
            messages.extend(
                self._message(number or next(self._numbers), request)
                for number, request in zip(again, requests, strict=True)
            )
        except ArenaFull as full:
            error = InternalError(
                f"Failed to process the request(s) for model instance '{self._name}', message: the "
                f"inputs: {full}; parameter 'shared_memory_limit_mib' allows more"
            )
        number, batch = next(self._numbers), None
        if error is None:
            batch = self._in_flight.add(number, [each.number for each in messages], requests)
        if batch is None:
            for message in messages:
                take_back(message.inputs, self._process.outbox)
            for number in filter(None, again):
                self._in_flight.forget(number)
            if self.why_over:
                error = unhealthy(self._name, self.why_over)
            for request in requests:
                request.respond(error, True)
            return None
        try:
            self._process.channel.send(m.Execute(number, messages))
        except ChannelClosed:
            self._process.kill()
            return batch
        except MessageTooLong as too_long:
            for message in messages:
                take_back(message.inputs, self._process.outbox)
            self._in_flight.executed(m.Executed(number, 0, f"model '{self._model}': {too_long}"))
            return batch
        for message, request in zip(messages, requests, strict=True):
            if message.number not in again:
                self._pass_on_cancellation(message.number, request)
        return batch

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

    def _take(self, message: m.FromChild) -> None:
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
