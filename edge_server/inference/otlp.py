"""Spans of requests and frames, made by OpenTelemetry's SDK, and what sends them to a collector.

Imported where tracing is on: the library takes 0.3 s and 20 MB. What stands between it and the
requests is a bounded queue, and spans are made on the sender's thread, when what they show is over.
"""

from __future__ import annotations

import logging
import random
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.status import Status, StatusCode

from edge_server.inference.tracing import TraceQueue
from edge_server.process.text import masked_by_place
from edge_server.process.threads import Backoff

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_server.inference.tracing import Headers, ModelTrace, TracedRequest
    from edge_server.settings import TracingSection

# The span that others lie within.
Parent = SpanContext
# Sends spans; returns whether the collector took them.
Export = Callable[[Sequence[ReadableSpan]], bool]

log = logging.getLogger(__name__)

_PHASES = (
    ("compute_input", "COMPUTE_START", "COMPUTE_INPUT_END"),
    ("compute_infer", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"),
    ("compute_output", "COMPUTE_OUTPUT_START", "COMPUTE_END"),
)
# How the events of each of Triton's spans begin.
_OF_THE_CALL = ("GRPC_", "HTTP_")
_OF_A_MODEL = ("REQUEST_", "QUEUE_", "INFER_")
_OF_COMPUTE = ("COMPUTE_",)
# Of one model in a request: itself, queue, compute and its phases.
_MOST_OF_A_MODEL = 6
# Limit of spans that wait to be sent: some 3 MiB. Those beyond it are dropped and counted.
MOST_WAITING = 8192
# Spans of one request to the collector.
_MOST_AT_ONCE = 1024
_GATHER_S = 1.0
_TIMEOUT_S = 5.0
_RETRY_S = (1.0, 60.0)
# Characters of a client's tracestate; W3C Trace Context, 3.3.1.5, lets others be dropped.
_LONGEST_STATE = 512
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


def parent_of(headers: Headers) -> SpanContext | None:
    """The client's span, from its `traceparent`; None without a valid one."""
    carrier = {
        name: value if isinstance(value, str) else value.decode("latin-1")
        for name, value in headers()
        if name in {"traceparent", "tracestate"}
    }
    if "traceparent" not in carrier:
        return None
    found = TraceContextTextMapPropagator().extract(carrier)
    parent = get_current_span(found).get_span_context()
    if not parent.is_valid:
        return None
    if len(parent.trace_state.to_header()) > _LONGEST_STATE:
        return SpanContext(parent.trace_id, parent.span_id, True, parent.trace_flags)
    return parent


def child_of(parent: SpanContext | None) -> SpanContext:
    """The identity of a new span: a child of `parent`, or the first of a trace."""
    span_id = random.getrandbits(64) or 1
    if parent is None:
        return SpanContext(random.getrandbits(128) or 1, span_id, False, _SAMPLED)
    return SpanContext(parent.trace_id, span_id, False, _SAMPLED, parent.trace_state)


class MakeSpan:
    """Makes spans of monotonic times.

    These become epoch times as late as here: a step of the clock moves all spans.
    """

    def __init__(self, resource: Mapping[str, str]) -> None:
        self._resource = Resource(dict(resource))
        self._scope = InstrumentationScope("edge_server", resource.get("service.version"))
        self.epoch_ns = time.time_ns() - time.monotonic_ns()

    def __call__(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        begin_ns: int,
        end_ns: int,
        *,
        attributes: Mapping[str, str | int] | None = None,
        error: str = "",
        kind: SpanKind = SpanKind.INTERNAL,
        events: Sequence[tuple[str, int]] = (),
    ) -> ReadableSpan:
        epoch_ns = self.epoch_ns
        return ReadableSpan(
            name,
            context,
            parent,
            self._resource,
            dict(attributes or {}),
            [Event(event, timestamp=epoch_ns + at_ns) for event, at_ns in events],
            kind=kind,
            status=Status(StatusCode.ERROR, error) if error else Status(),
            start_time=epoch_ns + begin_ns,
            end_time=epoch_ns + end_ns,
            instrumentation_scope=self._scope,
        )


# Yields the spans of what is over.
Spans = Callable[[MakeSpan], "Iterator[ReadableSpan]"]


def request_spans(
    make: MakeSpan, request: TracedRequest, parent: SpanContext | None, *, is_server: bool = True
) -> Iterator[ReadableSpan]:
    """Yield the spans of a request: `InferRequest` (Triton's name) and below it its models; without
    `is_server` the models alone, within the span of their frame."""
    traces = request.traces
    if not traces:
        return
    above = parent
    if is_server:
        first = traces[0]
        times = [at_ns for _, at_ns in first.moments]
        above = child_of(parent)
        yield make(
            "InferRequest",
            above,
            parent,
            min(times),
            max(times),
            attributes={"triton.model_name": first.model_name},
            error=first.error,
            kind=SpanKind.SERVER,
            events=_events(first, _OF_THE_CALL),
        )
    contexts: dict[int, SpanContext] = {}
    for trace in traces:
        context = contexts[trace.id] = child_of(above)
        yield from _model_spans(make, trace, context, contexts.get(trace.parent_id, above))


def _model_spans(
    make: MakeSpan, trace: ModelTrace, context: SpanContext, parent: SpanContext | None
) -> Iterator[ReadableSpan]:
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
    name, error = trace.model_name, trace.error
    yield make(
        name,
        context,
        parent,
        begin_ns,
        end_ns,
        attributes=attributes,
        error=error,
        events=_events(trace, _OF_A_MODEL),
    )
    queued_ns, computed_ns = moments.get("QUEUE_START"), moments.get("COMPUTE_START")
    if queued_ns is not None and computed_ns is not None:
        yield make("queue", child_of(context), context, queued_ns, computed_ns)
    if computed_ns is None or "COMPUTE_END" not in moments:
        return
    compute = child_of(context)
    events = _events(trace, _OF_COMPUTE)
    yield make("compute", compute, context, computed_ns, moments["COMPUTE_END"], events=events)
    for name, begin, end in _PHASES:
        if begin in moments and end in moments:
            yield make(name, child_of(compute), compute, moments[begin], moments[end])


def _events(trace: ModelTrace, begun: tuple[str, ...]) -> list[tuple[str, int]]:
    return [moment for moment in trace.moments if moment[0].startswith(begun)]


class FrameTrace:
    """A camera's frame from its capture until its lanes are published; see `lanes.types.Trace`.

    Its stages follow one another; one thread at a time calls it.
    """

    def __init__(
        self, sender: SpanSender, capture_ns: int, attributes: Mapping[str, str | int]
    ) -> None:
        self._context = child_of(None)
        self._sender = sender
        self._begin_ns = self._end_ns = capture_ns
        self._attributes = attributes
        self._error = ""
        self._stages: list[tuple[str, SpanContext, int]] = []

    def begin(self, stage: str, at_ns: int | None = None) -> SpanContext:
        """Begin a stage, which ends the one before it; return the identity of its span."""
        context = child_of(self._context)
        at_ns = time.monotonic_ns() if at_ns is None else at_ns
        self._stages.append((stage, context, at_ns))
        return context

    def end(self, error: str = "", **attributes: str | int) -> None:
        self._end_ns = time.monotonic_ns()
        self._error = error
        self._attributes = {**self._attributes, **attributes}
        self._sender.put(self.spans, 1 + len(self._stages))

    def published(self) -> None:
        """Add the span from the end of the frame until its lanes are with the broker, which is
        now."""
        frame, begin_ns, end_ns = self._context, self._end_ns, time.monotonic_ns()
        self._sender.put(
            lambda make: iter([make("publish", child_of(frame), frame, begin_ns, end_ns)]), 1
        )

    def spans(self, make: MakeSpan) -> Iterator[ReadableSpan]:
        frame, end_ns = self._context, self._end_ns
        about, error = self._attributes, self._error
        yield make("frame", frame, None, self._begin_ns, end_ns, attributes=about, error=error)
        for stage, context, begin_ns in reversed(self._stages):
            yield make(stage, context, frame, begin_ns, end_ns)
            end_ns = begin_ns


class SpanSender(TraceQueue[Spans]):
    """Sends spans in the background; `put` returns at once. A request with a `traceparent` follows
    its sampled flag; of the others, and of the frames, `share` is chosen at random. Spans that the
    collector does not take are dropped, which the log says once; the next attempt comes after a
    growing time."""

    def __init__(
        self,
        settings: TracingSection,
        share: float,
        resource: Mapping[str, str],
        export: Export | None = None,
    ) -> None:
        super().__init__("spans", _GATHER_S, MOST_WAITING, _MOST_AT_ONCE)
        self.sent = 0
        self.failing = False
        self._shown = masked_by_place(settings.endpoint)
        self._share = share
        given = dict(each.split("=", 1) for each in settings.resource)
        self._make = MakeSpan({"host.name": socket.gethostname(), **resource, **given})
        # The library has no type for `shutdown`.
        self._exporter: Any = None
        if export is None:
            self._exporter = made = exporter(settings)
            export = lambda spans: made.export(spans) is SpanExportResult.SUCCESS  # noqa: E731
        self._give = export
        self._backoff = Backoff(*_RETRY_S)
        self._retry_at = 0.0

    def choose(self, headers: Headers | None) -> tuple[bool, SpanContext | None]:
        """Return whether spans of a request are sent, and the client's span around it."""
        parent = None if headers is None else parent_of(headers)
        if parent is not None:
            return parent.trace_flags.sampled, parent
        return random.random() < self._share, None  # noqa: S311 - a sample, not a secret

    def put(self, spans: Spans, count: int) -> None:
        """Send `spans`, which are at most `count`."""
        if not self._enqueue(spans, count):
            self.dropped += count

    def put_request(
        self, request: TracedRequest, parent: SpanContext | None, *, is_server: bool = True
    ) -> None:
        spans = partial(request_spans, request=request, parent=parent, is_server=is_server)
        self.put(spans, 1 + _MOST_OF_A_MODEL * len(request))

    def frame(self, capture_ns: int, attributes: Mapping[str, str | int]) -> FrameTrace:
        return FrameTrace(self, capture_ns, attributes)

    def start(self) -> None:
        super().start()
        log.info("traces: spans go to %s", self._shown)

    def stop(self, timeout_s: float = 1.0) -> None:
        """Send what waits, if the collector takes it in that time; accept no more."""
        super().stop(timeout_s)
        if self._exporter is not None:
            self._exporter.shutdown()
        if self.dropped:
            log.info("traces: %d spans sent, %d dropped", self.sent, self.dropped)

    def flush(self) -> None:
        if (left_s := self._retry_at - time.monotonic()) > 0:
            # What comes before then is dropped where the queue is full.
            self._worker.wait(min(left_s, _RETRY_S[0]))
        else:
            self._make.epoch_ns = time.time_ns() - time.monotonic_ns()
            super().flush()

    def end(self) -> None:
        if not self.failing:
            self.flush()
        while left := self._take():
            self.dropped += sum(1 for each in left for _ in each(self._make))

    def export(self, items: Sequence[Spans]) -> bool:
        spans = [span for each in items for span in each(self._make)]
        try:
            taken = self._give(spans)
        except Exception as error:  # noqa: BLE001 - what the library raises costs spans alone
            log.debug("traces: %r", error)
            taken = False
        if taken:
            self.sent += len(spans)
            if self.failing:
                log.info("traces: %s takes spans again", self._shown)
            self._backoff.reset()
        else:
            self.dropped += len(spans)
            self._retry_at = time.monotonic() + self._backoff.next_s()
            if not self.failing:
                log.warning(
                    "traces: %s takes no spans; they are dropped until it does: check "
                    "tracing.endpoint, and that a collector listens there for OTLP over HTTP",
                    self._shown,
                )
        self.failing = not taken
        return taken


def exporter(settings: TracingSection) -> OTLPSpanExporter:
    # It logs each attempt; `SpanSender` logs what changes.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    return OTLPSpanExporter(
        settings.endpoint,
        certificate_file=settings.ca_file,
        timeout=_TIMEOUT_S,
        session=_session_without_bodies(),
    )


def _session_without_bodies() -> Any:
    """What the exporter sends with: it reads no body of a response, which may be of any length and
    unpacked be any number of times as long; and a redirect is no success."""

    def judge(response: Any, **_: object) -> None:
        headers = response.headers
        # A body in chunks has no length, whatever is said of it.
        is_empty = headers.get("Content-Length") == "0" and "Transfer-Encoding" not in headers
        if response.status_code == 200 and is_empty:
            response.content  # noqa: B018 - hands the connection back for the next request
        else:
            response.close()
        if 300 <= response.status_code < 400:
            raise requests.TooManyRedirects(f"it answers {response.status_code}")

    session = requests.Session()
    session.stream = True
    session.hooks["response"].append(judge)
    return session
