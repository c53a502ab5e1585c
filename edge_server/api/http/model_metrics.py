"""Metrics of models: Triton's, by Triton's names, and those that models define themselves."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.utils import floatToGoString

from edge_server.inference.statistics import FailureReason
from edge_server.model_config.parse import FIRST_RESPONSE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from edge_server.api.http.sources import Sources
    from edge_server.backends.contract import ModelMetric
    from edge_server.inference.statistics import ModelStatistics

log = logging.getLogger(__name__)

_US = 1e-3  # of a nanosecond

# What is timed of requests, and of the cache: Triton's words, and whether cached requests count.
_TIMED = {
    "request": ("inference request", "includes"),
    "queue": ("inference queuing", "includes"),
    "compute_input": ("compute input", "does not include"),
    "compute_infer": ("compute inference", "does not include"),
    "compute_output": ("inference compute output", "does not include"),
}
_UNIT = "duration in microseconds"
# Name → help text, and a path in `Counts`. Triton's help texts say no more.
COUNTERS = {
    "nv_inference_request_success": (
        "Number of successful inference requests, all batch sizes",
        "success.count",
    ),
    "nv_inference_count": (
        "Number of inferences performed (does not include cached requests)",
        "inference_count",
    ),
    "nv_inference_exec_count": (
        "Number of model executions performed (does not include cached requests)",
        "execution_count",
    ),
    **{
        f"nv_inference_{key}_duration_us": (
            f"Cumulative {what} {_UNIT} ({cached} cached requests)",
            f"{'success' if key == 'request' else key}.ns",
        )
        for key, (what, cached) in _TIMED.items()
    },
    "nv_cache_num_hits_per_model": ("Number of cache hits per model", "cache_hit.count"),
    "nv_cache_num_misses_per_model": ("Number of cache misses per model", "cache_miss.count"),
    **{
        f"nv_cache_{key}_duration_per_model": (
            f"Total cache {key} duration per model, in microseconds",
            f"cache_{key}.ns",
        )
        for key in ("hit", "miss")
    },
}
_LATENCIES = frozenset(name for name in COUNTERS if "duration" in name)
_OF_CACHE = "nv_cache_"
# Name → help text, and the summary of the statistics.
_SUMMARIES = {
    **{
        f"nv_inference_{key}_summary_us": (
            f"Summary of {what} {_UNIT} ({cached} cached requests)",
            key,
        )
        for key, (what, cached) in _TIMED.items()
    },
    **{
        f"nv_cache_{key}_summary_per_model": (
            f"Summary of cache {key} duration per model, in microseconds",
            f"cache_{key}",
        )
        for key in ("hit", "miss")
    },
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
        loaded = [({**labels, **model.statistics.tags}, model) for labels, model in loaded]
        counted = [(labels, model.statistics.counts()) for labels, model in loaded]
        cached = [each for each, (_, m) in zip(counted, loaded, strict=True) if m.statistics.cached]
        totals = all(model.statistics.kept.counters for _, model in loaded)
        for name, (text, path) in COUNTERS.items():
            of_cache = name.startswith(_OF_CACHE)
            if (not totals and (of_cache or name in _LATENCIES)) or (of_cache and not cached):
                continue
            metric = Metric(name, text, "unknown")
            unit = _US if name in _LATENCIES else 1
            for labels, counts in cached if of_cache else counted:
                metric.add_sample(name, labels, attrgetter(path)(counts) * unit)
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
        yield from _distributions([(labels, model.statistics) for labels, model in loaded])


def _distributions(
    statistics: Sequence[tuple[dict[str, str], ModelStatistics]],
) -> Iterator[Metric]:
    summaries = [
        (labels, made, each.cached) for labels, each in statistics if (made := each.summaries())
    ]
    for name, (text, which) in _SUMMARIES.items() if summaries else ():
        metric = Metric(name, text, "summary")
        for labels, made, cached in summaries:
            if name.startswith(_OF_CACHE) and not cached:
                continue
            summary = made[which]
            metric.add_sample(f"{name}_count", labels, summary.count)
            metric.add_sample(f"{name}_sum", labels, summary.sum_ns * _US)
            for quantile, ns in summary.quantiles_ns.items():
                metric.add_sample(name, {**labels, "quantile": f"{quantile:g}"}, ns * _US)
        if metric.samples:
            yield metric
    histograms = [
        (labels, histogram)
        for labels, each in statistics
        if (histogram := each.first_responses_ms()) is not None
    ]
    if histograms:
        text = "Duration from request to first response in milliseconds"
        metric = Metric(FIRST_RESPONSE, text, "histogram")
        for labels, histogram in histograms:
            for bound, count in zip((*histogram.bounds, math.inf), histogram.at_most, strict=True):
                bucket = {**labels, "le": _bound(bound)}
                metric.add_sample(f"{FIRST_RESPONSE}_bucket", bucket, count)
            metric.add_sample(f"{FIRST_RESPONSE}_count", labels, histogram.at_most[-1])
            metric.add_sample(f"{FIRST_RESPONSE}_sum", labels, histogram.total)
        yield metric


class CustomMetrics:
    """A Collector of prometheus_client.

    Metrics have only the labels that the model gives them, as in Triton. Counters and histograms of
    one name and equal labels are added up (two versions, two models); of such gauges the later one
    is exported, and of two metrics of one name but different kinds, the first.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._unlike: set[str] = set()

    def collect(self) -> Iterator[Metric]:
        families: dict[str, dict[tuple[tuple[str, str], ...], ModelMetric]] = {}
        for entry in self._sources.models():
            if entry.loaded is None:
                continue
            for metric in entry.loaded.metrics():
                family = families.setdefault(metric.name, {})
                if family and next(iter(family.values())).kind != metric.kind:
                    self._warn_once(metric, entry.name)
                    continue
                labels = tuple(sorted(metric.labels.items()))
                before = family.get(labels)
                family[labels] = metric if before is None else _together(before, metric)
        for name, family in families.items():
            yield _family(name, family)

    def _warn_once(self, metric: ModelMetric, model: str) -> None:
        if metric.name not in self._unlike:
            self._unlike.add(metric.name)
            log.warning(
                "metrics: '%s' of model %s is a %s, but another model's is not; it is not "
                "exported: rename one of them",
                metric.name,
                model,
                metric.kind,
            )


