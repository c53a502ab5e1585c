"""Exposition: all metrics as text; and the appliance's own: cameras, lanes, broker.

This module and its imports load at the first scrape.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import choose_encoder

from edge_server.api.http.board_metrics import BoardMetrics
from edge_server.api.http.model_metrics import CustomMetrics, ModelMetrics
from edge_server.api.http.sources import BOUNDS_S
from edge_server.cameras.status import CameraState
from edge_server.inference.snapshot import ModelState
from edge_server.process.utf8 import as_utf8

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client import Metric
    from prometheus_client.registry import Collector

    from edge_server.api.http.sources import Distribution, Sources
    from edge_server.pipeline.lane_pipeline import LanePipeline

# prometheus_client can name a counter without `_total` only if its type is unknown.
_UNTYPED = re.compile(rb"^(# TYPE [\w:]+) untyped$", re.MULTILINE)

# Name, help text, value; a camera without a value is left out.
_OF_CAMERAS: tuple[tuple[Any, str, str, Callable[[LanePipeline], float | None]], ...] = (
    (CounterMetricFamily, "edge_frames", "Frames that came", lambda p: p.camera.captured),
    (
        CounterMetricFamily,
        "edge_camera_reconnects",
        "Frames came again after a loss",
        lambda p: p.camera.reconnects,
    ),
    (
        GaugeMetricFamily,
        "edge_camera_up",
        "1 while its frames arrive",
        lambda p: p.camera.status.arriving,
    ),
    (
        CounterMetricFamily,
        "edge_camera_frames_corrupt",
        "Frames that came incomplete",
        lambda p: p.camera.corrupt,
    ),
    (
        GaugeMetricFamily,
        "edge_camera_lanes_ok",
        "1 while the model answers its frames",
        lambda p: not p.failure,
    ),
    (
        GaugeMetricFamily,
        "edge_camera_last_frame_age_seconds",
        "Since its newest frame",
        lambda p: p.camera.last_frame_age_s(time.monotonic()),
    ),
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
        yield InfoMetricFamily("edge_build", "What runs here", {"version": self._sources.version})
        yield GaugeMetricFamily(
            "edge_uptime_seconds",
            "Since the daemon was started",
            time.monotonic() - self._sources.started_s,
        )
        yield from self._models()
        yield from self._cameras()
        yield from self._latencies()
        yield from self._broker()
        yield from self._settings()
        yield from self._recorder()
        yield from self._repository()

    def _models(self) -> Iterator[Metric]:
        entries = self._sources.models()
        yield _family(
            GaugeMetricFamily("edge_model_state", "1 for the state it is in", labels=_OF_STATE),
            (
                ((entry.name, str(entry.version), state.value), entry.state is state)
                for entry in entries
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
        yield _family(
            CounterMetricFamily(
                "edge_tensor_copies", "Tensors copied between host and device", labels=_OF_COPY
            ),
            ((labels, copied.count) for labels, copied in copies),
        )
        yield _family(
            CounterMetricFamily(
                "edge_tensor_copied_bytes", "Bytes copied between host and device", labels=_OF_COPY
            ),
            ((labels, copied.n_bytes) for labels, copied in copies),
        )

    def _repository(self) -> Iterator[Metric]:
        repository = self._sources.repository
        if repository is None:
            return
        yield GaugeMetricFamily(
            "edge_repo_poll_age_seconds",
            "How long ago the model repositories were looked at",
            repository.poll_age_s(time.monotonic()),
        )
        yield _family(
            CounterMetricFamily(
                "edge_model_reload", "Changes of models, by what became of them", labels=("result",)
            ),
            (((result,), count) for result, count in repository.outcomes().items()),
        )

    def _cameras(self) -> Iterator[Metric]:
        pipelines = tuple(self._sources.pipelines)
        for kind, name, text, read in _OF_CAMERAS:
            values = [(pipeline.camera.name, read(pipeline)) for pipeline in pipelines]
            yield _family(
                kind(name, text, labels=("camera",)),
                (((camera,), value) for camera, value in values if value is not None),
            )
        cameras = [pipeline.camera for pipeline in pipelines]
        ages_s = [(c.name, self._sources.latency.last_valid_age_s(c.name)) for c in cameras]
        yield _family(
            GaugeMetricFamily(
                "edge_camera_last_lanes_age_seconds",
                "Since its newest lanes that were not stale",
                labels=("camera",),
            ),
            (((camera,), age_s) for camera, age_s in ages_s if age_s is not None),
        )
        yield _family(
            GaugeMetricFamily(
                "edge_camera_state", "1 for the state it is in", labels=("camera", "state")
            ),
            (
                ((camera.name, state.value), camera.state is state)
                for camera in cameras
                for state in CameraState
            ),
        )
        yield _family(
            CounterMetricFamily(
                "edge_camera_faults", "How often a fault began", labels=("camera", "reason")
            ),
            (
                ((camera.name, reason), count)
                for camera in cameras
                for reason, count in sorted(camera.faults.copy().items())
                if count
            ),
        )
        dropped = CounterMetricFamily(
            "edge_frames_dropped",
            "Frames without lanes: replaced by a newer one, too old, or the model failed",
            labels=("camera", "stage", "reason"),
        )
        for pipeline in pipelines:
            name = pipeline.camera.name
            dropped.add_metric((name, "capture", "stale"), pipeline.camera.dropped)
            dropped.add_metric((name, "infer", "too_old"), pipeline.too_old_frames)
            dropped.add_metric((name, "capture", "unusable"), pipeline.unusable_frames)
            dropped.add_metric((name, "infer", "failed"), pipeline.failed_frames)
        yield dropped

    def _latencies(self) -> Iterator[Metric]:
        latency = self._sources.latency
        yield _histogram(
            "edge_stage_latency_seconds",
            "Where a frame's time went",
            ("camera", "stage"),
            latency.stages(),
        )
        yield _histogram(
            "edge_end_to_end_latency_seconds",
            "From capture until the lanes were known",
            ("camera",),
            latency.end_to_end(),
        )

    def _settings(self) -> Iterator[Metric]:
        settings = self._sources.settings
        if settings is None:
            return
        yield GaugeMetricFamily(
            "edge_settings_reloaded", "0 while the last reload was refused", not settings.fault
        )
        yield GaugeMetricFamily(
            "edge_settings_restart_needed",
            "Settings that wait for a restart",
            len(settings.restart_needed),
        )

    def _broker(self) -> Iterator[Metric]:
        broker = self._sources.broker
        if broker is None or not broker.on:
            return
        yield GaugeMetricFamily("edge_mqtt_connected", "1 while a broker listens", broker.connected)
        yield GaugeMetricFamily("edge_mqtt_queue_depth", "Messages that wait", broker.waiting)
        yield CounterMetricFamily("edge_mqtt_dropped", "Lane messages not sent", broker.dropped)

    def _recorder(self) -> Iterator[Metric]:
        recorder = self._sources.recorder
        if recorder is None:
            return
        name = "edge_recorder"
        yield GaugeMetricFamily(f"{name}_ok", "0 while nothing is recorded", not recorder.failure)
        yield CounterMetricFamily(f"{name}_dropped", "Frames not encoded", recorder.dropped)
        yield CounterMetricFamily(f"{name}_lost", "Frames and events not written", recorder.lost)
        yield CounterMetricFamily(f"{name}_bytes", "Of complete files", recorder.written_bytes)


_OF_STATE = ("model", "version", "state")
_OF_COPY = ("model", "version", "direction")


def _family(family: Any, values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    for labels, value in values:
        family.add_metric(labels, float(value))
    filled: Metric = family
    return filled


def _histogram(
    name: str,
    text: str,
    labels: tuple[str, ...],
    distributions: Mapping[tuple[str, ...], Distribution],
) -> Metric:
    metric = HistogramMetricFamily(name, text, labels=labels)
    bounds = [*(str(bound) for bound in BOUNDS_S), "+Inf"]
    for key, found in distributions.items():
        buckets = list(zip(bounds, found.at_most, strict=True))
        metric.add_metric(key, buckets=buckets, sum_value=found.sum_s)
    return metric
