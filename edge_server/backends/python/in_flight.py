"""The requests that a process has received and not yet finished, and the delivery of responses."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from edge_server.backends.python.messages import MOST_UNDELIVERED, error_of, shortened
from edge_server.errors import DeadlineExceeded, EdgeServerError, InternalError
from edge_server.process.threads import start_thread
from edge_server.requests import NO_PARAMETERS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edge_server.backends.contract import ExecuteRequest, RespondTensors, Tensors
    from edge_server.backends.python.messages import Executed, Responded
    from edge_server.requests import Parameters

log = logging.getLogger(__name__)

# Deliveries are reported to the model in batches of this size.
_LOT = 16


@dataclass(eq=False)
class ExecuteBatch:
    """The requests of one `execute`: the numbers of the `unfinished` ones without a last response,
    and of the `answered` ones that have another. `done` once the thread that submitted them need
    not wait."""

    requests: Sequence[ExecuteRequest]
    unfinished: set[int]
    answered: set[int] = field(default_factory=set)
    executed: bool = False
    execute_ns: int = 0
    done: threading.Event = field(default_factory=threading.Event)


class _Request(NamedTuple):
    request: ExecuteRequest
    batch: ExecuteBatch
    respond: RespondTensors


class InFlight:
    """Every accepted request gets exactly one last response, in every case. `forget` is called with
    the number of a request that will not run again. Responses of a decoupled model may follow after
    the execution: `pump` returns the receiver of those to a request, by its number."""

    def __init__(
        self,
        name: str,
        pump: Callable[[int, ExecuteRequest], RespondTensors] | None = None,
        forget: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._name = name
        self._forget = forget
        self._pump = pump
        self._lock = threading.Lock()
        self._batches: dict[int, ExecuteBatch] = {}
        self._requests: dict[int, _Request] = {}
        # Number of each request that runs again, by the request's own `respond`.
        self._again: dict[RespondTensors, int] = {}
        # Why no further requests are accepted; empty while requests are accepted.
        self.why_over = ""

    def add(
        self, number: int, numbers: Sequence[int], requests: Sequence[ExecuteRequest]
    ) -> ExecuteBatch | None:
        batch = ExecuteBatch(requests, set(numbers))
        with self._lock:
            if self.why_over:
                return None
            self._batches[number] = batch
            for one, request in zip(numbers, requests, strict=True):
                before = self._requests.get(one)
                if before is not None:
                    respond = before.respond
                else:
                    respond = request.respond if self._pump is None else self._pump(one, request)
                self._requests[one] = _Request(request, batch, respond)
        return batch

    def number_again(self, request: ExecuteRequest) -> int | None:
        with self._lock:
            return self._again.pop(request.respond, None)

    def forget(self, number: int) -> None:
        """Drop a request that was to run again and will not; its caller has another response."""
        with self._lock:
            request = self._requests.pop(number, None)
            if request is not None:
                self._again.pop(request.request.respond, None)

    def waits(self, number: int) -> bool:
        return number in self._requests

    def callers(self) -> Sequence[ExecuteRequest]:
        """Return the requests for which a call to another model may be made, as far as the daemon
        can know."""
        with self._lock:
            batches = self._batches.values()
            return tuple(request for batch in batches for request in batch.requests)

    def responded(self, message: Responded, tensors: Tensors) -> bool:
        """Deliver a response; return False and drop it where no request waits for it."""
        response = message.response
        failure = response.failure if response is not None else None
        final = message.final or failure is not None
        with self._lock:
            request = self._requests.get(message.number)
            if request is not None and final:
                del self._requests[message.number]
                self._again.pop(request.request.respond, None)
        if request is None:
            return False
        if failure is not None:
            request.respond(error_of(failure), True)
        elif response is None:
            request.respond(None, final)
        else:
            request.respond(tensors, final, response.parameters)
        if not final and self._pump is None:
            request.batch.answered.add(message.number)
        if final:
            request.batch.unfinished.discard(message.number)
            self._check_done(request.batch)
        return True

    def executed(self, message: Executed) -> None:
        """Finish a batch's execution; each request without a last response gets the failure."""
        batch = self._batches.get(message.batch)
        if batch is None:
            return
        batch.execute_ns = message.execute_ns
        batch.executed = True
        for number in message.rescheduled:
            self._reschedule(number, batch)
        if message.failure:
            with self._lock:
                left = {n: self._requests.pop(n) for n in batch.unfinished if n in self._requests}
            batch.unfinished.clear()
            if left.keys() <= batch.answered:
                # Every request has its response, so no client learns of it.
                log.error("instance %s: %s", self._name, shortened(message.failure))
            for number, request in left.items():
                answered = number in batch.answered
                failure = None if answered else InternalError(shortened(message.failure))
                request.respond(failure, True)
        self._check_done(batch)

    def _reschedule(self, number: int, batch: ExecuteBatch) -> None:
        with self._lock:
            request = self._requests.get(number)
            if request is None or number not in batch.unfinished:
                return
            batch.unfinished.discard(number)
            reschedule = request.request.reschedule
            if reschedule is None:
                del self._requests[number]
            else:
                self._again[request.request.respond] = number
        if reschedule is None:
            text = (
                f"instance '{self._name}' wants to run a request again, which needs "
                "sequence_batching { iterative_sequence: true } in the model's configuration"
            )
            request.respond(InternalError(text), True)
        else:
            reschedule(partial(self._forget, number))

    def end(self, why: str) -> None:
        """Fail all requests with `why`, once. A request whose deadline has passed gets
        DeadlineExceeded instead."""
        with self._lock:
            if self.why_over:
                return
            self.why_over = why
            requests, self._requests = self._requests, {}
            self._again.clear()
            batches, self._batches = self._batches, {}
        now = time.monotonic()
        for one in requests.values():
            deadline = one.request.request.deadline
            error: EdgeServerError = InternalError(
                f"Stub process '{self._name}' is not healthy. Reason: {why}"
            )
            if deadline is not None and now >= deadline:
                error = DeadlineExceeded(f"the request's deadline passed while '{self._name}' ran")
            one.respond(error, True)
        for batch in batches.values():
            batch.done.set()

    def _check_done(self, batch: ExecuteBatch) -> None:
        over = batch.executed and not batch.unfinished
        if over:
            with self._lock:
                self._batches = {n: b for n, b in self._batches.items() if b is not batch}
        if over or (batch.executed and self._pump is not None):
            batch.done.set()