def _together(before: ModelMetric, metric: ModelMetric) -> ModelMetric:
    if metric.kind == "gauge" or before.buckets.keys() != metric.buckets.keys():
        return metric
    return replace(
        metric,
        value=before.value + metric.value,
        buckets={bound: before.buckets[bound] + n for bound, n in metric.buckets.items()},
    )


def _family(name: str, metrics: dict[tuple[tuple[str, str], ...], ModelMetric]) -> Metric:
    first = next(iter(metrics.values()))
    family = Metric(name, first.description, first.kind)
    if first.kind == "counter":
        # `unknown` for the reason that ModelMetrics gives; else the family's name has no `_total`.
        base = name.removesuffix("_total")
        family = Metric(base, first.description, "unknown" if base == name else "counter")
    for labels, metric in metrics.items():
        if metric.kind != "histogram":
            family.add_sample(name, dict(labels), metric.value)
            continue
        for bound, count in metric.buckets.items():
            family.add_sample(f"{name}_bucket", {**dict(labels), "le": _bound(bound)}, count)
        family.add_sample(f"{name}_count", dict(labels), metric.buckets[float("inf")])
        family.add_sample(f"{name}_sum", dict(labels), metric.value)
    return family


def _bound(value: float) -> str:
    # Triton writes the bound 1 as `1`, prometheus_client as `1.0`.
    text = str(floatToGoString(value))  # type: ignore[no-untyped-call]  # the library has no types
    return text.removesuffix(".0")
