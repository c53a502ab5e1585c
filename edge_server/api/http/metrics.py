"""`GET /metrics`: all metrics as text: of models, Triton's by Triton's names and those that models
define; and the appliance's own: cameras, lanes, broker.

This module and its imports load when the first client connects.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import threading
import time
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from edge_server.api.access import METRICS
from edge_server.api.calls import http_status
from edge_server.api.http.metric_table import histogram, info, many, one
from edge_server.board.watch import (
    CLOCK_UNSYNCHRONIZED,
    HTTP_CLOSED,
    NO_GPU,
    NOT_RECORDED,
    REASONS,
    ClockState,
)
from edge_server.cameras.status import CameraState
from edge_server.inference.registry import UNLOADED, ModelState
from edge_server.inference.statistics import FailureReason
from edge_server.model_config.parse import FIRST_RESPONSE
from edge_server.process.text import as_utf8

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from starlette.requests import Request
    from starlette.routing import BaseRoute

    from edge_server.api.access import AccessRules
    from edge_server.api.http.sources import Sources
    from edge_server.backends.contract import ModelMetric
    from edge_server.board.facts import BoardFacts
    from edge_server.inference.statistics import ModelStatistics
    from edge_server.process.histogram import Distribution


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


def model_metrics(sources: Sources) -> Iterator[Metric]:
    """Yield Triton's metrics of models.

    They are typed `unknown`, since OpenMetrics allows no counter without `_total` in its name;
    `Exposition` writes the type into Prometheus' own format, which allows it.
    """
    loaded = [
        ({"model": entry.name, "version": str(entry.version)}, entry.loaded)
        for entry in sources.models()
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
            metric.add_sample(FAILURES, {**labels, "reason": reason.value}, counts.failures[reason])
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
    """The metrics that models define.

    They have only the labels that the model gives them, as in Triton. Counters and histograms of
    one name and equal labels are added up (two versions, two models); of such gauges the later one
    is exported, and of two metrics of one name but different kinds, the first.
    """

    def __init__(self) -> None:
        self._unlike: set[str] = set()

    def read(self, sources: Sources) -> Iterator[Metric]:
        families: dict[str, dict[tuple[tuple[str, str], ...], ModelMetric]] = {}
        for entry in sources.models():
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
        # `unknown` as in `model_metrics`; else the family's name has no `_total`.
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


def _board(sources: Sources) -> Iterator[Metric]:
    if sources.board is None:
        return
    report = sources.board.report
    now = {reason.code for reason in report.reasons}
    words = (*REASONS, NO_GPU, NOT_RECORDED, HTTP_CLOSED, CLOCK_UNSYNCHRONIZED)
    yield from many("edge_board_condition", {word: word in now for word in words})
    states = {state.value: report.clock is state for state in ClockState}
    yield from many("edge_board_clock_state", states)
    yield from one("edge_board_clock_steps_total", report.clock_steps)
    yield from one("edge_board_sample_age_seconds", report.age_s)
    if (facts := report.facts) is not None:
        yield from _facts(facts, gpu=sources.gpu)


# By their names: parts of the board, and what each reports; what it does not report is left out.
_READINGS = {
    "edge_board_load_ratio": ("engines", "load"),
    "edge_board_clock_hertz": ("engines", "now_hz"),
    "edge_board_clock_limit_hertz": ("engines", "highest_hz"),
    "edge_board_temperature_celsius": ("heat.zones", "celsius"),
    "edge_board_temperature_throttle_celsius": ("heat.zones", "throttle_celsius"),
    "edge_board_temperature_critical_celsius": ("heat.zones", "critical_celsius"),
    "edge_board_supply_events_total": ("heat.supply_events", "count"),
    "edge_board_power_watts": ("rails", "watts"),
    "edge_board_voltage_volts": ("rails", "volts"),
    "edge_board_storage_worn_ratio": ("storage", "worn"),
    "edge_board_storage_temperature_celsius": ("storage", "celsius"),
}


def _facts(facts: BoardFacts, *, gpu: bool) -> Iterator[Metric]:
    if gpu:
        # Orin's GPU has no UUID.
        loads = {each.name: each.load for each in facts.engines if each.name == "gpu"}
        yield from many("nv_gpu_utilization", loads)
    for name, (parts, value) in _READINGS.items():
        found = attrgetter(parts)(facts)
        yield from many(name, {part.name: getattr(part, value) for part in found})
    if facts.power_modes is not None and (mode := facts.power_modes.current) is not None:
        yield from info("edge_board_power_mode_info", {"id": str(mode.id), "name": mode.name})
    if facts.boot_reason is not None:
        yield from info("edge_board_boot_info", {"reason": facts.boot_reason})
    yield from one("edge_board_uptime_seconds", facts.uptime_s)
    yield from one("edge_board_swap_total_bytes", facts.memory.swap_total_bytes)
    yield from one("edge_board_swap_free_bytes", facts.memory.swap_free_bytes)


log = logging.getLogger(__name__)

# prometheus_client can name a counter without `_total` only if its type is unknown.
_UNTYPED = re.compile(rb"^(# TYPE [\w:]+) untyped$", re.MULTILINE)
# Triton writes whole numbers without a point or an exponent, and its users' scripts read them so.
_LARGE = re.compile(rb"(?<= )\d+(?:\.0|(?:\.\d+)?e\+\d+)$", re.MULTILINE)

# Attributes of a camera, of the broker's connection and of the recorder.
_OF_CAMERAS = {
    "edge_frames_total": "captured",
    "edge_camera_reconnects_total": "reconnects",
    "edge_camera_up": "status.arriving",
    "edge_camera_frames_corrupt_total": "corrupt",
}
_OF_BROKER = {
    "edge_mqtt_connected": "connected",
    "edge_mqtt_queue_depth": "waiting",
    "edge_mqtt_published_total": "published",
    "edge_mqtt_dropped_total": "dropped",
    "edge_mqtt_connection_losses_total": "losses",
    "edge_mqtt_taken_over_total": "taken_over",
    "edge_mqtt_contested": "contested",
}
_OF_RECORDER = {
    "edge_recorder_dropped_total": "dropped",
    "edge_recorder_lost_total": "lost",
    "edge_recorder_bytes_total": "written_bytes",
}


class Exposition:
    """Writes the present metrics, in the format that the client prefers."""

    def __init__(self, sources: Sources) -> None:
        self._registry = CollectorRegistry()
        readers = (model_metrics, _daemon, _models, _cameras, _board, CustomMetrics().read)
        self._registry.register(Collector(sources, *readers))
        ProcessCollector(registry=self._registry)

    def write(self, accept: str) -> tuple[bytes, str]:
        """Return the text and its content type, for the `Accept` header of a request."""
        encode, content_type = choose_encoder(accept)
        text = encode(self._registry)
        if content_type.startswith("text/plain"):
            text = _UNTYPED.sub(rb"\1 counter", text)
            text = _LARGE.sub(_plain, text)
        return text, content_type


def _plain(written: re.Match[bytes]) -> bytes:
    number = float(written[0])
    return b"%d" % number if number.is_integer() else written[0]


class Collector:
    """A Collector of prometheus_client: what each of `readers` yields of `sources`, in labels and
    descriptions that every format can carry; see `as_utf8`."""

    def __init__(self, sources: Sources, *readers: Callable[[Sources], Iterator[Metric]]) -> None:
        self._sources = sources
        self._readers = readers

    def collect(self) -> Iterator[Metric]:
        for read in self._readers:
            for metric in read(self._sources):
                metric.documentation = as_utf8(metric.documentation)
                metric.samples = [
                    sample._replace(labels={k: as_utf8(v) for k, v in sample.labels.items()})
                    for sample in metric.samples
                ]
                yield metric


def _daemon(sources: Sources) -> Iterator[Metric]:
    yield from info("edge_build_info", {"version": sources.version})
    yield from one("edge_uptime_seconds", time.monotonic() - sources.started_s)
    yield from one("edge_ready", None if sources.ready is None else sources.ready())
    yield from many("edge_events_total", sources.events())
    yield from many("edge_disk_free_bytes", sources.free_bytes())
    if (settings := sources.settings) is not None:
        yield from one("edge_settings_reloaded", not settings.fault)
        yield from one("edge_settings_restart_needed", len(settings.restart_needed))
    if (broker := sources.broker) is not None and broker.on:
        for name, attribute in _OF_BROKER.items():
            yield from one(name, getattr(broker, attribute))
        yield from histogram("edge_publish_latency_seconds", broker.latency)
    if (recorder := sources.recorder) is not None:
        yield from one("edge_recorder_ok", not recorder.failure)
        for name, attribute in _OF_RECORDER.items():
            yield from one(name, getattr(recorder, attribute))
    if (spans := sources.spans) is not None:
        yield from many("edge_spans_total", {"sent": spans.sent, "dropped": spans.dropped})
    if (processors := sources.processors) is not None:
        memory = processors.memory()
        total_bytes, free_bytes = memory.total_bytes, memory.available_bytes
        yield from one("nv_cpu_utilization", processors.utilization())
        if total_bytes is not None and free_bytes is not None:
            yield from one("nv_cpu_memory_total_bytes", total_bytes)
            # Used is all that a new process cannot get.
            yield from one("nv_cpu_memory_used_bytes", total_bytes - free_bytes)
        for name in ("total", "used"):
            yield from one(f"nv_pinned_memory_pool_{name}_bytes", 0)


def _models(sources: Sources) -> Iterator[Metric]:
    entries = [((each.name, str(each.version)), each) for each in sources.models()]
    states = {
        (*key, state.value): entry.state is state
        for key, entry in entries
        if entry.reason != UNLOADED and not entry.is_idle  # on request: nobody misses it
        for state in ModelState
        if state is not ModelState.UNKNOWN  # never loaded, so it has no state to export
    }
    yield from many("edge_model_state", states)
    chosen = {
        (*key, entry.configuration.file, entry.configuration.devices): (
            not entry.configuration.degraded
        )
        for key, entry in entries
        if entry.configuration is not None
    }
    yield from many("edge_model_configuration", chosen)
    loaded = [(key, entry.loaded) for key, entry in entries if entry.loaded is not None]
    copies = {
        (*key, direction): copied
        for key, model in loaded
        for direction, copied in model.statistics.counts().copies.items()
    }
    yield from many("edge_tensor_copies_total", {k: each.count for k, each in copies.items()})
    sizes = {key: each.n_bytes for key, each in copies.items()}
    yield from many("edge_tensor_copied_bytes_total", sizes)
    memory = {(*key, kind): n for key, m in loaded for kind, n in m.memory_bytes().items()}
    yield from many("edge_model_memory_bytes", memory)
    phases: dict[tuple[str, ...], Distribution] = {
        (*key, phase): found
        for key, model in loaded
        for phase, found in model.statistics.phases_s().items()
    }
    yield from histogram("edge_inference_phase_duration_seconds", phases)
    if (requests := sources.requests) is not None:
        latencies = requests.latencies({name for (name, _), _ in loaded})
        yield from histogram("edge_request_duration_seconds", latencies)
        yield from many("edge_request_failed_total", requests.failures())
    channels = [each.report for each in sources.channels]
    yield from many("edge_channel_serial", {each.channel: each.serial for each in channels})
    states = {(each.channel, each.state, each.trouble): True for each in channels}
    yield from many("edge_channel_state", states)
    if (repository := sources.repository) is not None:
        yield from one("edge_repo_poll_age_seconds", repository.poll_age_s(time.monotonic()))
        yield from many("edge_model_reload_total", repository.deployments.outcomes())


def _cameras(sources: Sources) -> Iterator[Metric]:
    pipelines = {each.camera.name: each for each in tuple(sources.pipelines)}
    cameras = {name: each.camera for name, each in pipelines.items()}
    latency, now = sources.latency, time.monotonic()
    for name, attribute in _OF_CAMERAS.items():
        yield from many(name, {k: attrgetter(attribute)(each) for k, each in cameras.items()})
    answered = {name: not each.failure for name, each in pipelines.items() if each.model}
    yield from many("edge_camera_lanes_ok", answered)
    calibrated = {name: each.calibration is not None for name, each in pipelines.items()}
    yield from many("edge_camera_calibrated", calibrated)
    ages = {name: each.last_frame_age_s(now) for name, each in cameras.items()}
    yield from many("edge_camera_last_frame_age_seconds", ages)
    ages = {name: latency.last_valid_age_s(name) for name in cameras}
    yield from many("edge_camera_last_lanes_age_seconds", ages)
    lanes = {name: found for name in cameras if (found := latency.newest(name))}
    yield from many("edge_lanes", {name: number for name, (number, _) in lanes.items()})
    yield from many("edge_lane_confidence", {name: score for name, (_, score) in lanes.items()})
    states = {
        (name, state.value): each.state is state
        for name, each in cameras.items()
        for state in CameraState
    }
    yield from many("edge_camera_state", states)
    faults = {
        (name, reason): count or None
        for name, each in cameras.items()
        for reason, count in each.faults.copy().items()
    }
    yield from many("edge_camera_faults_total", faults)
    dropped: dict[tuple[str, ...], int] = {}
    for name, each in pipelines.items():
        dropped[name, "capture", "stale"] = each.camera.dropped
        dropped[name, "infer", "too_old"] = each.too_old_frames
        dropped[name, "capture", "unusable"] = each.unusable_frames
        dropped[name, "infer", "failed"] = each.failed_frames
    yield from many("edge_frames_dropped_total", dropped)
    networks = {(n, each.name): each for n, p in pipelines.items() for each in p.networks}
    yield from many("edge_network_frames_total", {k: each.frames for k, each in networks.items()})
    missed = {
        (*key, reason): count
        for key, each in networks.items()
        for reason, count in each.missed.copy().items()
    }
    yield from many("edge_network_missed_total", missed)
    yield from many("edge_network_ok", {k: not each.failure for k, each in networks.items()})
    yield from many(
        "edge_network_age_seconds", {k: each.age_ms / 1e3 for k, each in networks.items()}
    )
    yield from histogram("edge_stage_latency_seconds", latency.stages())
    yield from histogram("edge_end_to_end_latency_seconds", latency.end_to_end())


def metrics_routes(sources: Sources, rules: AccessRules | None = None) -> Sequence[BaseRoute]:
    """Return `GET /metrics`, as Prometheus reads it.

    Args:
        rules: whose token the reader needs to read; None needs none.
    """
    exposition: Exposition | None = None
    # Shares of time since the last scrape are of one scrape at a time.
    one_at_a_time = threading.Lock()

    def write(accept: str) -> tuple[bytes, str]:
        nonlocal exposition
        with one_at_a_time:
            # Registering reads all numbers, which may fail now and not the next time.
            exposition = exposition or Exposition(sources)
            return exposition.write(accept)

    async def metrics(request: Request) -> Response:
        refusal = rules and rules.token_refusal(METRICS, request.headers.items())
        if refusal:
            status = http_status(refusal)
            headers = {"www-authenticate": "Bearer"} if status == 401 else None
            return JSONResponse({"error": str(refusal)}, status, headers)
        try:
            body, kind = await asyncio.to_thread(write, request.headers.get("accept", ""))
        except Exception:
            # A fault in the metrics must not stop the appliance.
            log.exception("metrics: cannot be collected")
            return PlainTextResponse("Internal Server Error\n", 500)
        return Response(body, headers={"content-type": kind})

    return [Route("/metrics", metrics)]


def metrics_alone(sources: Sources) -> Sequence[BaseRoute]:
    """Return `metrics_routes`, for a listener that serves nothing else."""

    async def nothing_else(_: Request) -> Response:
        return PlainTextResponse("Not Found: the metrics are at /metrics\n", 404)

    return [*metrics_routes(sources), Route("/{path:path}", nothing_else)]
