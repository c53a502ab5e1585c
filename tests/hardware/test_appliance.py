"""The daemon on a real GPU: the shipped network's plan is built beside lanes and takes over.

Without a GPU, or without TensorRT, every test here is skipped. It needs what the daemon needs.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge_server.gpu.device import Device

ROOT = Path(__file__).parents[2]
NETWORK, ENSEMBLE = "laneDetect_model", "lane_detection"
TIMEOUT_S = 600
READY_S = 60.0

pytestmark = [pytest.mark.hardware, pytest.mark.timeout(TIMEOUT_S)]


@pytest.fixture
def repository(device: Device, tmp_path: Path) -> Path:
    if importlib.util.find_spec("tensorrt") is None:
        pytest.skip("TensorRT is not here")
    return Path(shutil.copytree(ROOT / "models", tmp_path / "models"))


@contextmanager
def daemon(repository: Path, *arguments: str) -> Iterator[triton.InferenceServerClient]:
    """A daemon that polls `repository`; it must end with 0."""
    folder = repository.parent
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "edge_server", "run", f"--model-repository={repository}"),
                *("--model-control-mode=poll", "--repository-poll-secs=1", f"--grpc-port={port}"),
                *("--allow-http=false", "--allow-metrics=false", *arguments),
            ],
            cwd=ROOT,
            env={**os.environ, "STATE_DIRECTORY": str(folder / "state")},
            stderr=log,
        )
    try:
        with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
            wait_until(lambda: process.poll() is not None or is_live(client), READY_S, folder)
            assert process.poll() is None, (folder / "log").read_text()
            yield client
        process.send_signal(signal.SIGTERM)
        assert process.wait(READY_S) == 0, (folder / "log").read_text()
    finally:
        process.kill()
        process.wait()


def is_live(client: triton.InferenceServerClient) -> bool:
    try:
        return bool(client.is_server_ready())
    except InferenceServerException:
        return False


def wait_until(holds: Callable[[], bool], within_s: float, folder: Path) -> None:
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s, (folder / "log").read_text()
        time.sleep(0.1)


def network(client: triton.InferenceServerClient) -> tuple[str, str]:
    """The platform that serves the lane network, and the reason on the index."""
    (model,) = ready(client)
    return client.get_model_config(NETWORK).config.platform, model.reason


def ready(client: triton.InferenceServerClient) -> list[Any]:
    """The lane network's versions that serve, of the index."""
    models = client.get_model_repository_index().models
    return [each for each in models if each.name == NETWORK and each.state == "READY"]


def lanes(client: triton.InferenceServerClient) -> dict[str, np.ndarray]:
    """Lanes of a grey road with two white lines."""
    image = np.full((1, 720, 1280, 3), 90, np.uint8)
    rows = np.arange(360, 720)
    for at in (-1.0, 1.0):
        for row, x in zip(rows, (640 + at * 0.9 * (rows - 330)).astype(int), strict=True):
            image[0, row, max(x - 6, 0) : max(x + 6, 0)] = 255
    asked = triton.InferInput("image", image.shape, "UINT8")
    asked.set_data_from_numpy(image)
    answer = client.infer(ENSEMBLE, [asked])
    return {name: answer.as_numpy(name) for name in ("lane_points", "lane_scores")}


def test_the_shipped_network_serves_at_once_and_its_plan_takes_over_when_it_is_built(
    repository: Path,
) -> None:
    with daemon(repository, "--camera=front=synthetic://road?seed=7") as client:
        platform, reason = network(client)
        assert platform == "onnxruntime_onnx"
        assert reason.startswith("degraded: configs/tensorrt.pbtxt: plan building: ")
        expected = lanes(client)
        assert len(expected["lane_scores"][0]) == 2

        def takes_over() -> bool:
            answered = lanes(client)
            # FP16 beside FP32, of a network that sees pixels of two and three.
            np.testing.assert_allclose(answered["lane_points"], expected["lane_points"], atol=3)
            return network(client) == ("tensorrt_plan", "")

        wait_until(takes_over, TIMEOUT_S, repository.parent)
    # The plan is kept: the next start serves it at once.
    with daemon(repository) as client:
        assert network(client) == ("tensorrt_plan", "")
        lanes(client)
        # A new version is built, takes over and loses no request meanwhile.
        shutil.copytree(repository / NETWORK / "1", repository / NETWORK / "2.part")
        (repository / NETWORK / "2.part").rename(repository / NETWORK / "2")

        def replaced() -> bool:
            lanes(client)
            return [each.version for each in ready(client)] == ["2"] and (
                network(client) == ("tensorrt_plan", "")
            )

        wait_until(replaced, TIMEOUT_S, repository.parent)
