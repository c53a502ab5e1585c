"""Spans of what is over: each within its parent's trace, and in the places that it took."""

from __future__ import annotations

import itertools
import sys
import time
from typing import TYPE_CHECKING

import msgspec
import pytest
from opentelemetry.trace import SpanKind

import edge_server.inference
from edge_server.board.board import Identity
from edge_server.daemon.parts import span_sender
from edge_server.errors import SettingsError
from edge_server.inference.otlp import (
    MOST_WAITING,
    FrameTrace,
    MakeSpan,
    SpanSender,
    child_of,
    parent_of,
    request_spans,
)
from edge_server.inference.tracing import TracedRequest, Tracer
from edge_server.settings import Settings, TraceSection, TracingSection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.sdk.trace import ReadableSpan

TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ON = TracingSection(enabled=True)


class Collected(list["ReadableSpan"]):
    """A collector that takes all, or nothing."""

    takes = True

    def __call__(self, spans: Sequence[ReadableSpan]) -> bool:
        if self.takes:
            self.extend(spans)
        return self.takes

    def by_name(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self}


@pytest.fixture
def collected() -> Collected:
    return Collected()


def sender(collected: Collected, share: float = 1.0) -> SpanSender:
    return SpanSender(ON, share, {}, collected)


def request_of(tracer: Tracer, headers: Sequence[tuple[str, str]] = (), error: str = "") -> bool:
    """One request of an ensemble with one step; whether it was traced."""
    trace = tracer.sample("whole", "7", lambda: headers)
    if trace is None:
        return False
    trace.begin(3)
    step = trace.child("step", "7")
    assert step is not None
    step.begin(1)
    for at_ns, name in enumerate(
        ("QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")
    ):
        step.mark(name, 100 + 10 * at_ns)
    step.responded(final=True)
    trace.responded(final=True, error=error)
    return True


def test_a_request_has_its_steps_as_children_and_their_phases_below(collected: Collected) -> None:
    spans = sender(collected)
    assert request_of(Tracer(sender=spans))
    spans.flush()
    found = collected.by_name()
    parents = {
        span.name: next(
            (other.name for other in collected if span.parent and other.context == span.parent), ""
        )
        for span in collected
    }
    assert parents == {
        "InferRequest": "",
        "whole": "InferRequest",
        "step": "whole",
        "queue": "step",
        "compute": "step",
        "compute_input": "compute",
        "compute_infer": "compute",
        "compute_output": "compute",
    }
    assert len({span.context.trace_id for span in collected}) == 1
    assert len({span.context.span_id for span in collected}) == len(collected)
    assert found["InferRequest"].kind is SpanKind.SERVER
    queued_ns = found["queue"].start_time or 0
    times = [(span.start_time, span.end_time) for span in (found["queue"], found["compute_infer"])]
    assert times == [(queued_ns, queued_ns + 10), (queued_ns + 20, queued_ns + 30)]
    assert (found["whole"].attributes or {})["triton.model_version"] == 3
    assert (found["whole"].attributes or {})["triton.request_id"] == "7"
    assert spans.sent == len(collected) == 8


def test_the_spans_have_tritons_events(collected: Collected) -> None:
    spans = sender(collected)
    tracer = Tracer(sender=spans)
    trace = tracer.sample("m", "")
    assert trace is not None
    names = {
        "InferRequest": ("HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END"),
        "m": ("QUEUE_START",),
        "compute": ("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"),
    }
    trace.begin(1)
    for each in itertools.chain.from_iterable(names.values()):
        trace.mark(each)
    trace.responded(final=True)
    spans.flush()
    found = {name: tuple(e.name for e in span.events) for name, span in collected.by_name().items()}
    assert found["InferRequest"] == names["InferRequest"]
    assert found["compute"] == names["compute"]
    own = ("REQUEST_START", "QUEUE_START", "INFER_RESPONSE_COMPLETE", "REQUEST_END")
    assert found["m"] == own


def test_a_rate_of_0_traces_those_alone_whose_caller_does(collected: Collected) -> None:
    settings = Settings(trace=TraceSection(rate=0), tracing=ON)
    made = span_sender(settings, Identity("d", "1", "", ""))
    assert made is not None
    assert made.choose(lambda: [("traceparent", TRACEPARENT)])[0]
    assert not any(made.choose(None)[0] for _ in range(1000))
    with pytest.raises(ValueError, match=r"trace\.rate must be non-zero"):
        Settings(trace=TraceSection(rate=0))


