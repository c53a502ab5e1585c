"""What is to be told of a traced request on its way through gRPC."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from edge_server.api.grpc.call_threads import CallMoments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge_server.inference.tracing.traced_request import ModelTrace
    from edge_server.inference.tracing.tracer import Tracer
    from edge_server.requests import InferRequest


class UnaryTrace:
    """A ModelInfer that may be traced; made when its request has been read.

    Reading begins when the call is there, with its headers, and includes waiting for a thread.
    """

    __slots__ = ("_read_ns", "_sends", "_taken_ns", "_trace", "_tracer")

    def __init__(self, tracer: Tracer, taken_ns: int) -> None:
        self._tracer = tracer
        self._taken_ns = taken_ns
        self._read_ns = time.monotonic_ns()
        self._trace: ModelTrace | None = None
        self._sends = False

    def begin(
        self, request: InferRequest, when_over: Callable[[Callable[[], None]], bool]
    ) -> InferRequest:
        """`request`, with a trace where it is chosen for one.

        Args:
            when_over: has something called when the call is over; False where it is already.
        """
        trace = self._tracer.sample(request.model_name, request.id)
        if trace is None:
            return request
        self._trace = trace
        _mark_reading(trace, self._taken_ns, self._read_ns)
        trace.request.hold()
        if not when_over(self._end):
            self._end()
        return msgspec.structs.replace(request, trace=trace)

    def send(self) -> None:
        """From here on the answer is gRPC's."""
        if self._trace is not None:
            self._trace.mark("GRPC_SEND_START")
            self._sends = True

    def _end(self) -> None:
        if self._trace is not None:
            if self._sends:
                self._trace.mark("GRPC_SEND_END")
            self._trace.request.release()


class StreamReads:
    """A stream's requests, and when each was waited for and read."""

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
    """Where the servicer has its traces from.

    Attributes:
        moments: tells when a call came; None where nothing will ever be traced.
    """

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.moments = CallMoments() if tracer.file_name else None

    def unary(self) -> UnaryTrace:
        """For the call that runs on this thread."""
        return UnaryTrace(self.tracer, 0 if self.moments is None else self.moments.taken_ns)

    def reads(self, requests: Iterator[bytes]) -> Iterator[bytes]:
        """`requests`; what `of_stream` has to know of them is kept."""
        return requests if self.moments is None else StreamReads(requests)

    def of_stream(self, request: InferRequest, reads: Iterator[bytes]) -> InferRequest:
        """`request`, the last of `reads`, with a trace where it is chosen for one."""
        trace = self.tracer.sample(request.model_name, request.id)
        if trace is None:
            return request
        if isinstance(reads, StreamReads):
            _mark_reading(trace, reads.began_ns, reads.read_ns)
        return msgspec.structs.replace(request, trace=trace)


def _mark_reading(trace: ModelTrace, began_ns: int, read_ns: int) -> None:
    if began_ns:
        trace.mark("GRPC_WAITREAD_START", began_ns)
    trace.mark("GRPC_WAITREAD_END", read_ns)
