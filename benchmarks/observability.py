"""What metrics and traces cost: an observation, a request with and without a trace, a scrape.

python benchmarks/observability.py
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from typing import TYPE_CHECKING

from edge_server.api.calls import RequestMetrics
from edge_server.api.http.metrics import Exposition
from edge_server.api.http.sources import Sources
from edge_server.inference.otlp import SpanSender
from edge_server.inference.tracing import Tracer
from edge_server.pipeline.lane_feed import LaneLatency
from edge_server.process.histogram import FRAME_BOUNDS_S, Histograms
from edge_server.settings import TracingSection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opentelemetry.sdk.trace import ReadableSpan

ROUNDS, CALLS = 7, 50_000


def per_call_us(call: Callable[[], object], threads: int = 1) -> float:
    """Return the median processor time of a call in µs, with so many threads at once."""
    found = []
    for _ in range(ROUNDS):
        running = [
            threading.Thread(target=lambda: [call() for _ in range(CALLS)]) for _ in range(threads)
        ]
        began = time.process_time()
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        found.append((time.process_time() - began) / CALLS / threads * 1e6)
    return statistics.median(found)


def traced(tracer: Tracer) -> Callable[[], object]:
    def request() -> None:
        trace = tracer.sample("m", "", tuple) if tracer.on else None
        if trace is not None:
            trace.begin(1)
            for name in ("QUEUE_START", "COMPUTE_START", "COMPUTE_END"):
                trace.mark(name)
            trace.responded(final=True)

    return request


def sender(share: float) -> SpanSender:
    def export(spans: Sequence[ReadableSpan]) -> bool:
        return bool(spans)

    return SpanSender(TracingSection(enabled=True), share, {}, export)


def main() -> None:
    histograms, requests = Histograms(FRAME_BOUNDS_S), RequestMetrics()
    print(f"Python {sys.version.split()[0]}, median of {ROUNDS}, processor time per call")
    for name, call, threads in (
        ("an observation", lambda: histograms.observe({("front", "infer"): 0.012}), 1),
        ("an observation, 4 threads on one series", lambda: histograms.observe({("a",): 0.012}), 4),
        ("a request counted", lambda: requests.responded("grpc", "m", 0), 1),
        ("a request, tracing off", traced(Tracer()), 1),
        ("a request, tracing on, none chosen", traced(Tracer(sender=sender(0.0))), 1),
        ("a request, tracing on, 1 % chosen", traced(Tracer(sender=sender(0.01))), 1),
    ):
        print(f"{name:45} {per_call_us(call, threads):8.2f} µs")
    spans = sender(1.0)
    request = traced(Tracer(sender=spans))
    for name, call in (
        ("a request, all traced", lambda: [request() for _ in range(1000)]),
        ("    its spans, on the sender's thread", spans.flush),
    ):
        began = time.process_time()
        call()
        print(f"{name:45} {(time.process_time() - began) * 1e3:8.2f} µs")
    exposition = Exposition(Sources("", list, [], LaneLatency(), requests=requests))
    began = time.process_time()
    for _ in range(20):
        exposition.write("application/openmetrics-text")
    print(f"{'a scrape without models':45} {(time.process_time() - began) / 20 * 1e3:8.2f} ms")


if __name__ == "__main__":
    main()
