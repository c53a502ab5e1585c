"""One session of a model's process: from its start to its end, whatever ends it."""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from edge_server.backends.contract import Phases
from edge_server.backends.python.arena import ArenaFull
from edge_server.backends.python.calls import SEQUENCE_END, SEQUENCE_START, ModelCalls
from edge_server.backends.python.channel import ChannelClosed, NotUnderstood
from edge_server.backends.python.codes import shortened
from edge_server.backends.python.in_flight import InFlight
from edge_server.backends.python.messages import (
    Answered,
    Asked,
    AskMetric,
    AskModelReady,
    AskReady,
    CallModel,
    CallReturned,
    Cancel,
    CancelCall,
    ChangeMetric,
    Execute,
    Executed,
    Finish,
    LoadModel,
    LogLine,
    MakeMetric,
    ReadyIs,
    Started,
    Taken,
    UnloadModel,
)
from edge_server.backends.python.packing import pack_all, take_back, unpack_all
from edge_server.backends.python.response_pump import ResponsePump
from edge_server.errors import EdgeServerError, InternalError, Unavailable
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edge_server.backends.contract import ExecuteRequest
    from edge_server.backends.python.in_flight import ExecuteBatch
    from edge_server.backends.python.messages import FromChild, Start
    from edge_server.backends.python.metrics import MetricBook
    from edge_server.backends.python.process import ChildProcess
    from edge_server.backends.server_context import ServerContext

log = logging.getLogger(__name__)

READY_S = 5.0
_ALLOWS_MORE = "parameter '%s' allows more"


