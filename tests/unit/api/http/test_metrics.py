"""The metrics have Triton's names where Triton has them, and hold what was counted."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics
from support.boards import plant

from edge_server.api.calls import RequestMetrics
from edge_server.api.http.metric_table import TABLE
from edge_server.api.http.metrics import Exposition
from edge_server.api.http.sources import ProcessorUse, Sources
from edge_server.backends.contract import MemoryKind, Phases, TensorModel
from edge_server.board.watch import BoardWatch, ClockWatch
from edge_server.cameras.camera import Camera
from edge_server.inference.data_plane import DataPlane
from edge_server.inference.registry import (
    IDLE,
    UNLOADED,
    LoadedModel,
    ModelEntry,
    ModelRegistry,
    ModelState,
    ServedConfiguration,
)
from edge_server.inference.statistics import FailureReason, LatencyMetrics, ModelStatistics
from edge_server.lanes.types import Lane, LaneFrame
from edge_server.pipeline.fair_shares import FairShares
from edge_server.pipeline.lane_feed import LaneLatency
from edge_server.pipeline.lane_pipeline import LanePipeline
from edge_server.pipeline.networks import NetworkPipeline
from edge_server.process.histogram import Histograms
from edge_server.repository.channel import ChannelReport
from edge_server.settings import NetworkSection

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from edge_server.process.histogram import Distribution

# What dashboards of Triton ask for, as far as it is counted here.
TRITON = {
    "nv_pinned_memory_pool_total_bytes",
    "nv_pinned_memory_pool_used_bytes",
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_pending_request_count",
    "nv_model_load_duration_secs",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_request_duration_us",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_compute_output_duration_us",
    "nv_cache_num_hits_per_model",
    "nv_cache_num_misses_per_model",
    "nv_cache_hit_duration_per_model",
    "nv_cache_miss_duration_per_model",
    "nv_cpu_utilization",
    "nv_cpu_memory_total_bytes",
    "nv_cpu_memory_used_bytes",
}


class Broker:
    on = True
    connected = True
    dropped = 7
    waiting = 2
    published = 100
    losses = 3
    taken_over = 2
    contested = False

    def __init__(self) -> None:
        self.latency: dict[tuple[str, ...], Distribution] = {}


class Spans:
    sent = 6
    dropped = 1


class Recording:
    failure = ""
    dropped = 3
    lost = 4
    written_bytes = 5


class SettingsState:
    fault = ""
    restart_needed = ("grpc.port", "metrics.port")


def sources(entries: Sequence[ModelEntry] = (), **changed: Any) -> Sources:
    plane = DataPlane(ModelRegistry())
    network = NetworkPipeline(
        "front", "signs", NetworkSection("signs"), plane, (), shares=FairShares()
    )
    network.missed["late"] += 1
    pipeline = LanePipeline(
        Camera("front", "synthetic://road"), plane, "lanes", (), networks=[network]
    )
    parts = {
        "broker": Broker(),
        "processors": ProcessorUse(),
        "settings": SettingsState(),
        "recorder": Recording(),
        **changed,
    }
    return Sources("1.2.3", lambda: entries, [pipeline], LaneLatency(), **parts)


class Waiting:
    """A scheduler that three requests wait in."""

    def pending(self) -> int:
        return 3


def ready(name: str, statistics: ModelStatistics) -> ModelEntry:
    loaded = LoadedModel(None, 2, Waiting(), statistics, load_s=1.5)
    return ModelEntry(name, 2, ModelState.READY, loaded=loaded)


class OfProcesses(TensorModel):
    def memory_bytes(self) -> dict[MemoryKind, int]:
        return {"processes": 4096}


def samples(given: Sources) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text, _ = Exposition(given).write("")
    return {
        # The parser puts `_total` behind the name of every counter, as it does with Triton's own.
        (
            sample.name.removesuffix("_total") if sample.name.startswith("nv_") else sample.name,
            frozenset(sample.labels.items()),
        ): sample.value
        for family in parser.text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_the_names_are_the_contracts() -> None:
    names = {name for name, _ in samples(sources([ready("m", ModelStatistics())]))}
    assert {name for name in names if name.startswith("nv_")} == TRITON
    assert {name for name in names if name.startswith("edge_")} < TABLE.keys()


def test_a_models_numbers_arrive_under_its_name_and_version() -> None:
    statistics = ModelStatistics()
    statistics.executed(4, Phases(1000, 2000, 3000))
    statistics.succeeded(9_000_000, 5_000, Phases(1000, 2000, 3000))
    statistics.failed(FailureReason.REJECTED, 100)
    statistics.failed(FailureReason.REJECTED, 100)
    found = samples(sources([ready("m", statistics)]))

    def value(name: str, **labels: str) -> float:
        return found[name, frozenset({"model": "m", "version": "2", **labels}.items())]

    assert value("nv_inference_request_success") == 1
    assert value("nv_inference_count") == 4
    assert value("nv_inference_exec_count") == 1
    assert value("nv_inference_request_duration_us") == 9000
    assert value("nv_inference_queue_duration_us") == 5
    assert value("nv_inference_compute_input_duration_us") == 1
    assert value("nv_inference_compute_infer_duration_us") == 2
    assert value("nv_inference_compute_output_duration_us") == 3
    assert value("nv_inference_pending_request_count") == 3
    assert value("nv_model_load_duration_secs") == 1.5
    assert value("nv_inference_request_failure", reason="REJECTED") == 2
    assert value("nv_inference_request_failure", reason="BACKEND") == 0


def test_whole_numbers_are_written_as_triton_writes_them() -> None:
    statistics = ModelStatistics()
    statistics.executed(25_000_000, Phases(1000, 2000, 3000))
    text, _ = Exposition(sources([ready("m", statistics)])).write("")
    lines = text.decode().splitlines()
    assert 'nv_inference_count{model="m",version="2"} 25000000' in lines
    assert 'nv_inference_exec_count{model="m",version="2"} 1' in lines
    assert 'nv_model_load_duration_secs{model="m",version="2"} 1.5' in lines


def test_a_model_that_failed_has_a_state_and_no_counts() -> None:
    found = samples(sources([ModelEntry("m", 0, ModelState.UNAVAILABLE, "broken")]))
    states = {
        dict(labels)["state"]: v for (n, labels), v in found.items() if n == "edge_model_state"
    }
    assert states == {"LOADING": 0, "READY": 0, "UNLOADING": 0, "UNAVAILABLE": 1}
    assert not any(name.startswith("nv_inference") for name, _ in found)


def test_a_model_that_was_unloaded_on_request_or_is_idle_alerts_nobody() -> None:
    idle = replace(ready("n", ModelStatistics()), state=ModelState.UNAVAILABLE, reason=IDLE)
    found = samples(sources([ModelEntry("m", 1, ModelState.UNAVAILABLE, UNLOADED), idle]))
    assert not any(name == "edge_model_state" for name, _ in found)


def test_a_missing_part_has_no_metrics() -> None:
    off = Broker()
    off.on = False
    for broker in (None, off):
        missing = sources(broker=broker, processors=None, settings=None, recorder=None)
        found = {name for name, _ in samples(missing)}
        parts = ("edge_mqtt", "nv_cpu", "edge_settings", "edge_recorder")
        assert not any(name.startswith(parts) for name in found)


def test_a_recorder_that_records_nothing_is_seen() -> None:
    assert samples(sources())["edge_recorder_ok", frozenset()] == 1
    full = Recording()
    full.failure = "the disk: No space left on device"
    assert samples(sources(recorder=full))["edge_recorder_ok", frozenset()] == 0


def test_a_reload_that_was_refused_and_what_waits_for_a_restart_are_counted() -> None:
    found = samples(sources())
    assert found["edge_settings_reloaded", frozenset()] == 1
    assert found["edge_settings_restart_needed", frozenset()] == 2
    refused = SettingsState()
    refused.fault = "config.toml: grpc.prot: unknown key"
    assert samples(sources(settings=refused))["edge_settings_reloaded", frozenset()] == 0


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8"),
        ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text"),
        ("text/html", "text/plain"),
    ],
)
def test_the_client_chooses_the_format(accept: str, content_type: str) -> None:
    _, answered = Exposition(sources()).write(accept)
    assert answered.startswith(content_type)


def test_both_formats_hold_to_their_rules_and_give_the_same_names() -> None:
    given = sources([ready("m", ModelStatistics())])
    exposition = Exposition(given)
    plain, _ = exposition.write("")
    assert not re.search(rb"^(# \w+ )?nv_\w+_total\b", plain, re.MULTILINE)
    open_text, _ = exposition.write("application/openmetrics-text; version=1.0.0")
    names = {
        s.name
        for f in openmetrics.text_string_to_metric_families(open_text.decode())
        for s in f.samples
    }
    names = {name for name in names if name.startswith(("nv_", "edge_"))}
    assert names == {name for name, _ in samples(given) if name.startswith(("nv_", "edge_"))}
    assert b"# TYPE nv_inference_count counter\n" in plain
    assert b"# TYPE nv_cpu_utilization gauge\n" in plain


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_a_name_that_is_not_utf_8_is_escaped(accept: str) -> None:
    name = os.fsdecode(b"m\xff")
    exposition = Exposition(sources([ready(name, ModelStatistics())]))
    text, _ = exposition.write(accept)
    assert rb"\xff" in text
    assert text.decode().count("nv_inference_count")


def of_board(root: Path, **changed: Any) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    watch = BoardWatch(root, ClockWatch(root, synchronized=lambda: True))
    watch.sample()
    watch.check()
    free: dict[str, int] = {"/var/lib/edge_server": 1 << 30}
    found = samples(sources(board=watch, free_bytes=lambda: free, **changed))
    named: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for (name, labels), value in found.items():
        named.setdefault(name, {})[labels] = value
    return named


def test_a_boards_numbers_arrive_in_units_of_prometheus(tmp_path: Path) -> None:
    found = of_board(plant("orin_nx_jetpack6", tmp_path))

    def value(name: str, /, **labels: str) -> float:
        return found[name][frozenset(labels.items())]

    assert value("nv_gpu_utilization", gpu_uuid="gpu") == 0.734
    assert value("edge_board_clock_hertz", engine="gpu") == 408e6
    assert value("edge_board_temperature_celsius", zone="tj-thermal") == 63.781
    assert value("edge_board_temperature_throttle_celsius", zone="gpu-thermal") == 99
    assert value("edge_board_power_watts", rail="VDD_IN") == pytest.approx(9.31, abs=0.01)
    assert value("edge_board_power_mode_info", id="3", name="25W") == 1
    assert value("edge_board_condition", reason="throttled") == 0
    assert value("edge_disk_free_bytes", directory="/var/lib/edge_server") == 1 << 30


class FollowedRepository:
    @property
    def deployments(self) -> FollowedRepository:
        return self

    def poll_age_s(self, now: float) -> float:
        return 1.0

    def outcomes(self) -> dict[str, int]:
        return {"rolled_back": 1}


def lane_frame() -> LaneFrame:
    now_ns = time.monotonic_ns()
    lane = Lane(np.zeros((2, 2), np.float32), 0.75)
    return LaneFrame("front", 1, 0, now_ns, 0, 1, 1, "m", lanes=(lane,))


def test_every_metric_of_the_reference_is_exported_with_its_labels(tmp_path: Path) -> None:
    statistics = ModelStatistics(LatencyMetrics(histograms=True))
    statistics.copied("to_device", 100)
    model = ready("m", statistics)
    assert model.loaded is not None
    loaded = replace(model.loaded, model=OfProcesses(lambda inputs, _: inputs))
    requests, latency, histograms = RequestMetrics(), LaneLatency(), Histograms((0.1,))
    requests.responded("grpc", "m", time.monotonic_ns())
    requests.failed("grpc", "UNAVAILABLE")
    latency(lane_frame(), None)
    histograms.observe({("front",): 0.05})
    broker = Broker()
    broker.latency = histograms.distributions()
    parts = sources(
        [replace(model, loaded=loaded, configuration=ServedConfiguration("config.pbtxt", "CPU"))],
        broker=broker,
        requests=requests,
        events=lambda: {("model", "rolled_back"): 1},
        ready=lambda: True,
        spans=Spans(),
        repository=FollowedRepository(),
        channels=[SimpleNamespace(report=ChannelReport("lanes", "oci://registry/lanes:stable"))],
    )
    front = parts.pipelines[0].camera
    front.faults["lost"] += 1
    front._last_mono_ns = time.monotonic_ns()
    labels: dict[str, set[str]] = {}
    for board in ("orin_nx_jetpack6", "agx_orin_jetpack7"):
        root = plant(board, tmp_path / board)
        watch = BoardWatch(root, ClockWatch(root, synchronized=lambda: True))
        watch.sample()
        watch.check()
        given = replace(parts, latency=latency, board=watch, free_bytes=lambda: {"/": 1})
        for name, found in samples(given):
            base = re.sub(r"_(bucket|count|sum)$", "", name)
            if base in TABLE or base.startswith("edge_"):
                labels.setdefault(base, set()).update({key for key, _ in found} - {"le"})
    assert labels == {row.name: set(row.labels.split()) for row in TABLE.values()}


def test_what_throttles_and_what_the_supply_did_is_counted(tmp_path: Path) -> None:
    found = of_board(plant("agx_orin_jetpack7", tmp_path))
    assert found["edge_board_condition"][frozenset({("reason", "throttled")})] == 1
    assert found["edge_board_supply_events_total"][frozenset({("counter", "oc1")})] == 2
    assert found["edge_board_storage_worn_ratio"][frozenset({("drive", "mmcblk0")})] == 0.3


def test_a_pc_has_no_metrics_of_what_it_does_not_report(tmp_path: Path) -> None:
    found = of_board(tmp_path)
    assert {name for name in found if name.startswith("edge_board")} == {
        "edge_board_condition",
        "edge_board_clock_state",
        "edge_board_clock_steps_total",
        "edge_board_sample_age_seconds",
    }
    assert "nv_gpu_utilization" not in found


def test_metrics_of_the_gpu_can_be_switched_off(tmp_path: Path) -> None:
    found = of_board(plant("orin_nx_jetpack6", tmp_path), gpu=False)
    assert "nv_gpu_utilization" not in found
