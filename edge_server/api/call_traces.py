"""Traces of requests on their way through gRPC or HTTP: receive, read and send times."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge_server.api.call_threads import CallMoments
    from edge_server.inference.tracing import Headers, ModelTrace, Tracer
    from edge_server.requests import InferRequest


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