class ChildSession:
    """Talks to one process, and sends a last response to every request, even if the process dies.

    Args:
        name: of the instance.
        model: the model's name.
        version: the model's version.
        process: just started.
        outputs: the model's outputs, in order.
        metrics: of the model.
        server_context: resolves and loads other models for this model.
        decoupled: responses may follow after the execution.
    """

    def __init__(
        self,
        name: str,
        model: str,
        version: str,
        process: ChildProcess,
        *,
        outputs: Sequence[str],
        metrics: MetricBook,
        server_context: ServerContext,
        decoupled: bool,
    ) -> None:
        self._name = name
        self._model = model
        self._version = version
        self._outputs = outputs
        self._process = process
        self._metrics = metrics
        self._calls = ModelCalls(name, model, process, server_context)
        self._in_flight = (
            InFlight(name, decoupled=True, hear=self._pass_on)
            if decoupled
            else InFlight(name, decoupled=False)
        )
        self._decoupled = decoupled
        self._numbers = itertools.count(1)
        self._asks_ready = False
        self._asking_ready = threading.Lock()
        self._ready: queue.Queue[bool] = queue.Queue(1)

    @property
    def why_over(self) -> str:
        """Why the process accepts no further requests; empty while it does."""
        return self._in_flight.why_over

    def live(self, start: Start, within_s: float, started: Callable[[], None]) -> str:
        """Start the model, then receive messages until the process has ended; return why it ended.

        Args:
            start: the first message.
            within_s: time limit of `initialize`.
            started: called when the process can execute.
        """
        try:
            self._process.start(start)
            self._await_start(within_s, started)
            while True:
                for message in self._process.receive(None):
                    self._take(message)
        except NotUnderstood as error:
            self.end(f"it spoke nonsense: {error}")
        except ChannelClosed:
            pass
        except (ValueError, LookupError) as error:
            # E.g. a tensor outside the place that its message names, or a metric that was never
            # made.
            self.end(f"it spoke nonsense: {error}")
        except Exception as error:
            log.exception("model %s: instance %s: unforeseen error", self._model, self._name)
            self.end(f"the server could not take what it sent: {error!r}")
        how = self._process.close()
        self.end(how)
        self._calls.close()
        return self.why_over

    def end(self, why: str) -> None:
        """End the session: kill the process and fail all requests."""
        self._process.kill()
        self._in_flight.end(why)

    def finish(self, within_s: float) -> None:
        """Let the model finalize, then end the process; kill it after `within_s`."""
        until = time.monotonic() + within_s
        with suppress(ChannelClosed):
            self._process.channel.send(Finish(), within_s)
            if not self._process.wait(max(0.0, until - time.monotonic())):
                log.warning(
                    "model %s: instance %s was killed: 'finalize' did not return within %g s",
                    self._model,
                    self._name,
                    within_s,
                )
        self.end("it is closed")

    def execute(self, requests: Sequence[ExecuteRequest], limit_s: float, least_s: float) -> Phases:
        """Execute a batch; return when the batch is done or the process has ended.

        Args:
            requests: the batch.
            limit_s: time limit of the execution.
            least_s: time that the execution gets even when no request waits for it any more.
        """
        began = time.monotonic()
        began_ns = time.monotonic_ns()
        batch = self._send(requests)
        sent_ns = time.monotonic_ns()
        if batch is not None:
            given_up_at = max(latest_deadline(requests), began + least_s)
            until = min(given_up_at, began + limit_s)
            if not batch.done.wait(until - time.monotonic()):
                took_s = time.monotonic() - began
                more = "" if until == given_up_at else f"; {_ALLOWS_MORE % 'execution_timeout_s'}"
                self.end(
                    f"it was killed: 'execute' did not return within {took_s:.1f} s{more}"
                    + self._calls.waits_for()
                )
        after_ns = time.monotonic_ns() - sent_ns
        # The process may have begun before this thread noticed that the whole batch was sent.
        infer_ns = min(batch.execute_ns, after_ns) if batch is not None else 0
        return Phases(sent_ns - began_ns, infer_ns, after_ns - infer_ns)

    def not_ready_reason(self) -> str:
        """Return why the model cannot respond now; empty when it can."""
        if self.why_over or not self._asks_ready or self._in_flight.callers():
            # A process that executes is ready; it could respond to the question only after its
            # execution.
            return self.why_over
        late = f"is_ready did not return within {READY_S:g} s"
        if not self._asking_ready.acquire(timeout=READY_S):
            return late
        try:
            while not self._ready.empty():
                self._ready.get_nowait()
            self._process.channel.send(AskReady())
            return "" if self._ready.get(timeout=READY_S) else "is_ready says no"
        except ChannelClosed:
            return "the process is gone"
        except queue.Empty:
            # An execution may have started in between.
            return "" if self._in_flight.callers() else late
        finally:
            self._asking_ready.release()

    def _await_start(self, within_s: float, started: Callable[[], None]) -> None:
        until = time.monotonic() + within_s
        while not self.why_over:
            left_s = until - time.monotonic()
            messages = self._process.receive(max(0.0, left_s))
            if not messages and left_s <= 0:
                self.end(
                    f"it was killed: 'initialize' did not return within {within_s:g} s; "
                    f"{_ALLOWS_MORE % 'initialize_timeout_s'}{self._calls.waits_for()}"
                )
                return
            for message in messages:
                if not isinstance(message, Started):
                    self._take(message)
                elif message.failure:
                    self.end(shortened(message.failure))
                else:
                    self._asks_ready = message.asks_ready
                    started()
            if any(isinstance(message, Started) for message in messages):
                return

    def _send(self, requests: Sequence[ExecuteRequest]) -> ExecuteBatch | None:
        """Send the batch; return None where every request already has its last response."""
        asked: list[Asked] = []
        error: EdgeServerError | None = None
        try:
            asked.extend(self._ask(next(self._numbers), request) for request in requests)
        except ArenaFull as full:
            error = InternalError(
                f"Failed to process the request(s) for model instance '{self._name}', message: the "
                f"inputs: {full}; parameter 'shared_memory_limit_mib' allows more"
            )
        number, batch = next(self._numbers), None
        if error is None:
            batch = self._in_flight.add(number, [one.number for one in asked], requests)
        if batch is None:
            take_back((place for one in asked for place in one.inputs), self._process.outbox)
            if self.why_over:
                error = unhealthy(self._name, self.why_over)
            for request in requests:
                request.respond(error, True)
            return None
        try:
            self._process.channel.send(Execute(number, asked))
        except ChannelClosed:
            self._process.kill()
            return batch
        for one, request in zip(asked, requests, strict=True):
            self._watch(one.number, request)
        return batch

    def _ask(self, number: int, request: ExecuteRequest) -> Asked:
        theirs = request.request
        contents = [(name, t.datatype, t.array) for name, t in request.host_inputs().items()]
        place = theirs.sequence
        flags = 0
        if place is not None:
            flags = SEQUENCE_START * place.start + SEQUENCE_END * place.end
        return Asked(
            number,
            theirs.id,
            pack_all(contents, self._process.outbox),
            [name for name in self._outputs if name in request.outputs],
            0 if place is None else place.id,
            flags,
            theirs.timeout_us,
            dict(theirs.parameters),
            self._model,
            self._version,
        )

    def _watch(self, number: int, request: ExecuteRequest) -> None:
        """Tell the model when the request's client is gone."""
        if request.request.cancellation is None:
            return

        def tell() -> None:
            if self._in_flight.waits(number):
                with suppress(ChannelClosed):
                    self._process.channel.send(Cancel(number))

        request.request.cancellation.when_cancelled(tell)

    def _take(self, message: FromChild) -> None:
        if isinstance(message, Answered):
            self._answered(message)
        elif isinstance(message, Executed):
            for answered in message.answers:
                self._answered(answered)
            self._in_flight.executed(message)
        elif isinstance(message, CallModel):
            self._calls.call(message, self._in_flight.callers())
        elif isinstance(message, CancelCall):
            self._calls.cancel(message.call)
        elif isinstance(message, LogLine):
            self._process.log.line(message.level, message.text)
        elif isinstance(message, ReadyIs):
            # The process may send it unasked.
            with suppress(queue.Full):
                self._ready.put_nowait(message.ready)
        elif isinstance(message, ChangeMetric):
            self._metrics.change(message.metric, message.action, message.value)
        elif isinstance(message, AskModelReady):
            self._calls.ask_ready(message, self._in_flight.callers())
        elif isinstance(message, LoadModel):
            self._calls.load(message)
        elif isinstance(message, UnloadModel):
            self._calls.unload(message)
        elif not isinstance(message, Started):
            self._process.channel.send(self._metric(message))

    def _metric(self, message: MakeMetric | AskMetric) -> CallReturned:
        try:
            if isinstance(message, AskMetric):
                return CallReturned(message.call, self._metrics.value(message.metric))
            number = self._metrics.make(
                message.name, message.description, message.kind, message.labels, message.buckets
            )
        except (ValueError, LookupError) as error:
            return CallReturned(message.call, failure=str(error))
        return CallReturned(message.call, float(number))

    def _answered(self, message: Answered) -> None:
        # Unpack even the responses of finished requests, so that their memory becomes free.
        places = [] if message.answer is None else message.answer.outputs
        arrays = unpack_all(places, self._process.inbox)
        tensors = {name: Tensor(array) for name, array in arrays.items()}
        waited_for = self._in_flight.answer(message, tensors)
        if self._decoupled and not (waited_for or message.final):
            self._taken(message.number, 1)

    def _pass_on(self, number: int, request: ExecuteRequest) -> ResponsePump:
        return ResponsePump(self._name, request.respond, partial(self._taken, number))

    def _taken(self, number: int, count: int) -> None:
        with suppress(ChannelClosed):
            self._process.channel.send(Taken(number, count))


def latest_deadline(requests: Sequence[ExecuteRequest]) -> float:
    """Return when the last request's deadline passes; infinity where a request has no deadline."""
    deadlines = [request.request.deadline for request in requests]
    return max(math.inf if deadline is None else deadline for deadline in deadlines)


def unhealthy(name: str, why: str) -> Unavailable:
    """Return the error of a request that arrives while no process can execute it."""
    return Unavailable(
        f"Stub process '{name}' is not healthy. Reason: {why}; it is being restarted"
    )
