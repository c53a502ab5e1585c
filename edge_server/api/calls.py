"""The calls of all protocols: their counts, the threads that answer them, and their traces."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from concurrent.futures import Executor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from edge_server.errors import EdgeServerError
from edge_server.process.histogram import Histograms

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from edge_server.process.histogram import Distribution
    from edge_server.requests import Respond, ResponseCallback

    Protocol = Literal["grpc", "http"]
    from collections.abc import Iterator

    from edge_server.inference.tracing import Headers, ModelTrace, Tracer
    from edge_server.requests import InferRequest

# A small model takes less than a millisecond, a queue's deadline is seconds away.
BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class RequestMetrics:
    """Counts the inference requests of clients; any thread may call any method."""

    def __init__(self) -> None:
        self._latency = Histograms(BOUNDS_S)
        self._lock = threading.Lock()
        self._failed: Counter[tuple[str, str]] = Counter()

    def responded(self, protocol: Protocol, model: str, began_ns: int) -> None:
        """Count a request that has its response.

        Args:
            model: one that exists: the name of the loaded model, not what the client wrote.
            began_ns: `time.monotonic_ns()` when the request had been read.
        """
        self._latency.observe((model, protocol), (time.monotonic_ns() - began_ns) / 1e9)

    def failed(self, protocol: Protocol, code: str) -> None:
        """Count a request that was refused or has failed.

        Args:
            code: the status that the client gets: `UNAVAILABLE`, `400`.
        """
        with self._lock:
            self._failed[protocol, code] += 1

    def timed(
        self,
        protocol: Protocol,
        model: str,
        respond: Respond,
        code_of: Callable[[EdgeServerError], str],
    ) -> Respond:
        """Return `respond`, counting the request with its last response."""
        began_ns = time.monotonic_ns()

        def pass_on(response: ResponseCallback, final: bool) -> None:
            if isinstance(response, EdgeServerError):
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


class CallThreads(Executor):
    """Runs calls on up to `most` threads, which it starts on demand.

    Between calls a thread waits on its own queue, and the thread that became idle last runs next:
    its caches are still warm, whereas the common queue of a ThreadPoolExecutor wakes the thread
    that has been idle longest. `submit` returns a minimal Future: grpc needs the done callback and
    no more. Both together save a tenth of the server's CPU time for a small request.
    """

    def __init__(self, most: int, name: str) -> None:
        self.moments = CallMoments()
        self._most = most
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[CallTask | None]] = []
        self._waiting: deque[CallTask] = deque()
        self._started = 0
        self._ended = False
        self._next_here = False

    def run_next_here(self) -> None:
        """Have the thread that calls this run the next call that it submits, which ends at once."""
        self._next_here = True

    def submit(  # type: ignore[override]  # grpc wants `add_done_callback` of a future, no more
        self, call: Callable[..., object], /, *args: Any, **kwargs: Any
    ) -> CallTask:
        """Run `call` on an idle thread, on a new one, or on the first that becomes idle; that also
        where the system gives no new one.

        Raises:
            RuntimeError: the executor has been shut down.
        """
        task = CallTask(call, args, kwargs)
        if self._next_here:
            self._next_here = False
            task.run()
            return task
        with self._lock:
            if self._ended:
                raise RuntimeError("no call is run after the shutdown")
            if self._idle:
                self._idle.pop().put(task)
            elif self._started == self._most or not self._start(task):
                self._waiting.append(task)
        return task

    def waiting(self) -> int:
        """Return the number of calls without a thread."""
        return len(self._waiting)

    # The arguments are Executor's; no caller waits.
    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Accept no more calls; the threads end after the accepted calls, which may hang."""
        with self._lock:
            self._ended = True
            for tasks in self._idle:
                tasks.put(None)
            self._idle.clear()

    def _start(self, task: CallTask) -> bool:
        """Run `task` on a new thread; False where the system gives none, an error of which would
        end the thread on which grpc receives all calls."""
        tasks: SimpleQueue[CallTask | None] = SimpleQueue()
        tasks.put(task)
        name = f"{self._name}_{self._started}"
        try:
            threading.Thread(target=self._work, args=(tasks,), name=name, daemon=True).start()
        except RuntimeError:
            return False
        self._started += 1
        return True

    def _work(self, tasks: SimpleQueue[CallTask | None]) -> None:
        while (task := tasks.get()) is not None:
            self.moments.taken_ns = task.taken_ns
            task.run()
            # An idle thread must not keep a request's tensors alive.
            task = None
            with self._lock:
                if self._waiting:
                    tasks.put(self._waiting.popleft())
                elif self._ended:
                    return
                else:
                    self._idle.append(tasks)


