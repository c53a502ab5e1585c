"""The calls of all protocols: statuses, counts, the threads that answer them, and traces."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from concurrent.futures import Executor
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from edge_server import errors
from edge_server.process.histogram import Histograms
from edge_server.process.threads import ThreadPool

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from edge_server.process.histogram import Distribution
    from edge_server.requests import Respond, ResponseCallback

    Protocol = Literal["grpc", "http"]
    from edge_server.inference.tracing import Headers, Tracer
    from edge_server.requests import InferRequest


class Status(NamedTuple):
    """The name of gRPC's status code, and the code of HTTP (Triton's)."""

    grpc: str
    http: int


STATUS: Mapping[type[errors.EdgeServerError], Status] = MappingProxyType(
    {
        errors.InvalidRequest: Status("INVALID_ARGUMENT", 400),
        errors.ModelConfigError: Status("INVALID_ARGUMENT", 400),
        errors.ModelLoadError: Status("INVALID_ARGUMENT", 400),
        errors.NotFound: Status("NOT_FOUND", 404),
        errors.Unavailable: Status("UNAVAILABLE", 503),
        errors.Unsupported: Status("UNIMPLEMENTED", 501),
        errors.AlreadyExists: Status("ALREADY_EXISTS", 400),
        errors.OutOfRange: Status("OUT_OF_RANGE", 400),
        errors.Unauthenticated: Status("UNAUTHENTICATED", 401),
        errors.PermissionDenied: Status("PERMISSION_DENIED", 403),
        errors.LimitReached: Status("RESOURCE_EXHAUSTED", 429),
        errors.Cancelled: Status("CANCELLED", 400),
        errors.DeadlineExceeded: Status("DEADLINE_EXCEEDED", 504),
        errors.InternalError: Status("INTERNAL", 500),
        errors.UnknownError: Status("UNKNOWN", 400),
    }
)


def http_status(error: errors.EdgeServerError) -> int:
    """Return the status of `error`; one without an entry is 500."""
    status = STATUS.get(type(error))
    return 500 if status is None else status.http


# A small model takes less than a millisecond, a queue's deadline is seconds away.
BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class RequestMetrics:
    """Counts the inference requests of clients; any thread may call any method."""

    def __init__(self) -> None:
        self._latency = Histograms(BOUNDS_S)
        self._lock = threading.Lock()
        self._failed: Counter[tuple[str, str]] = Counter()

    def responded(self, protocol: Protocol, model: str, began_ns: int) -> None:
        """Count a request to the loaded `model` that has its response; `began_ns` is when it had
        been read.
        """
        self._latency.observe({(model, protocol): (time.monotonic_ns() - began_ns) / 1e9})

    def failed(self, protocol: Protocol, code: str) -> None:
        """Count a request that was refused or has failed with the status `code`: `UNAVAILABLE`,
        `400`.
        """
        with self._lock:
            self._failed[protocol, code] += 1

    def timed(
        self,
        protocol: Protocol,
        model: str,
        respond: Respond,
        code_of: Callable[[errors.EdgeServerError], str],
    ) -> Respond:
        """Return `respond`, counting the request with its last response."""
        began_ns = time.monotonic_ns()

        def pass_on(response: ResponseCallback, final: bool) -> None:
            if isinstance(response, errors.EdgeServerError):
                self.failed(protocol, code_of(response))
            elif final:
                self.responded(protocol, model, began_ns)
            respond(response, final)

        return pass_on

    def latencies(self, models: Collection[str]) -> Mapping[tuple[str, ...], Distribution]:
        """Return (model, protocol) → latency of those of `models`; the others are forgotten."""
        found = self._latency.distributions()
        for gone in {model for model, _ in found} - set(models):
            self._latency.forget(gone)
        return {labels: each for labels, each in found.items() if labels[0] in models}

    def failures(self) -> Mapping[tuple[str, str], int]:
        """Return (protocol, code) → number of requests."""
        with self._lock:
            return dict(self._failed)


log = logging.getLogger(__name__)


class CallMoments(threading.local):
    """Receive time of this thread's call, `time.monotonic_ns()`; 0 is unknown."""

    taken_ns = 0


