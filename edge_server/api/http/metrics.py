"""`GET /metrics`: all metrics as text; and the appliance's own: cameras, lanes, broker.

This module and its imports load when the first client connects.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from edge_server.api.access import METRICS
from edge_server.api.calls import http_status
from edge_server.api.http.metric_table import histogram, info, many, one
from edge_server.api.http.model_metrics import CustomMetrics, ModelMetrics
from edge_server.board.watch import (
    CLOCK_UNSYNCHRONIZED,
    HTTP_CLOSED,
    NOT_RECORDED,
    REASONS,
    ClockState,
)
from edge_server.cameras.status import CameraState
from edge_server.inference.registry import UNLOADED, ModelState
from edge_server.process.utf8 import as_utf8

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from prometheus_client import Metric
    from prometheus_client.registry import Collector
    from starlette.requests import Request
    from starlette.routing import BaseRoute

    from edge_server.api.access import AccessRules
    from edge_server.api.http.sources import Sources
    from edge_server.board.facts import BoardFacts
    from edge_server.board.watch import DeviceReport
    from edge_server.pipeline.lane_pipeline import LanePipeline


class BoardMetrics:
    """A Collector of prometheus_client."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        yield from self._processors()
        board = self._sources.board
        if board is not None:
            report = board.report
            yield from _condition(report)
            if (facts := report.facts) is not None:
                yield from _facts(facts, gpu=self._sources.gpu)
        yield from many(
            "edge_disk_free_bytes",
            (((directory,), count) for directory, count in self._sources.free_bytes().items()),
        )

    def _processors(self) -> Iterator[Metric]:
        processors = self._sources.processors
        if processors is None:
            return
        utilization, memory = processors.utilization(), processors.memory()
        if utilization is not None:
            yield GaugeMetricFamily(
                "nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", utilization
            )
        total_bytes, free_bytes = memory.total_bytes, memory.available_bytes
        if total_bytes is not None and free_bytes is not None:
            yield GaugeMetricFamily(
                "nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", total_bytes
            )
            # Used is all that a new process cannot get.
            yield GaugeMetricFamily(
                "nv_cpu_memory_used_bytes",
                "CPU used memory (RAM), in bytes",
                total_bytes - free_bytes,
            )


def _condition(report: DeviceReport) -> Iterator[Metric]:
    now = {reason.partition(":")[0] for reason in report.reasons}
    yield from many(
        "edge_board_condition",
        (
            ((word,), word in now)
            for word in (*REASONS, NOT_RECORDED, HTTP_CLOSED, CLOCK_UNSYNCHRONIZED)
        ),
    )
    yield from many(
        "edge_board_clock_state",
        (((state.value,), report.clock is state) for state in ClockState),
    )
    yield from one("edge_board_clock_steps_total", report.clock_steps)
    yield from one("edge_board_sample_age_seconds", report.age_s)


# Name and values by their label; what the board does not report is left out.
_READINGS: Mapping[str, Callable[[BoardFacts], Iterable[tuple[str, float | None]]]] = {
    "edge_board_load_ratio": lambda board: ((e.name, e.load) for e in board.engines),
    "edge_board_clock_hertz": lambda board: ((e.name, e.now_hz) for e in board.engines),
    "edge_board_clock_limit_hertz": lambda board: ((e.name, e.highest_hz) for e in board.engines),
    "edge_board_temperature_celsius": lambda board: ((z.name, z.celsius) for z in board.heat.zones),
    "edge_board_temperature_throttle_celsius": lambda board: (
        (zone.name, zone.throttle_celsius) for zone in board.heat.zones
    ),
    "edge_board_temperature_critical_celsius": lambda board: (
        (zone.name, zone.critical_celsius) for zone in board.heat.zones
    ),
    "edge_board_supply_events_total": lambda board: (
        (event.name, event.count) for event in board.heat.supply_events
    ),
    "edge_board_power_watts": lambda board: ((rail.name, rail.watts) for rail in board.rails),
    "edge_board_voltage_volts": lambda board: ((rail.name, rail.volts) for rail in board.rails),
    "edge_board_storage_worn_ratio": lambda board: ((d.name, d.worn) for d in board.storage),
    "edge_board_storage_temperature_celsius": lambda board: (
        (drive.name, drive.celsius) for drive in board.storage
    ),
}


