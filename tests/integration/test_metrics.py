"""What Prometheus would scrape from a daemon that serves."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from collections.abc import Callable

    import tritonclient.grpc as triton
    from support.daemon_process import Process
    from support.mosquitto import Mosquitto

MODELS = Path(__file__).parents[2] / "models"
TIMEOUT_S = 30.0


def scrape(process: Process) -> dict[tuple[str, str], float]:
    """(name, model or camera) → the sum of its samples."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{process.metrics_port}/metrics",
        headers={"Accept": "application/openmetrics-text; version=1.0.0"},
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
        text = answer.read().decode()
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, sample.labels.get("model", sample.labels.get("camera", ""))
            found[key] = found.get(key, 0) + sample.value
    return found


def test_each_request_is_counted_with_each_model_that_ran_for_it(
    shipped: Process,
    client: Callable[..., triton.InferenceServerClient],
    road_input: triton.InferInput,
) -> None:
    before = scrape(shipped)
    for _ in range(3):
        client(shipped).infer("lane_detection", [road_input])
    with pytest.raises(InferenceServerException):
        client(shipped).infer("lane_detection", [])
    after = scrape(shipped)
    for model in ("lane_detection", "lane_preprocess", "laneDetect_model", "lane_decode"):
        key = "nv_inference_request_success", model
        assert after[key] - before[key] == 3
        assert after["nv_inference_request_duration_us", model] > 0
    assert ("edge_mqtt_connected", "") not in after


def test_a_camera_and_its_lanes_are_counted(
    start: Callable[..., Process], road_image: object, tmp_path: Path, mosquitto: Mosquitto
) -> None:
    process = start(
        "--model-repository",
        str(MODELS),
        f"--camera=front=file://{tmp_path}/road?loop=true&fps=20",
        f"--mqtt=127.0.0.1:{mosquitto.port}",
    )
    count = "edge_end_to_end_latency_seconds_count", "front"
    wait_until(lambda: count in scrape(process))
    found = scrape(process)
    assert found["edge_frames_total", "front"] > 0
    assert found["edge_camera_up", "front"] == 1
    assert found["edge_stage_latency_seconds_sum", "front"] > 0
    assert ("edge_mqtt_connected", "") in found
    assert process.terminate() == 0


def test_without_metrics_nothing_listens_there(start: Callable[..., Process]) -> None:
    process = start("--model-repository", str(MODELS), "--allow-metrics=false")
    with pytest.raises(urllib.error.URLError, match="refused"):
        scrape(process)