class CallTask:
    """A call and its done callbacks: the part of a Future that grpc uses."""

    __slots__ = ("_args", "_call", "_kwargs", "_lock", "_over", "_when_over", "taken_ns")

    def __init__(
        self, call: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._call = call
        self._args = args
        self._kwargs = kwargs
        self._lock = threading.Lock()
        self._when_over: list[Callable[[CallTask], object]] = []
        self._over = False
        self.taken_ns = time.monotonic_ns()

    def run(self) -> None:
        """Run the call; an exception is logged, as grpc's own part of the call let it through."""
        try:
            self._call(*self._args, **self._kwargs)
        except Exception:
            log.exception("a call raised an error that has no status")
        with self._lock:
            self._over = True
        for callback in self._when_over:
            callback(self)

    def add_done_callback(self, callback: Callable[[CallTask], object]) -> None:
        """Call `callback` after the call has ended, at once if it already has."""
        with self._lock:
            if not self._over:
                self._when_over.append(callback)
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


class UnaryTrace:
    """A call with one request that may be traced; made after its request has been read.

    Reading begins with the call's headers, and over gRPC includes waiting for a thread.
    """

    __slots__ = ("_marks", "_read_ns", "_sends", "_taken_ns", "_trace", "_tracer")

    def __init__(
        self, tracer: Tracer, taken_ns: int, marks: Marks = GRPC, read_ns: int = 0
    ) -> None:
        self._tracer = tracer
        self._taken_ns = taken_ns
        self._read_ns = read_ns or time.monotonic_ns()
        self._marks = marks
        self._trace: ModelTrace | None = None
        self._sends = False

    def begin(
        self,
        request: InferRequest,
        when_over: Callable[[Callable[[], None]], bool],
        headers: Headers | None = None,
    ) -> InferRequest:
        """Return `request`, with a trace if the tracer selects it.

        Args:
            when_over: registers a callback for the end of the call; False if the call has ended.
            headers: see `Tracer.sample`.
        """
        trace = self._tracer.sample(request.model_name, request.id, headers)
        if trace is None:
            return request
        self._trace = trace
        _mark_reading(trace, self._marks, self._taken_ns, self._read_ns)
        trace.request.hold()
        if not when_over(self._end):
            self._end()
        return msgspec.structs.replace(request, trace=trace)

    def send(self) -> None:
        """Mark the moment at which the response is on its way."""
        if self._trace is not None:
            self._trace.mark(self._marks.send_start)
            self._sends = True

    def _end(self) -> None:
        if self._trace is not None:
            if self._sends:
                self._trace.mark(self._marks.send_end)
            self._trace.request.release()


class StreamReads:
    """A stream's requests, and the times at which each was awaited and read."""

    def __init__(self, requests: Iterator[bytes]) -> None:
        self._requests = requests
        self.began_ns = 0
        self.read_ns = 0

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        self.began_ns = time.monotonic_ns()
        request = next(self._requests)
        self.read_ns = time.monotonic_ns()
        return request


class CallTraces:
    """Makes the traces of one side's calls.

    Args:
        moments: holds the receive time of the call that runs on a thread; None is unknown.
    """

    def __init__(self, tracer: Tracer, moments: CallMoments | None = None) -> None:
        self.tracer = tracer
        self._moments = moments

    def unary(self) -> UnaryTrace:
        """Return the trace of the call that runs on this thread."""
        return UnaryTrace(self.tracer, 0 if self._moments is None else self._moments.taken_ns)

    def reads(self, requests: Iterator[bytes]) -> Iterator[bytes]:
        """Return `requests`, with the read times that `of_stream` needs."""
        return StreamReads(requests) if self.tracer.traces else requests

    def of_stream(
        self, request: InferRequest, reads: Iterator[bytes], headers: Headers | None = None
    ) -> InferRequest:
        """Return `request`, the last of `reads`, with a trace if the tracer selects it."""
        trace = self.tracer.sample(request.model_name, request.id, headers)
        if trace is None:
            return request
        if isinstance(reads, StreamReads):
            _mark_reading(trace, GRPC, reads.began_ns, reads.read_ns)
        return msgspec.structs.replace(request, trace=trace)


def _mark_reading(trace: ModelTrace, marks: Marks, began_ns: int, read_ns: int) -> None:
    if began_ns:
        trace.mark(marks.read_start, began_ns)
    trace.mark(marks.read_end, read_ns)
