"""Spans of requests and frames, as OpenTelemetry has them, and what sends them to a collector."""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from collections import deque
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from edge_server.errors import SettingsError
from edge_server.process.backoff import Backoff
from edge_server.process.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from edge_server.inference.tracing import ModelTrace, TracedRequest
    from edge_server.settings import TracingSection

    # The metadata of a call, or the headers of an HTTP request; read only where they are needed.
    Headers = Callable[[], Iterable[tuple[str, str | bytes]]]
    # Sends spans; returns whether the collector took them.
    Export = Callable[[Sequence["Span"]], bool]

log = logging.getLogger(__name__)

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


# Limit of spans that wait to be sent: some 3 MiB. Those beyond it are dropped and counted.
MOST_WAITING = 8192
# Spans of one request to the collector.
_MOST_AT_ONCE = 1024
_GATHER_S = 1.0
_LOOK_S = 5.0
_TIMEOUT_S = 5.0
_RETRY_S = (1.0, 60.0)
# Characters of a client's tracestate; W3C Trace Context, 3.3.1.5, lets others be dropped.
_LONGEST_STATE = 512
_PACKAGE = "opentelemetry.exporter.otlp.proto.http"


class SpanSender:
    """Sends spans in the background; `put` returns at once, from any thread.

    A request with a `traceparent` follows its sampled flag; of the others, and of the frames, a
    share is chosen at random. Spans that the collector does not take are dropped: the log says so
    once, and when it takes them again; the next attempt comes after a growing time. The worker has
    no supervisor: a collector that hangs costs traces and nothing else.

    Args:
        settings: where to send spans.
        share: of the requests and frames that are traced, 0..1.
        resource: what the spans' resource says beside the settings: name, version and so on.
        export: for tests; the library's exporter by default.

    Attributes:
        sent: number of spans that the collector took.
        dropped: number of spans that nobody has.
        failing: the collector did not take the last spans.

    Raises:
        SettingsError: the library is not installed; the text has the remedy.
    """

    def __init__(
        self,
        settings: TracingSection,
        share: float,
        resource: Mapping[str, str],
        export: Export | None = None,
    ) -> None:
        if export is None and not installed():
            raise SettingsError(
                "tracing.enabled: OpenTelemetry's exporter is not installed; install it (pip "
                "install 'edge-server[tracing]'), or set enabled = false"
            )
        self.sent = 0
        self.dropped = 0
        self.failing = False
        self._settings = settings
        self._share = share
        self._resource = resource
        self._export = export
        self._close: Callable[[], None] = _nothing
        self._news = threading.Condition()
        self._waiting: deque[tuple[int, HasSpans]] = deque()
        self._waiting_spans = 0
        self._closed = False
        self._backoff = Backoff(*_RETRY_S)
        self._retry_at = 0.0
        self._worker = Worker("spans", self._tick, on_end=self._end)

    def choose(self, headers: Headers | None) -> tuple[bool, SpanContext | None]:
        """Return whether spans of a request are sent, and the client's span around it."""
        parent = None if headers is None else parent_of(headers)
        if parent is not None:
            return parent.sampled, parent
        return random.random() < self._share, None  # noqa: S311 - a sample, not a secret

    def put(self, traced: HasSpans) -> None:
        """Queue the spans of `traced` and return at once."""
        spans = traced.most_spans
        with self._news:
            if self._closed or self._waiting_spans + spans > MOST_WAITING:
                self.dropped += spans
                return
            self._waiting_spans += spans
            self._waiting.append((spans, traced))
            if len(self._waiting) == 1:
                self._news.notify()

    def start(self) -> None:
        self._worker.start()
        log.info("traces: spans go to %s", self._settings.endpoint)

    def stop(self, timeout_s: float = 1.0) -> None:
        """Send what waits, if the collector takes it in that time; accept no more."""
        with self._news:
            self._closed = True
            self._news.notify()
        self._worker.stop(timeout_s)
        self._close()
        if self.dropped:
            log.info("traces: %d spans sent, %d dropped", self.sent, self.dropped)

    def _tick(self, now: float) -> None:
        with self._news:
            if self._news.wait_for(lambda: self._waiting or self._closed, _LOOK_S):
                self._news.wait_for(lambda: self._closed, _GATHER_S)
        if now < self._retry_at:
            # What comes meanwhile is dropped where the queue is full.
            self._worker.wait(min(self._retry_at - now, _LOOK_S))
        else:
            self.send()

    def _end(self) -> None:
        if not self.failing:
            self.send()
        with self._news:
            self.dropped += self._waiting_spans
            self._waiting.clear()
            self._waiting_spans = 0

    def send(self) -> None:
        """Send what waits; on the sender's thread."""
        if self._export is None:
            self._export, self._close = library_exporter(self._settings, self._resource)
        while spans := self._take():
            try:
                taken = self._export(spans)
            except Exception as error:  # noqa: BLE001 - whatever the library raises costs spans alone
                log.debug("traces: %r", error)
                taken = False
            if not taken:
                self._fail(len(spans))
                return
            self.sent += len(spans)
            if self.failing:
                log.info("traces: %s takes spans again", self._settings.endpoint)
                self.failing = False
                self._backoff.reset()

    def _take(self) -> list[Span]:
        spans: list[Span] = []
        while len(spans) < _MOST_AT_ONCE:
            with self._news:
                if not self._waiting:
                    break
                most, traced = self._waiting.popleft()
                self._waiting_spans -= most
            spans += traced.spans()
        return spans

    def _fail(self, lost: int) -> None:
        self.dropped += lost
        self._retry_at = time.monotonic() + self._backoff.next_s()
        if not self.failing:
            self.failing = True
            log.warning(
                "traces: %s takes no spans; they are dropped until it does: check "
                "tracing.endpoint, and that a collector listens there for OTLP over HTTP",
                self._settings.endpoint,
            )