def _facts(facts: BoardFacts, *, gpu: bool) -> Iterator[Metric]:
    loads = {engine.name: engine.load for engine in facts.engines}
    if gpu and (load := loads.get("gpu")) is not None:
        # Orin's GPU has no UUID.
        yield from many("nv_gpu_utilization", [(("gpu",), load)])
    for name, readings in _READINGS.items():
        yield from many(name, (((label,), value) for label, value in readings(facts)))
    modes, memory = facts.power_modes, facts.memory
    if modes is not None and modes.current is not None:
        yield from info(
            "edge_board_power_mode_info", {"id": str(modes.current.id), "name": modes.current.name}
        )
    if facts.boot_reason is not None:
        yield from info("edge_board_boot_info", {"reason": facts.boot_reason})
    yield from one("edge_board_uptime_seconds", facts.uptime_s)
    yield from one("edge_board_swap_total_bytes", memory.swap_total_bytes)
    yield from one("edge_board_swap_free_bytes", memory.swap_free_bytes)


log = logging.getLogger(__name__)

# prometheus_client can name a counter without `_total` only if its type is unknown.
_UNTYPED = re.compile(rb"^(# TYPE [\w:]+) untyped$", re.MULTILINE)

# Name and value; a camera without a value is left out.
_OF_CAMERAS: tuple[tuple[str, Callable[[LanePipeline], float | None]], ...] = (
    ("edge_frames_total", lambda p: p.camera.captured),
    ("edge_camera_reconnects_total", lambda p: p.camera.reconnects),
    ("edge_camera_up", lambda p: p.camera.status.arriving),
    ("edge_camera_frames_corrupt_total", lambda p: p.camera.corrupt),
    ("edge_camera_lanes_ok", lambda p: not p.failure),
    ("edge_camera_last_frame_age_seconds", lambda p: p.camera.last_frame_age_s(time.monotonic())),
    ("edge_camera_calibrated", lambda p: p.calibration is not None),
)


class Exposition:
    """Writes the present metrics, in the format that the client prefers."""

    def __init__(self, sources: Sources) -> None:
        self._registry = CollectorRegistry()
        for collector in (ModelMetrics, ApplianceMetrics, BoardMetrics, CustomMetrics):
            self._registry.register(_Utf8(collector(sources)))
        ProcessCollector(registry=self._registry)

    def write(self, accept: str) -> tuple[bytes, str]:
        """Return the text and its content type, for the `Accept` header of a request."""
        encode, content_type = choose_encoder(accept)
        text = encode(self._registry)
        if content_type.startswith("text/plain"):
            text = _UNTYPED.sub(rb"\1 counter", text)
        return text, content_type


