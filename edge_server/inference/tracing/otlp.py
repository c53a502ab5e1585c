"""SpanSender: chooses what is traced for OpenTelemetry, and sends its spans to a collector.

The library is imported where tracing is on, on the sender's own thread. What stands between it and
the requests is a bounded queue: a collector that is gone, or hangs, costs spans and nothing else.
"""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from collections import deque
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from edge_server.errors import SettingsError
from edge_server.inference.tracing.spans import SpanContext
from edge_server.process.backoff import Backoff
from edge_server.process.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from edge_server.inference.tracing.spans import HasSpans, Headers, Span
    from edge_server.settings import TracingSection

    # Sends spans; returns whether the collector took them.
    Export = Callable[[Sequence[Span]], bool]

log = logging.getLogger(__name__)

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
        if response.status_code == 200 and response.headers.get("Content-Length") == "0":
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