def latest_deadline(requests: Sequence[ExecuteRequest]) -> float:
    deadlines = [request.request.deadline for request in requests]
    return max(math.inf if deadline is None else deadline for deadline in deadlines)


class ResponsePump:
    """A `RespondTensors` that delivers the responses to one request on its own thread: a client
    that reads slowly delays only its own request. `delivered` gets the number delivered since its
    last call."""

    def __init__(
        self, name: str, respond: RespondTensors, delivered: Callable[[int], None]
    ) -> None:
        self._name = name
        self._respond = respond
        self._delivered = delivered
        self._responses: queue.SimpleQueue[
            tuple[Tensors | EdgeServerError | None, bool, Parameters]
        ] = queue.SimpleQueue()
        self._has_thread = False

    def __call__(
        self,
        answer: Tensors | EdgeServerError | None,
        final: bool,
        parameters: Parameters = NO_PARAMETERS,
    ) -> None:
        if not final and self._responses.qsize() > 2 * MOST_UNDELIVERED:
            raise ValueError(f"more than {2 * MOST_UNDELIVERED} undelivered responses to a request")
        self._responses.put((answer, final, parameters))
        self._has_thread = self._has_thread or start_thread(f"responses of {self._name}", self._run)
        if not self._has_thread:
            log.warning("instance %s: delivers a response by itself: no thread for it", self._name)
            self._deliver_one()
            self._delivered(1)

    def _run(self) -> None:
        final, count = False, 0
        while not final:
            final = self._deliver_one()
            count += 1
            if count == _LOT:
                self._delivered(count)
                count = 0

    def _deliver_one(self) -> bool:
        response, final, parameters = self._responses.get()
        try:
            self._respond(response, final, parameters)
        except Exception:
            # The following responses, and the last of all, must still be delivered.
            log.exception("instance %s: a response could not be delivered", self._name)
        return final