class _Utf8:
    """A collector whose labels and descriptions every format can carry; see `as_utf8`."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def collect(self) -> Iterator[Metric]:
        for metric in self._collector.collect():
            metric.documentation = as_utf8(metric.documentation)
            metric.samples = [
                sample._replace(labels={k: as_utf8(v) for k, v in sample.labels.items()})
                for sample in metric.samples
            ]
            yield metric


class ApplianceMetrics:
    """A Collector of prometheus_client."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        sources = self._sources
        yield from info("edge_build_info", {"version": sources.version})
        yield from one("edge_uptime_seconds", time.monotonic() - sources.started_s)
        yield from one("edge_ready", None if sources.ready is None else sources.ready())
        yield from self._requests()
        yield from self._models()
        yield from self._cameras()
        yield from many("edge_events_total", sorted(sources.events().items()))
        yield from self._broker()
        yield from self._settings()
        yield from self._recorder()
        yield from self._repository()
        if (spans := sources.spans) is not None:
            results = ((("sent",), spans.sent), (("dropped",), spans.dropped))
            yield from many("edge_spans_total", results)

    def _requests(self) -> Iterator[Metric]:
        requests = self._sources.requests
        if requests is None:
            return
        models = {entry.name for entry in self._sources.models() if entry.loaded is not None}
        yield from histogram("edge_request_duration_seconds", requests.latencies(models))
        yield from many("edge_request_failed_total", sorted(requests.failures().items()))

    def _models(self) -> Iterator[Metric]:
        entries = self._sources.models()
        yield from many(
            "edge_model_state",
            (
                ((entry.name, str(entry.version), state.value), entry.state is state)
                for entry in entries
                if entry.reason != UNLOADED  # on request: nobody misses it
                for state in ModelState
                if state is not ModelState.UNKNOWN  # never loaded, so it has no state to export
            ),
        )
        copies = [
            ((entry.name, str(entry.version), direction), copied)
            for entry in entries
            if entry.loaded is not None
            for direction, copied in entry.loaded.statistics.counts().copies.items()
        ]
        yield from many("edge_tensor_copies_total", ((key, each.count) for key, each in copies))
        yield from many(
            "edge_tensor_copied_bytes_total", ((key, each.n_bytes) for key, each in copies)
        )

    def _repository(self) -> Iterator[Metric]:
        repository = self._sources.repository
        if repository is None:
            return
        yield from one("edge_repo_poll_age_seconds", repository.poll_age_s(time.monotonic()))
        outcomes = repository.outcomes().items()
        yield from many("edge_model_reload_total", (((result,), n) for result, n in outcomes))

    def _cameras(self) -> Iterator[Metric]:
        pipelines = tuple(self._sources.pipelines)
        for name, read in _OF_CAMERAS:
            yield from many(name, (((p.camera.name,), read(p)) for p in pipelines))
        cameras, latency = [pipeline.camera for pipeline in pipelines], self._sources.latency
        yield from many(
            "edge_camera_last_lanes_age_seconds",
            (((c.name,), latency.last_valid_age_s(c.name)) for c in cameras),
        )
        lanes = [((c.name,), found) for c in cameras if (found := latency.newest(c.name))]
        yield from many("edge_lanes", ((key, number) for key, (number, _) in lanes))
        yield from many("edge_lane_confidence", ((key, score) for key, (_, score) in lanes))
        yield from many(
            "edge_camera_state",
            (
                ((camera.name, state.value), camera.state is state)
                for camera in cameras
                for state in CameraState
            ),
        )
        yield from many(
            "edge_camera_faults_total",
            (
                ((camera.name, reason), count)
                for camera in cameras
                for reason, count in sorted(camera.faults.copy().items())
                if count
            ),
        )
        yield from many(
            "edge_frames_dropped_total",
            (
                ((pipeline.camera.name, stage, reason), count)
                for pipeline in pipelines
                for stage, reason, count in (
                    ("capture", "stale", pipeline.camera.dropped),
                    ("infer", "too_old", pipeline.too_old_frames),
                    ("capture", "unusable", pipeline.unusable_frames),
                    ("infer", "failed", pipeline.failed_frames),
                )
            ),
        )
        yield from histogram("edge_stage_latency_seconds", latency.stages())
        yield from histogram("edge_end_to_end_latency_seconds", latency.end_to_end())

    def _settings(self) -> Iterator[Metric]:
        settings = self._sources.settings
        if settings is not None:
            yield from one("edge_settings_reloaded", not settings.fault)
            yield from one("edge_settings_restart_needed", len(settings.restart_needed))

    def _broker(self) -> Iterator[Metric]:
        broker = self._sources.broker
        if broker is None or not broker.on:
            return
        yield from one("edge_mqtt_connected", broker.connected)
        yield from one("edge_mqtt_queue_depth", broker.waiting)
        yield from one("edge_mqtt_published_total", broker.published)
        yield from one("edge_mqtt_dropped_total", broker.dropped)
        yield from one("edge_mqtt_connection_losses_total", broker.losses)
        yield from one("edge_mqtt_taken_over_total", broker.taken_over)
        yield from one("edge_mqtt_contested", broker.contested)
        yield from histogram("edge_publish_latency_seconds", broker.latency)

    def _recorder(self) -> Iterator[Metric]:
        recorder = self._sources.recorder
        if recorder is None:
            return
        yield from one("edge_recorder_ok", not recorder.failure)
        yield from one("edge_recorder_dropped_total", recorder.dropped)
        yield from one("edge_recorder_lost_total", recorder.lost)
        yield from one("edge_recorder_bytes_total", recorder.written_bytes)


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
