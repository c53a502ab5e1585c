"""ApplianceMetrics: cameras, lanes, broker, model states; and Triton's metrics of the board."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)

from edge_server.api.http.lane_latency import BOUNDS_S
from edge_server.cameras.camera import CameraState
from edge_server.inference.snapshot import ModelState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client import Metric

    from edge_server.api.http.lane_latency import Distribution
    from edge_server.api.http.sources import Sources


class ApplianceMetrics:
    """A Collector of prometheus_client."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("edge_build", "What runs here", {"version": self._sources.version})
        yield self._model_states()
        yield from self._copies()
        yield from self._cameras()
        yield from self._latencies()
        yield from self._broker()
        yield from self._repository()
        yield from self._board()

    def _model_states(self) -> Metric:
        states = GaugeMetricFamily(
            "edge_model_state", "1 for the state it is in", labels=("model", "version", "state")
        )
        for entry in self._sources.models():
            for state in ModelState:
                if state is ModelState.UNKNOWN:
                    continue  # never loaded, so it has no state to export
                labels = (entry.name, str(entry.version), state.value)
                states.add_metric(labels, float(entry.state is state))
        return states

    def _copies(self) -> Iterator[Metric]:
        labels = ("model", "version", "direction")
        number = CounterMetricFamily(
            "edge_tensor_copies", "Tensors copied between host and device", labels=labels
        )
        size = CounterMetricFamily(
            "edge_tensor_copied_bytes", "Bytes copied between host and device", labels=labels
        )
        for entry in self._sources.models():
            if entry.loaded is None:
                continue
            for direction, copies in entry.loaded.statistics.counts().copies.items():
                of = (entry.name, str(entry.version), direction)
                number.add_metric(of, copies.count)
                size.add_metric(of, copies.n_bytes)
        yield number
        yield size

    def _repository(self) -> Iterator[Metric]:
        repository = self._sources.repository
        if repository is None:
            return
        yield GaugeMetricFamily(
            "edge_repo_poll_age_seconds",
            "How long ago the model repositories were looked at",
            repository.poll_age_s(time.monotonic()),
        )
        reloads = CounterMetricFamily(
            "edge_model_reload", "Changes of models, by what became of them", labels=("result",)
        )
        for result, count in repository.outcomes().items():
            reloads.add_metric((result,), count)
        yield reloads

    def _cameras(self) -> Iterator[Metric]:
        by_camera = ("camera",)
        frames = CounterMetricFamily("edge_frames", "Frames that came", labels=by_camera)
        dropped = CounterMetricFamily(
            "edge_frames_dropped",
            "Frames without lanes: replaced by a newer one, or the model failed",
            labels=("camera", "stage", "reason"),
        )
        reconnects = CounterMetricFamily(
            "edge_camera_reconnects", "Frames came again after a loss", labels=by_camera
        )
        up = GaugeMetricFamily("edge_camera_up", "1 while it is open", labels=by_camera)
        lanes = GaugeMetricFamily(
            "edge_camera_lanes_ok", "1 while the model answers its frames", labels=by_camera
        )
        age = GaugeMetricFamily(
            "edge_camera_last_frame_age_seconds", "Since its newest frame", labels=by_camera
        )
        now = time.monotonic()
        for pipeline in self._sources.pipelines:
            camera = pipeline.camera
            frames.add_metric((camera.name,), camera.captured)
            dropped.add_metric((camera.name, "capture", "stale"), camera.dropped)
            dropped.add_metric((camera.name, "infer", "failed"), pipeline.failed_frames)
            reconnects.add_metric((camera.name,), camera.reconnects)
            up.add_metric((camera.name,), float(camera.state is CameraState.LIVE))
            lanes.add_metric((camera.name,), float(not pipeline.failure))
            age_s = camera.last_frame_age_s(now)
            if age_s is not None:
                age.add_metric((camera.name,), age_s)
        yield from (frames, dropped, reconnects, up, lanes, age)

    def _latencies(self) -> Iterator[Metric]:
        latency = self._sources.latency
        yield _histogram(
            "edge_stage_latency_seconds",
            "Where a frame's time went",
            ("camera", "stage"),
            {(camera, stage): each for (camera, stage), each in latency.stages().items()},
        )
        yield _histogram(
            "edge_end_to_end_latency_seconds",
            "From capture until the lanes were known",
            ("camera",),
            {(camera,): each for camera, each in latency.end_to_end().items()},
        )

    def _broker(self) -> Iterator[Metric]:
        broker = self._sources.broker
        if broker is None:
            return
        yield GaugeMetricFamily("edge_mqtt_connected", "1 while a broker listens", broker.connected)
        yield GaugeMetricFamily("edge_mqtt_queue_depth", "Messages that wait", broker.waiting)
        yield CounterMetricFamily("edge_mqtt_dropped", "Lane messages not sent", broker.dropped)

    def _board(self) -> Iterator[Metric]:
        processors = self._sources.processors
        if processors is None:
            return
        utilization, memory = processors.utilization(), processors.memory()
        if utilization is not None:
            yield GaugeMetricFamily(
                "nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", utilization
            )
        if memory is not None:
            yield GaugeMetricFamily(
                "nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", memory.total_bytes
            )
            yield GaugeMetricFamily(
                "nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", memory.used_bytes
            )


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
