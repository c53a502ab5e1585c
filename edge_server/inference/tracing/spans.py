"""Spans of requests and frames, as OpenTelemetry has them; made when what they show is over."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from edge_server.inference.tracing.traced_request import ModelTrace, TracedRequest

    # The metadata of a call, or the headers of an HTTP request; read only where they are needed.
    Headers = Callable[[], Iterable[tuple[str, str | bytes]]]

_PHASES = (
    ("compute_input", "COMPUTE_START", "COMPUTE_INPUT_END"),
    ("compute_infer", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"),
    ("compute_output", "COMPUTE_OUTPUT_START", "COMPUTE_END"),
)
# Of one model in a request: itself, queue, compute and its phases.
_MOST_OF_A_MODEL = 6


class SpanContext(NamedTuple):
    """The identity of a span, which its children name as their parent.

    Attributes:
        trace_id: 128 bits, not 0.
        span_id: 64 bits, not 0.
        sampled: the caller records this trace.
        state: the caller's `tracestate`, which goes on with its trace.
    """

    trace_id: int
    span_id: int
    sampled: bool = True
    state: str = ""

    @classmethod
    def new(cls, parent: SpanContext | None = None) -> SpanContext:
        """Return the identity of a new span: a child of `parent`, or the first of a trace."""
        span_id = random.getrandbits(64) or 1
        if parent is not None:
            return parent._replace(span_id=span_id, sampled=True)
        return cls(random.getrandbits(128) or 1, span_id)


class Span(NamedTuple):
    """One span that is over.

    Attributes:
        parent: None for the first of a trace.
        begin_ns, end_ns: `time.monotonic_ns`.
        is_server: a request that came from outside.
        error: why it failed; empty where it did not.
        events: name and time of moments within the span.
    """

    name: str
    context: SpanContext
    parent: SpanContext | None
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, str | int] = {}
    is_server: bool = False
    error: str = ""
    events: tuple[tuple[str, int], ...] = ()


class SpanQueue(Protocol):
    """Takes what has spans, from any thread; returns at once and never raises."""

    def put(self, traced: HasSpans) -> None: ...


class HasSpans(Protocol):
    """Something traced that is over."""

    @property
    def most_spans(self) -> int:
        """No fewer than `spans` yields."""
        ...

    def spans(self) -> Iterator[Span]:
        """Yield the spans; called once."""
        ...


class RequestSpans:
    """The spans of a client's request: `InferRequest` (Triton's name) and below it its models.

    Args:
        request: one that is over.
        parent: of the client; None begins a trace.
        is_server: False for a frame's request, which lies within the frame's own span.
    """

    def __init__(
        self, request: TracedRequest, parent: SpanContext | None, *, is_server: bool = True
    ) -> None:
        self._request = request
        self._parent = parent
        self._is_server = is_server

    @property
    def most_spans(self) -> int:
        return 1 + _MOST_OF_A_MODEL * len(self._request)

    def spans(self) -> Iterator[Span]:
        traces = self._request.traces
        if not traces:
            return
        above = self._parent
        if self._is_server:
            first = traces[0]
            times = [at_ns for _, at_ns in first.moments]
            above = SpanContext.new(self._parent)
            yield Span(
                "InferRequest",
                above,
                self._parent,
                min(times),
                max(times),
                {"triton.model_name": first.model_name},
                is_server=True,
                error=first.error,
            )
        contexts: dict[int, SpanContext] = {}
        for trace in traces:
            context = contexts[trace.id] = SpanContext.new(above)
            yield from _model_spans(trace, context, contexts.get(trace.parent_id, above))


def _model_spans(
    trace: ModelTrace, context: SpanContext, parent: SpanContext | None
) -> Iterator[Span]:
    moments = dict(trace.moments)
    begin_ns, end_ns = moments.get("REQUEST_START"), moments.get("REQUEST_END")
    if begin_ns is None or end_ns is None:
        return
    attributes: dict[str, str | int] = {
        "triton.model_name": trace.model_name,
        "triton.model_version": trace.model_version,
        "triton.trace_id": trace.id,
        "triton.trace_parent_id": trace.parent_id,
    }
    if trace.request_id:
        attributes["triton.request_id"] = trace.request_id
    yield Span(
        trace.model_name,
        context,
        parent,
        begin_ns,
        end_ns,
        attributes,
        error=trace.error,
        events=tuple(trace.moments),
    )
    queued_ns, computed_ns = moments.get("QUEUE_START"), moments.get("COMPUTE_START")
    if queued_ns is not None and computed_ns is not None:
        yield Span("queue", SpanContext.new(context), context, queued_ns, computed_ns)
    if computed_ns is None or "COMPUTE_END" not in moments:
        return
    compute = SpanContext.new(context)
    yield Span("compute", compute, context, computed_ns, moments["COMPUTE_END"])
    for name, begin, end in _PHASES:
        if begin in moments and end in moments:
            yield Span(name, SpanContext.new(compute), compute, moments[begin], moments[end])


class FrameTrace:
    """A camera's frame from its capture until its lanes are published; see `lanes.types.Trace`.

    Its stages follow one another; one thread at a time calls it.

    Args:
        queue: gets the spans.
        capture_ns: `time.monotonic_ns` of the capture.
        attributes: of the frame.

    Attributes:
        context: of the frame's own span.
    """

    def __init__(
        self, queue: SpanQueue, capture_ns: int, attributes: Mapping[str, str | int]
    ) -> None:
        self.context = SpanContext.new()
        self._queue = queue
        self._begin_ns = self._end_ns = capture_ns
        self._attributes = attributes
        self._error = ""
        self._stages: list[tuple[str, SpanContext, int]] = []

    @property
    def most_spans(self) -> int:
        return 1 + len(self._stages)

    def begin(self, stage: str, at_ns: int | None = None) -> SpanContext:
        """Begin a stage, which ends the one before it; return the identity of its span."""
        context = SpanContext.new(self.context)
        at_ns = time.monotonic_ns() if at_ns is None else at_ns
        self._stages.append((stage, context, at_ns))
        return context

    def end(self, error: str = "", **attributes: str | int) -> None:
        """End the last stage and the frame."""
        self._end_ns = time.monotonic_ns()
        self._error = error
        self._attributes = {**self._attributes, **attributes}
        self._queue.put(self)

    def published(self) -> None:
        """Add the span from the end of the frame until its lanes are with the broker, which is
        now."""
        self._queue.put(_Published(self.context, self._end_ns, time.monotonic_ns()))

    def spans(self) -> Iterator[Span]:
        yield Span(
            "frame",
            self.context,
            None,
            self._begin_ns,
            self._end_ns,
            self._attributes,
            error=self._error,
        )
        end_ns = self._end_ns
        for stage, context, begin_ns in reversed(self._stages):
            yield Span(stage, context, self.context, begin_ns, end_ns)
            end_ns = begin_ns


class _Published(NamedTuple):
    frame: SpanContext
    begin_ns: int
    end_ns: int

    @property
    def most_spans(self) -> int:
        return 1

    def spans(self) -> Iterator[Span]:
        yield Span("publish", SpanContext.new(self.frame), self.frame, self.begin_ns, self.end_ns)
