"""Metrics that are not of models, a row each: exported from here, listed in the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client import Metric

    from edge_server.process.histogram import Distribution


class MetricRow(NamedTuple):
    """A metric.

    Attributes:
        name: as it is exported; of a histogram without `_bucket`, `_sum` and `_count`.
        labels: their names, separated by spaces.
        text: the help text.
    """

    name: str
    labels: str
    text: str

    @property
    def kind(self) -> str:
        if self.name.endswith("_total"):
            return "counter"
        if self.name.endswith("_info"):
            return "info"
        return (
            "histogram" if self.name.endswith(("latency_seconds", "duration_seconds")) else "gauge"
        )

    @property
    def unit(self) -> str:
        """The unit at the end of the name; empty for a number, a state or a share."""
        last = self.name.removesuffix("_total").rpartition("_")[2]
        return last if last in _UNITS else ""


_UNITS = ("seconds", "bytes", "celsius", "hertz", "watts", "volts")

_ROWS = (
    # The daemon.
    ("edge_build_info", "version", "What runs here"),
    ("edge_uptime_seconds", "", "Since the daemon was started"),
    ("edge_ready", "", "1 while the server is ready, as its health checks say"),
    ("edge_settings_reloaded", "", "0 while the last reload was refused"),
    ("edge_settings_restart_needed", "", "Settings that wait for a restart"),
    ("edge_disk_free_bytes", "directory", "Free space where the daemon writes"),
    # Clients.
    (
        "edge_request_duration_seconds",
        "model protocol",
        "From a request that was read until its last response is given to the connection",
    ),
    (
        "edge_request_failed_total",
        "protocol code",
        "Inference requests that were refused or failed, by the status that the client got",
    ),
    # Models.
    ("edge_model_state", "model version state", "1 for the state it is in"),
    (
        "edge_model_configuration",
        "model version file devices",
        "1 for the configuration that serves; 0 while this machine should serve another one",
    ),
    ("edge_model_reload_total", "result", "Changes of models, by what became of them"),
    ("edge_channel_serial", "channel", "Of the index that counts; 0 before the first"),
    ("edge_channel_state", "channel state trouble", "1 for the state of its model here"),
    ("edge_repo_poll_age_seconds", "", "How long ago the model repositories were looked at"),
    (
        "edge_inference_phase_duration_seconds",
        "model version phase",
        "Phases of successful requests: request as a whole, queue, compute_input, compute_infer, "
        "compute_output; with histogram_latencies",
    ),
    (
        "edge_model_memory_bytes",
        "model version kind",
        "What is known of its memory. processes: measured, shared with no other; file: the size of "
        "its file, the least that it takes within the daemon (what ONNX Runtime or TensorRT makes "
        "of it, also on a GPU, is not known); contexts: device memory that TensorRT reports for "
        "execution contexts; buffers: what the daemon has allocated for tensors",
    ),
    (
        "edge_tensor_copies_total",
        "model version direction",
        "Tensors copied between host and device",
    ),
    (
        "edge_tensor_copied_bytes_total",
        "model version direction",
        "Bytes copied between host and device",
    ),
    # Cameras and lanes.
    ("edge_frames_total", "camera", "Frames that came"),
    (
        "edge_frames_dropped_total",
        "camera stage reason",
        "Frames without lanes: replaced by a newer one, too old, or the model failed",
    ),
    ("edge_camera_up", "camera", "1 while its frames arrive"),
    ("edge_camera_state", "camera state", "1 for the state it is in"),
    ("edge_camera_faults_total", "camera reason", "How often a fault began"),
    ("edge_camera_reconnects_total", "camera", "Frames came again after a loss"),
    ("edge_camera_frames_corrupt_total", "camera", "Frames that came incomplete"),
    ("edge_camera_lanes_ok", "camera", "1 while the model answers its frames"),
    ("edge_camera_last_frame_age_seconds", "camera", "Since its newest frame"),
    (
        "edge_camera_last_lanes_age_seconds",
        "camera",
        "Since its newest lanes that were not stale",
    ),
    ("edge_camera_calibrated", "camera", "1 where its lanes are in metres too"),
    ("edge_lanes", "camera", "Lane boundaries in its newest frame with an answer of the model"),
    ("edge_lane_confidence", "camera", "The highest confidence among them, 0 without any"),
    ("edge_network_frames_total", "camera network", "Frames with a result of a network"),
    (
        "edge_network_missed_total",
        "camera network reason",
        "Frames without one: dropped for a newer one, late, failed, or a fault of the response",
    ),
    ("edge_network_ok", "camera network", "1 while it has results"),
    ("edge_network_age_seconds", "camera network", "Of its newest result, since the capture"),
    ("edge_stage_latency_seconds", "camera stage", "Where a frame's time went"),
    ("edge_end_to_end_latency_seconds", "camera", "From capture until the lanes were known"),
    (
        "edge_publish_latency_seconds",
        "camera",
        "From capture until the lanes were written to the broker's connection",
    ),
    (
        "edge_events_total",
        "kind cause",
        "Events that were logged and published: begins and instants",
    ),
    # MQTT.
    ("edge_mqtt_connected", "", "1 while a broker listens"),
    ("edge_mqtt_queue_depth", "", "Messages that wait"),
    ("edge_mqtt_published_total", "", "Lane messages written to a broker's connection"),
    ("edge_mqtt_dropped_total", "", "Lane messages not sent"),
    ("edge_mqtt_connection_losses_total", "", "How often an open connection ended"),
    (
        "edge_mqtt_taken_over_total",
        "",
        "How often another client logged in with this device's client id",
    ),
    (
        "edge_mqtt_contested",
        "",
        "1 where another client publishes as this device; the log says more",
    ),
    # The recorder, and traces.
    ("edge_recorder_ok", "", "0 while nothing is recorded"),
    ("edge_recorder_dropped_total", "", "Frames, and results of networks, not encoded"),
    ("edge_recorder_lost_total", "", "Frames and events not written"),
    ("edge_recorder_bytes_total", "", "Of complete files"),
    ("edge_spans_total", "result", "Spans of traces: sent, and dropped"),
    # The board.
    ("edge_board_condition", "reason", "1 while lanes are degraded for that reason"),
    ("edge_board_clock_state", "state", "1 for the state that the wall clock is in"),
    ("edge_board_clock_steps_total", "", "How often the wall clock was set"),
    ("edge_board_sample_age_seconds", "", "Since the board was read"),
    ("edge_board_load_ratio", "engine", "Share of busy time of an engine"),
    ("edge_board_clock_hertz", "engine", "Clock of an engine"),
    ("edge_board_clock_limit_hertz", "engine", "What the clock of an engine may reach now"),
    ("edge_board_temperature_celsius", "zone", "Temperature of a zone"),
    ("edge_board_temperature_throttle_celsius", "zone", "Where engines are slowed down"),
    ("edge_board_temperature_critical_celsius", "zone", "Where the board is shut down"),
    (
        "edge_board_supply_events_total",
        "counter",
        "Throttlings by the supply since boot: oc1 undervoltage, oc2 and oc3 over-current",
    ),
    ("edge_board_power_watts", "rail", "Power of a rail"),
    ("edge_board_voltage_volts", "rail", "Voltage of a rail"),
    ("edge_board_power_mode_info", "id name", "nvpmodel's mode"),
    ("edge_board_boot_info", "reason", "The cause of the last reset"),
    ("edge_board_uptime_seconds", "", "Since the kernel started"),
    (
        "edge_board_storage_worn_ratio",
        "drive",
        "Upper bound of the used share of a drive's life",
    ),
    ("edge_board_storage_temperature_celsius", "drive", "Temperature of a drive"),
    ("edge_board_swap_total_bytes", "", "Swap"),
    ("edge_board_swap_free_bytes", "", "Swap that is free"),
    # Triton's; those of models are in `model_metrics`.
    ("nv_cpu_utilization", "", "CPU utilization rate [0.0 - 1.0]"),
    ("nv_cpu_memory_total_bytes", "", "CPU total memory (RAM), in bytes"),
    ("nv_cpu_memory_used_bytes", "", "CPU used memory (RAM), in bytes"),
    (
        "nv_pinned_memory_pool_total_bytes",
        "",
        "Pinned memory pool total size; there is no such pool",
    ),
    ("nv_pinned_memory_pool_used_bytes", "", "Pinned memory pool used size; there is no such pool"),
    ("nv_gpu_utilization", "gpu_uuid", "GPU utilization rate [0.0 - 1.0)"),
)
TABLE = {name: MetricRow(name, labels, text) for name, labels, text in _ROWS}
_FAMILIES: Mapping[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
    "info": InfoMetricFamily,
}


def one(name: str, value: float | None) -> Iterator[Metric]:
    """Yield the metric without labels, if its value is known."""
    yield from many(name, {(): value})


def many(name: str, values: Mapping[Any, float | None]) -> Iterator[Metric]:
    """Yield the metric with the values that are known, by their label or labels."""
    metric = _family(TABLE[name])
    for labels, value in sorted(values.items()):
        if value is not None:
            metric.add_metric((labels,) if isinstance(labels, str) else labels, float(value))
    if metric.samples:
        yield metric


def info(name: str, labels: Mapping[str, str]) -> Iterator[Metric]:
    """Yield a metric whose labels say something."""
    metric = _family(TABLE[name])
    metric.add_metric((), labels)
    yield metric


def histogram(name: str, distributions: Mapping[tuple[str, ...], Distribution]) -> Iterator[Metric]:
    """Yield the histogram, if something was counted."""
    if not distributions:
        return
    metric = _family(TABLE[name])
    for labels, found in distributions.items():
        bounds = [*(str(bound) for bound in found.bounds), "+Inf"]
        buckets = list(zip(bounds, found.at_most, strict=True))
        metric.add_metric(labels, buckets=buckets, sum_value=found.total)
    yield metric


def _family(row: MetricRow) -> Any:
    name = row.name
    if row.kind in ("counter", "info"):
        name = name.removesuffix("_total").removesuffix("_info")
    labels = () if row.kind == "info" else row.labels.split()
    return _FAMILIES[row.kind](name, row.text, labels=labels)
