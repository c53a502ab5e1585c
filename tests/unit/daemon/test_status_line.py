"""The status line says what serves, and changes only where a state does."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from edge_server.cameras.status import CameraState, CameraStatus
from edge_server.daemon.status import LaneRate, status_line
from edge_server.inference.registry import (
    IDLE,
    UNLOADED,
    ModelEntry,
    ModelState,
    ServedConfiguration,
)
from edge_server.lanes.types import LaneFrame
from edge_server.pipeline.lane_feed import LaneLatency

if TYPE_CHECKING:
    from collections.abc import Callable

READY = [ModelEntry("a", 1, ModelState.READY), ModelEntry("b", 1, ModelState.READY)]
LIVE = CameraStatus(CameraState.LIVE)
STALLED = CameraStatus(CameraState.STALLED, "no_frames", "", 1_000_000_000)
DARK = CameraStatus(CameraState.DEGRADED, "dark", "", 1_000_000_000)


def loop(
    name: str, status: CameraStatus, failure: str = "", network: str = "", model: str = "lanes"
) -> Any:
    camera = SimpleNamespace(name=name, status=status)
    networks = [SimpleNamespace(name="signs", failure=network)]
    return SimpleNamespace(camera=camera, failure=failure, networks=networks, model=model)


def line(
    *pipelines: Any,
    entries: list[ModelEntry] = READY,
    broker: str = "off",
    rate: LaneRate | None = None,
    reload: Any = None,
) -> Callable[[float], str]:
    of = entries, pipelines, broker, rate or LaneRate(lambda: 0), reload
    return lambda now: status_line(*of, now=now)


@pytest.mark.parametrize(
    ("pipelines", "now", "expected"),
    [
        ((), 0.0, "serving 2 models, no camera, broker off"),
        ([loop("a", LIVE)], 0.0, "serving 2 models, 1 camera, broker off"),
        ([loop("a", LIVE), loop("b", STALLED)], 24.0, "1 of 2 cameras (b: stalled 20 s)"),
        ([loop("a", LIVE), loop("b", STALLED)], 5.0, "1 of 2 cameras (b: stalled),"),
        ([loop("b", STALLED)], 200.0, "0 of 1 camera (b: stalled 3 min)"),
        ([loop("b", STALLED)], 8000.0, "0 of 1 camera (b: stalled 2 h)"),
        ([loop("b", DARK)], 5.0, "1 of 1 camera (b: degraded (dark)),"),
        ([loop("b", LIVE, "", "late: its frames")], 0.0, "(b: network signs: late: its frames)"),
        ([loop("b", LIVE, "model gone\nreally")], 0.0, "0 of 1 camera (b: no lanes: model gone "),
    ],
)
def test_cameras_with_a_fault_are_named(pipelines: Any, now: float, expected: str) -> None:
    assert expected in line(*pipelines)(now)


def test_models_that_serve_degraded_are_named() -> None:
    degraded = ServedConfiguration("config.pbtxt", "CPU", degraded="plan building: 45 %")
    entries = [READY[0], replace(READY[1], configuration=degraded)]
    assert "serving 2 models (b degraded), no camera" in line(entries=entries)(0.0)


def test_models_that_failed_are_named_and_unloaded_ones_are_not() -> None:
    entries = [
        ModelEntry("a", 1, ModelState.READY),
        ModelEntry("a", 2, ModelState.UNAVAILABLE, "older"),
        ModelEntry("b", 1, ModelState.UNAVAILABLE, UNLOADED),
        ModelEntry("d", 1, ModelState.UNAVAILABLE, IDLE, SimpleNamespace()),
        ModelEntry("c", 1, ModelState.UNAVAILABLE, "x" * 1000),
    ]
    text = line(entries=entries, broker="connected")(0.0)
    assert text == f"serving 1 of 2 models (c: {'x' * 120}…), no camera, broker connected"


def test_the_rate_is_measured_over_ten_seconds_and_stays_while_it_differs_little() -> None:
    counted = [0]
    shown = line(loop("a", LIVE), rate=LaneRate(lambda: sum(counted)))

    def ten_seconds(frames: int, since: float) -> str:
        counted.append(frames)
        return shown(since + 10)

    assert "lanes/s" not in shown(100.0)
    assert ten_seconds(410, 100.0).endswith(", 41 lanes/s")
    assert ten_seconds(400, 110.0).endswith(", 41 lanes/s")
    assert ten_seconds(48, 120.0).endswith(", 4.8 lanes/s")
    assert ten_seconds(0, 130.0).endswith(", 0.0 lanes/s")
    assert ten_seconds(1, 140.0).endswith(", 0.1 lanes/s")
    counted.clear()  # the camera was removed
    assert ten_seconds(0, 150.0).endswith(", 0.0 lanes/s")


def test_there_is_no_rate_of_lanes_where_no_camera_has_a_lane_model() -> None:
    text = line(loop("a", LIVE, model=""), rate=LaneRate(lambda: 0))
    assert [text(at) for at in (0.0, 20.0)] == ["serving 2 models, 1 camera, broker off"] * 2


def test_only_frames_with_lanes_are_counted() -> None:
    latency = LaneLatency()
    latency(LaneFrame("a", 1, 0, 0, 0, 1, 1, "m"), None)
    latency(LaneFrame("a", 2, 0, 0, 0, 1, 1, "m", failure="no model"), None)
    latency(LaneFrame("b", 1, 0, 0, 0, 1, 1, "m"), None)
    assert latency.frames() == 2
    latency.forget("a")
    assert latency.frames() == 1


def test_what_became_of_the_last_reload_is_part_of_it() -> None:
    reload = SimpleNamespace(restart_needed=("grpc.port", "device.id"), fault="c.toml: not TOML")
    text = line(reload=reload)(0.0)
    assert "; restart needed for grpc.port, device.id; settings not reloaded: c.toml: not" in text
