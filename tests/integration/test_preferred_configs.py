"""The shipped lane network on the accelerator: built, taken over, rebuilt; GPU, NVDLA and TensorRT
are simulated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.polling_server import POLL
from support.waiting import wait_until
from tests.integration.test_tensorrt import copies, lanes, on_gpu  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from collections.abc import Callable

    import tritonclient.grpc as triton
    from support.daemon_process import Process

MODELS = f"--model-repository={Path(__file__).parents[2] / 'models'}"
# A build has the lowest priority, on a machine that runs other tests.
BUILT_S = 120.0
MODES = pytest.mark.parametrize("mode", [(), POLL], ids=["none", "poll"])


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))


def network(client: triton.InferenceServerClient) -> tuple[str, str]:
    """The platform that serves the lane network, and the reason on the index."""
    models = client.get_model_repository_index().models
    (model,) = (each for each in models if each.name == "laneDetect_model")
    assert model.state == "READY"
    return client.get_model_config(model.name).config.platform, model.reason


@MODES
def test_the_onnx_file_serves_degraded_until_the_plan_takes_over_and_then_the_plan_at_once(
    on_gpu: Callable[..., None],  # noqa: F811
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
    road_input: triton.InferInput,
    mode: tuple[str, ...],
) -> None:
    on_gpu("build_s=2")
    process = start(MODELS, *mode)
    connected = client(process)
    platform, reason = network(connected)
    assert platform == "onnxruntime_onnx"
    assert reason.startswith("degraded: configs/tensorrt.pbtxt: plan building: ")
    expected = lanes(connected, road_input)

    def takes_over() -> bool:
        for name, array in lanes(connected, road_input).items():
            np.testing.assert_allclose(array, expected[name], rtol=1e-4, atol=1e-3)
        platform, reason = network(connected)
        return platform == "tensorrt_plan" and "degraded" not in reason

    wait_until(takes_over, BUILT_S, every_s=0.2, otherwise=process.log.read_text)
    counted = copies(process)
    lanes(connected, road_input)
    after = copies(process)
    assert after["laneDetect_model", "to_device"] == counted["laneDetect_model", "to_device"]
    assert process.terminate() == 0
    assert network(client(start(MODELS, *mode))) == ("tensorrt_plan", "")
