"""Triton's metrics of models, by Triton's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from edge_server.inference.statistics import FailureReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge_server.api.http.sources import Sources
    from edge_server.inference.statistics import Counts

_US = 1e-3  # of a nanosecond

# Name → help text and getter. Triton's help texts say no more.
COUNTERS: dict[str, tuple[str, Callable[[Counts], float]]] = {
    "nv_inference_request_success": (
        "Number of successful inference requests, all batch sizes",
        lambda c: c.success.count,
    ),
    "nv_inference_count": (
        "Number of inferences performed (does not include cached requests)",
        lambda c: c.inference_count,
    ),
    "nv_inference_exec_count": (
        "Number of model executions performed (does not include cached requests)",
        lambda c: c.execution_count,
    ),
    "nv_inference_request_duration_us": (
        "Cumulative inference request duration in microseconds (includes cached requests)",
        lambda c: c.success.ns * _US,
    ),
    "nv_inference_queue_duration_us": (
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        lambda c: c.queue.ns * _US,
    ),
    "nv_inference_compute_input_duration_us": (
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda c: c.compute_input.ns * _US,
    ),
    "nv_inference_compute_infer_duration_us": (
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda c: c.compute_infer.ns * _US,
    ),
    "nv_inference_compute_output_duration_us": (
        "Cumulative inference compute output duration in microseconds (does not include cached "
        "requests)",
        lambda c: c.compute_output.ns * _US,
    ),
    "nv_cache_num_hits_per_model": (
        "Number of cache hits per model",
        lambda c: c.cache_hit.count,
    ),
    "nv_cache_num_misses_per_model": (
        "Number of cache misses per model",
        lambda c: c.cache_miss.count,
    ),
    "nv_cache_hit_duration_per_model": (
        "Total cache hit duration per model, in microseconds",
        lambda c: c.cache_hit.ns * _US,
    ),
    "nv_cache_miss_duration_per_model": (
        "Total cache miss duration per model, in microseconds",
        lambda c: c.cache_miss.ns * _US,
    ),
}
FAILURES = "nv_inference_request_failure"
LOAD_DURATION = "nv_model_load_duration_secs"
PENDING = "nv_inference_pending_request_count"


class ModelMetrics:
    """A Collector of prometheus_client.

    The metrics are typed `unknown`, since OpenMetrics allows no counter without `_total` in its
    name; `Exposition` writes the type into Prometheus' own format, which allows it.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        loaded = [
            ({"model": entry.name, "version": str(entry.version)}, entry.loaded)
            for entry in self._sources.models()
            if entry.loaded
        ]
        counted = [(labels, model.statistics.counts()) for labels, model in loaded]
        for name, (text, read) in COUNTERS.items():
            metric = Metric(name, text, "unknown")
            for labels, counts in counted:
                metric.add_sample(name, labels, read(counts))
            yield metric
        metric = Metric(FAILURES, "Number of failed inference requests, all batch sizes", "unknown")
        for labels, counts in counted:
            for reason in FailureReason:
                metric.add_sample(
                    FAILURES, {**labels, "reason": reason.value}, counts.failures[reason]
                )
        yield metric
        waiting = GaugeMetricFamily(PENDING, "Number of requests that wait to be executed")
        for labels, model in loaded:
            waiting.add_sample(PENDING, labels, model.scheduler.pending())
        yield waiting
        load = GaugeMetricFamily(LOAD_DURATION, "Model load time in seconds")
        for labels, model in loaded:
            load.add_sample(LOAD_DURATION, labels, model.load_s)
        yield load