def installed() -> bool:
    """Return whether OpenTelemetry's SDK and its exporter are here."""
    try:
        return find_spec(_PACKAGE) is not None
    except ModuleNotFoundError:
        return False


def parent_of(headers: Headers) -> SpanContext | None:
    """Return the client's span, from its `traceparent`; None without a valid one."""
    carrier = {
        name: value if isinstance(value, str) else value.decode("latin-1")
        for name, value in headers()
        if name in {"traceparent", "tracestate"}
    }
    if "traceparent" not in carrier:
        return None
    from opentelemetry.trace import get_current_span  # noqa: PLC0415 - only where tracing is on
    from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415 - likewise
        TraceContextTextMapPropagator,
    )

    found = TraceContextTextMapPropagator().extract(carrier)
    context = get_current_span(found).get_span_context()
    if not context.is_valid:
        return None
    state = context.trace_state.to_header()
    if len(state) > _LONGEST_STATE:
        state = ""
    return SpanContext(context.trace_id, context.span_id, context.trace_flags.sampled, state)


def library_exporter(
    settings: TracingSection, resource: Mapping[str, str]
) -> tuple[Export, Callable[[], None]]:
    """Return a function that sends spans with the library's exporter, and one that closes it."""
    # Imported where tracing is on: they take 0.3 s and 20 MB.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter,
    )
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import Event, ReadableSpan  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import SpanExportResult  # noqa: PLC0415
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415
    from opentelemetry.trace import SpanContext as TheirContext  # noqa: PLC0415
    from opentelemetry.trace import SpanKind, TraceFlags, TraceState  # noqa: PLC0415
    from opentelemetry.trace.status import Status, StatusCode  # noqa: PLC0415

    # It logs each attempt; `SpanSender` says what changes.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    exporter = OTLPSpanExporter(
        settings.endpoint,
        certificate_file=settings.ca_file,
        timeout=_TIMEOUT_S,
        session=_session_without_bodies(),
    )
    given = dict(each.split("=", 1) for each in settings.resource)
    about = Resource({"host.name": socket.gethostname(), **resource, **given})
    scope = InstrumentationScope("edge_server", resource.get("service.version"))
    sampled = TraceFlags(TraceFlags.SAMPLED)

    def context_of(context: SpanContext, *, remote: bool = False) -> Any:
        state = TraceState.from_header([context.state]) if context.state else None
        return TheirContext(context.trace_id, context.span_id, remote, sampled, state)

    def export(spans: Sequence[Span]) -> bool:
        # Monotonic time becomes epoch time as late as here: a step of the clock moves all spans.
        epoch_ns = time.time_ns() - time.monotonic_ns()
        made = [
            ReadableSpan(
                span.name,
                context_of(span.context),
                None if span.parent is None else context_of(span.parent, remote=span.is_server),
                about,
                dict(span.attributes),
                [Event(name, timestamp=epoch_ns + at_ns) for name, at_ns in span.events],
                kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
                start_time=epoch_ns + span.begin_ns,
                end_time=epoch_ns + span.end_ns,
                instrumentation_scope=scope,
            )
            for span in spans
        ]
        return exporter.export(made) is SpanExportResult.SUCCESS

    return export, exporter.shutdown


def _session_without_bodies() -> Any:
    """Return what the exporter sends with: it reads no body of a response, which may be of any
    length and unpacked be any number of times as long; and a redirect is no success."""
    import requests  # noqa: PLC0415 - comes with the exporter

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


def _nothing() -> None:
    """What closes an exporter that was never made."""
