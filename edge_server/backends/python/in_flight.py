"""The requests that a process has received and not yet finished."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from edge_server.backends.python.codes import error_of, shortened
from edge_server.errors import DeadlineExceeded, EdgeServerError, InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edge_server.backends.contract import ExecuteRequest, RespondTensors, Tensors
    from edge_server.backends.python.messages import Answered, Executed


class ExecuteBatch:
    """The requests of one `execute`.

    Attributes:
        unanswered: numbers of the requests without a last response.
        executed: `execute` has returned.
        execute_ns: duration of `execute`.
        done: set when the thread that submitted the batch need not wait any longer.
    """

    def __init__(self, requests: Sequence[ExecuteRequest]) -> None:
        self.requests = requests
        self.unanswered: set[int] = set()
        self.executed = False
        self.execute_ns = 0
        self.done = threading.Event()


class _Asked(NamedTuple):
    request: ExecuteRequest
    batch: ExecuteBatch
    respond: RespondTensors


def _itself(_number: int, request: ExecuteRequest) -> RespondTensors:
    return request.respond


class InFlight:
    """Every accepted request gets exactly one last response, in every case.

    Args:
        name: of the instance, for error texts.
        decoupled: responses may follow after the execution.
        hear: returns the receiver of a request's responses, by its number.
    """

    def __init__(
        self,
        name: str,
        *,
        decoupled: bool,
        hear: Callable[[int, ExecuteRequest], RespondTensors] = _itself,
    ) -> None:
        self._name = name
        self._decoupled = decoupled
        self._hear = hear
        self._lock = threading.Lock()
        self._batches: dict[int, ExecuteBatch] = {}
        self._asked: dict[int, _Asked] = {}
        self._why_over = ""

    @property
    def why_over(self) -> str:
        """Why no further requests are accepted; empty while requests are accepted."""
        return self._why_over

    def add(
        self, number: int, asked: Sequence[int], requests: Sequence[ExecuteRequest]
    ) -> ExecuteBatch | None:
        """Accept batch `number`, whose requests have the numbers `asked`; return None once
        ended."""
        batch = ExecuteBatch(requests)
        with self._lock:
            if self._why_over:
                return None
            self._batches[number] = batch
            batch.unanswered.update(asked)
            for one, request in zip(asked, requests, strict=True):
                self._asked[one] = _Asked(request, batch, self._hear(one, request))
        return batch

    def waits(self, number: int) -> bool:
        """Return whether the request still lacks its last response."""
        return number in self._asked

    def callers(self) -> Sequence[ExecuteRequest]:
        """Return the requests for which a call to another model may be made, as far as the daemon
        can know."""
        with self._lock:
            return next((batch.requests for batch in self._batches.values()), ())

    def answer(self, message: Answered, tensors: Tensors) -> bool:
        """Deliver a response; return False and drop it where no request waits for it."""
        answer = message.answer
        failure = answer.failure if answer is not None else None
        final = message.final or failure is not None
        with self._lock:
            asked = self._asked.get(message.number)
            if asked is not None and final:
                del self._asked[message.number]
        if asked is None:
            return False
        if failure is not None:
            asked.respond(error_of(failure.code, failure.text), True)
        elif answer is None:
            asked.respond(None, final)
        else:
            asked.respond(tensors, final, answer.parameters)
        if final:
            asked.batch.unanswered.discard(message.number)
            self._look_if_over(asked.batch)
        return True

    def executed(self, message: Executed) -> None:
        """Finish a batch's execution; each request without a last response gets the failure."""
        batch = self._batches.get(message.batch)
        if batch is None:
            return
        batch.execute_ns = message.execute_ns
        batch.executed = True
        if message.failure:
            with self._lock:
                left = [self._asked.pop(n) for n in batch.unanswered if n in self._asked]
            batch.unanswered.clear()
            for asked in left:
                asked.respond(InternalError(shortened(message.failure)), True)
        self._look_if_over(batch)

    def end(self, why: str) -> None:
        """Fail all requests with `why`, once. A request whose deadline has passed gets
        DeadlineExceeded instead."""
        with self._lock:
            if self._why_over:
                return
            self._why_over = why
            asked, self._asked = self._asked, {}
            batches, self._batches = self._batches, {}
        now = time.monotonic()
        for one in asked.values():
            one.respond(self._error(one.request, now), True)
        for batch in batches.values():
            batch.done.set()

    def _look_if_over(self, batch: ExecuteBatch) -> None:
        over = batch.executed and not batch.unanswered
        if over:
            with self._lock:
                self._batches = {n: b for n, b in self._batches.items() if b is not batch}
        if over or (batch.executed and self._decoupled):
            batch.done.set()

    def _error(self, request: ExecuteRequest, now: float) -> EdgeServerError:
        deadline = request.request.deadline
        if deadline is not None and now >= deadline:
            return DeadlineExceeded(f"the request's deadline passed while '{self._name}' ran")
        return InternalError(
            f"Stub process '{self._name}' is not healthy. Reason: {self._why_over}"
        )