class CallThreads(ThreadPool["CallTask"], Executor):
    """The pool that runs calls: an Executor of which grpc uses what is here.

    `submit` returns a minimal Future: grpc needs the done callback and no more. With the order in
    which threads run, that saves a tenth of the server's CPU time for a small request.
    """

    def __init__(self, most: int, name: str) -> None:
        super().__init__(most, name)
        self.moments = CallMoments()
        self._next_here = False

    def run_next_here(self) -> None:
        """Have the thread that calls this run the next call that it submits, which ends at once."""
        self._next_here = True

    def submit(  # type: ignore[override]  # grpc wants `add_done_callback` of a future, no more
        self, call: Callable[..., object], /, *args: Any, **kwargs: Any
    ) -> CallTask:
        """Run `call` on an idle thread, on a new one, or on the first that becomes idle.

        Raises: RuntimeError: the executor has been shut down.
        """
        task = CallTask(call, args, kwargs, self.moments)
        if self._next_here:
            self._next_here = False
            task.run()
            return task
        with self.lock:
            if self._closed:
                raise RuntimeError("no call is run after the shutdown")
            # An error, where the system gives no thread, would end the one on which grpc receives
            # all calls.
            if not self._offer(task):
                self.waiting.append(task)
        return task

    # The arguments are Executor's; no caller waits.
    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        self.close(0.0)


class CallTask(msgspec.Struct, eq=False):
    """A call and its done callbacks: the part of a Future that grpc uses."""

    call: Callable[..., object]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    moments: CallMoments
    taken_ns: int = msgspec.field(default_factory=time.monotonic_ns)
    lock: threading.Lock = msgspec.field(default_factory=threading.Lock)
    when_over: list[Callable[[CallTask], object]] = []
    over: bool = False

    def run(self) -> None:
        """Run the call; an exception is logged, as grpc's own part of the call let it through."""
        self.moments.taken_ns = self.taken_ns
        try:
            self.call(*self.args, **self.kwargs)
        except Exception:
            log.exception("a call raised an error that has no status")
        with self.lock:
            self.over = True
        for callback in self.when_over:
            callback(self)

    def add_done_callback(self, callback: Callable[[CallTask], object]) -> None:
        """Call `callback` after the call has ended, at once if it already has."""
        with self.lock:
            if not self.over:
                self.when_over.append(callback)
                return
        callback(self)


class Marks(NamedTuple):
    """Triton's names of the moments of a call."""

    read_start: str
    read_end: str
    send_start: str
    send_end: str


GRPC = Marks("GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END")
HTTP = Marks("HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END")


def traced(
    tracer: Tracer,
    request: InferRequest,
    marks: Marks,
    reading_ns: tuple[int, int],
    headers: Headers,
    *,
    when_over: Callable[[Callable[[], None]], bool] | None = None,
) -> InferRequest:
    """Return `request`, with a trace if the tracer selects it.

    The trace's mark `send_start` is for the caller to set.

    Args:
        reading_ns: when reading the request began, with the call's headers, and when it ended; 0 is
            unknown.
        headers: see `Tracer.sample`.
        when_over: registers a callback for the end of the call, until which the trace lasts; False
            if the call has ended. None for a stream's request.
    """
    trace = tracer.sample(request.model_name, request.id, headers)
    if trace is None:
        return request
    began_ns, read_ns = reading_ns
    if began_ns:
        trace.mark(marks.read_start, began_ns)
    trace.mark(marks.read_end, read_ns)
    if when_over is not None:
        trace.request.hold()

        def end() -> None:
            if marks.send_start in dict(trace.moments):
                trace.mark(marks.send_end)
            trace.request.release()

        if not when_over(end):
            end()
    return msgspec.structs.replace(request, trace=trace)