def test_a_failed_request_says_why(collected: Collected) -> None:
    spans = sender(collected)
    request_of(Tracer(sender=spans), error="no memory")
    spans.flush()
    assert collected.by_name()["InferRequest"].status.description == "no memory"
    assert collected.by_name()["whole"].status.description == "no memory"
    assert collected.by_name()["step"].status.is_unset


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_clients_flag_decides_over_the_share(collected: Collected, share: float) -> None:
    spans = sender(collected, share)
    tracer = Tracer(sender=spans)
    assert not request_of(tracer, [("traceparent", TRACEPARENT[:-1] + "0")])
    assert request_of(tracer, [("other", "x"), ("traceparent", TRACEPARENT)])
    assert request_of(tracer, [("traceparent", "00-nonsense-01")]) is bool(share)
    spans.flush()
    first = collected[0]
    assert first.context.trace_id == TRACE_ID
    assert first.parent is not None
    assert first.parent.span_id == 0xB7AD6B7169203331


def test_the_vendors_part_of_the_context_goes_on() -> None:
    headers = [("traceparent", TRACEPARENT), ("tracestate", "vendor=x")]
    parent = parent_of(lambda: headers)
    assert parent is not None
    assert (parent.trace_id, parent.span_id) == (TRACE_ID, 0xB7AD6B7169203331)
    assert parent.trace_flags.sampled
    assert child_of(parent).trace_state.to_header() == "vendor=x"
    assert parent_of(lambda: [("traceparent", b"\xff")]) is None


def test_a_vendors_part_that_would_fill_the_queue_is_left_out() -> None:
    long = ",".join(f"vendor{number}={'x' * 250}" for number in range(30))
    parent = parent_of(lambda: [("traceparent", TRACEPARENT), ("tracestate", long)])
    assert parent is not None
    assert (parent.trace_id, parent.trace_state.to_header()) == (TRACE_ID, "")


def test_a_frames_stages_follow_one_another_and_its_request_lies_within(
    collected: Collected,
) -> None:
    spans = sender(collected)
    tracer = Tracer(sender=spans)
    capture_ns = time.monotonic_ns() - 1_000_000
    frame = tracer.frame("front", 7, capture_ns)
    assert frame is not None
    frame.begin("capture", capture_ns)
    frame.begin("wait", capture_ns + 5)
    request = tracer.of_frame("lanes", frame.begin("infer"))
    assert request is not None
    request.begin(1)
    request.responded(final=True)
    frame.begin("track")
    frame.end("", **{"edge.lanes": 4})
    frame.published()
    spans.flush()
    found = collected.by_name()
    names = ["capture", "wait", "infer", "track"]
    assert found["frame"].attributes == {
        "edge.camera": "front",
        "edge.frame_id": 7,
        "edge.lanes": 4,
    }
    assert found["frame"].start_time == found["capture"].start_time
    for before, after in itertools.pairwise(names):
        assert found[before].end_time == found[after].start_time
    assert all(found[name].parent == found["frame"].context for name in (*names, "publish"))
    assert found["lanes"].parent == found["infer"].context
    assert found["publish"].start_time == found["frame"].end_time


def test_without_a_sender_nothing_is_traced(collected: Collected) -> None:
    tracer = Tracer()
    assert not tracer.on
    assert tracer.frame("front", 0, 0) is None
    spans = sender(collected, 0.0)
    assert Tracer(sender=spans).on
    assert Tracer(sender=spans).frame("front", 0, 0) is None


def test_what_the_collector_does_not_take_is_dropped_and_logged_once(
    collected: Collected, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    collected.takes = False
    private = msgspec.structs.replace(ON, endpoint="http://host/v1/traces?token=hush7")
    spans = SpanSender(private, 1.0, {}, collected)
    tracer = Tracer(sender=spans)
    for _ in range(2):
        request_of(tracer)
        spans.flush()
        spans._retry_at = 0.0
    assert spans.failing
    assert (spans.sent, spans.dropped) == (0, 16)
    assert caplog.text.count("token=*** takes no spans") == 1
    collected.takes = True
    request_of(tracer)
    spans.flush()
    assert (spans.sent, spans.failing) == (8, False)
    assert caplog.text.count("takes spans again") == 1


def test_beyond_what_may_wait_spans_are_dropped(collected: Collected) -> None:
    spans = sender(collected)
    traced = FrameTrace(spans, 0, {})
    for _ in range(MOST_WAITING + 3):
        spans.put(traced.spans, 1)
    assert spans.dropped == 3
    spans.flush()
    assert len(collected) == spans.sent == MOST_WAITING


def test_a_request_that_never_began_has_no_span() -> None:
    request = TracedRequest(None, itertools.count(1), lambda _: None)
    assert list(request_spans(MakeSpan({}), request, None)) == []


def test_a_missing_library_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.delitem(sys.modules, "edge_server.inference.otlp")
    monkeypatch.delattr(edge_server.inference, "otlp")
    identity = Identity("jetson", "1.0", "", "")
    with pytest.raises(SettingsError, match=r"tracing\.enabled: .*pip install 'edge-server\[trac"):
        span_sender(Settings(tracing=ON), identity)
