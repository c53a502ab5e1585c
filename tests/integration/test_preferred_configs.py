"""The shipped lane network on the accelerator: built, taken over, rebuilt; GPU, NVDLA and TensorRT
are simulated."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.daemon_process import Process
from support.flashed_board import FlashedBoard
from support.polling_server import POLL
from support.verb import run_verb
from support.waiting import wait_until

from tests.integration.test_tensorrt import copies, lanes

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    import tritonclient.grpc as triton

CHECKOUT = Path(__file__).parents[2]
MODELS = f"--model-repository={CHECKOUT / 'models'}"
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
    on_gpu: Callable[..., None],
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


def test_a_plan_that_cannot_be_built_leaves_its_reason_and_another_tensorrt_builds_it(
    on_gpu: Callable[..., None],
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
) -> None:
    on_gpu("fail=build")
    process = start(MODELS)
    connected = client(process)
    wait_until(
        lambda: "no implementation" in network(connected)[1],
        BUILT_S,
        otherwise=process.log.read_text,
    )
    platform, reason = network(connected)
    assert platform == "onnxruntime_onnx"
    assert reason.startswith("degraded: configs/tensorrt.pbtxt: ")
    assert process.terminate() == 0
    # The reason is kept: nothing is built again for what has just failed.
    on_gpu()
    process = start(MODELS)
    connected = client(process)
    wait_until(
        lambda: "as its build failed" in network(connected)[1],
        BUILT_S,
        otherwise=process.log.read_text,
    )
    assert process.terminate() == 0
    on_gpu("version=10.16.2.1")
    process = start(MODELS)
    connected = client(process)
    wait_until(
        lambda: network(connected) == ("tensorrt_plan", ""),
        BUILT_S,
        otherwise=process.log.read_text,
    )


def test_one_setting_puts_the_network_on_nvdla(
    on_gpu: Callable[..., None],
    tmp_path: Path,
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
    road_input: triton.InferInput,
) -> None:
    on_gpu("dla_cores=1")
    settings = tmp_path / "settings.toml"
    settings.write_text(f'[repository]\npaths = ["{CHECKOUT}/models"]\nconfig_name = "nvdla"\n')
    assert refresh(f"--config={settings}") == "plans: 0 fit, 1 built"
    connected = client(start(f"--config={settings}"))
    assert network(connected) == ("tensorrt_plan", "")
    (group,) = connected.get_model_config("laneDetect_model").config.instance_group
    assert [device.device_id for device in group.secondary_devices] == [0]
    assert len(lanes(connected, road_input)["lane_scores"][0]) >= 2


def test_where_there_is_no_nvdla_core_the_gpu_serves_degraded_with_the_reason(
    on_gpu: Callable[..., None],
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
) -> None:
    on_gpu("version=10.16.2.1,dla_cores=0")
    process = start(MODELS, "--model-config-name=nvdla")
    connected = client(process)
    wait_until(
        lambda: network(connected)[0] == "tensorrt_plan", BUILT_S, otherwise=process.log.read_text
    )
    _, reason = network(connected)
    assert "degraded: configs/nvdla.pbtxt: " in reason
    assert "DLA Core ID: 0, available number of DLA cores: 0" in reason
    assert "not with JetPack 7.2 (10.16)" in reason


def test_where_tensorrt_has_no_fp16_flag_the_plan_has_the_types_of_the_onnx_file(
    on_gpu: Callable[..., None],
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
) -> None:
    on_gpu("version=11.4.0.106")
    process = start(MODELS)
    connected = client(process)
    wait_until(
        lambda: network(connected)[0] == "tensorrt_plan", BUILT_S, otherwise=process.log.read_text
    )
    _, reason = network(connected)
    assert reason.startswith("degraded: configs/tensorrt.pbtxt: ")
    assert "TensorRT 11.4 takes no --fp16: give an ONNX file that is FP16-typed" in reason


def test_a_plan_that_fails_its_checks_leaves_the_onnx_file_in_service(
    on_gpu: Callable[..., None],
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
) -> None:
    on_gpu("off=nan")
    assert refresh(MODELS) == "plans: 0 fit, 1 built"
    platform, reason = network(client(start(MODELS)))
    assert platform == "onnxruntime_onnx"
    assert reason.startswith("degraded: configs/tensorrt.pbtxt: ")
    assert "output 'predict_lanes' has no finite element" in reason


def test_a_plan_that_kills_the_daemon_twice_is_put_aside_and_the_onnx_file_serves(
    on_gpu: Callable[..., None],
    tmp_path: Path,
    client: Callable[[Process], triton.InferenceServerClient],
    start: Callable[..., Process],
) -> None:
    on_gpu()
    assert refresh(MODELS) == "plans: 0 fit, 1 built"
    on_gpu("crash=deserialize")
    for _ in range(2):
        process = Process(tmp_path, MODELS, *POLL)
        assert process.popen.wait(60) == -signal.SIGABRT
        process.close()
    process = start(MODELS, *POLL)
    connected = client(process)
    # The other models are ready from the copies that served before it.
    wait_until(
        lambda: connected.is_model_ready("laneDetect_model"), otherwise=process.log.read_text
    )
    platform, reason = network(connected)
    assert platform == "onnxruntime_onnx"
    assert "degraded: configs/tensorrt.pbtxt: quarantined: " in reason
    assert "edge-server models release laneDetect_model" in reason


def test_without_a_gpu_the_onnx_file_serves_and_check_says_why() -> None:
    done = edge("check", MODELS, "--allow-metrics=false", LD_LIBRARY_PATH="/nowhere")
    assert done.returncode == 0, done.stderr
    (line,) = (each for each in done.stdout.splitlines() if "laneDetect_model" in each)
    assert line.startswith(
        "model laneDetect_model version 1: READY, config.pbtxt on CPU: configs/tensorrt.pbtxt, "
        "configs/tensorrt_fp32.pbtxt: there is no GPU: no CUDA driver"
    )
    assert refresh(MODELS, LD_LIBRARY_PATH="/nowhere").startswith(
        "plans: none is needed: no CUDA driver"
    )


def test_check_builds_nothing_and_warns_of_a_plan_that_is_missing(
    on_gpu: Callable[..., None], tmp_path: Path
) -> None:
    on_gpu()
    done = edge("check", MODELS)
    assert "warning: model laneDetect_model version 1: READY, config.pbtxt on CPU: degraded: " in (
        done.stdout
    )
    assert not list(tmp_path.glob("state/plans/*/model.plan"))


def test_a_flashed_board_builds_serves_a_plan_and_builds_it_again_for_another_tensorrt(
    on_gpu: Callable[..., None],
    tmp_path: Path,
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
    road_input: triton.InferInput,
) -> None:
    """The board is simulated: a folder for the image, no partition, `firstboot` run by hand in the
    place of systemd, TensorRT and GPU by tests/simulated_gpu. `edge-server` is real."""
    orin = "compute=87,integrated=1,driver=12060"
    on_gpu(cuda=orin)
    board = FlashedBoard(tmp_path)
    (tmp_path / "tools" / "edge-server").write_text(
        f"#!/bin/sh\n[ $1 = plan ] || exit 0\nPYTHONPATH={os.environ['PYTHONPATH']} "
        f'exec {sys.executable} -m edge_server "$@"\n'
    )
    settings = board.root / "etc/edge_server/config.toml"
    shipped = settings.read_text()
    settings.write_text(shipped.replace("/usr/share/edge_server/models", f"{CHECKOUT}/models"))

    def plans() -> str:
        booted = board.boot()
        assert booted.returncode == 0, booted.stderr
        report = (board.root / "data/report").read_text().splitlines()
        return next(line for line in report if line.startswith("plans: "))

    def serve() -> tuple[Process, triton.InferenceServerClient]:
        process = start(f"--config={settings}")
        return process, client(process)

    assert plans() == "plans: 0 fit, 1 built"
    process, connected = serve()
    assert network(connected) == ("tensorrt_plan", "")
    assert len(lanes(connected, road_input)["lane_scores"][0]) >= 2
    # From the frame to the network nothing is copied; its rows come to the host to be decoded.
    copied = {key: count for key, count in copies(process).items() if count}
    assert copied == {("lane_decode", "to_host"): 1}
    assert process.terminate() == 0
    # The daemon is started again by the update, without a boot.
    on_gpu("version=10.16.2.1,build_s=1", orin)
    process, connected = serve()
    platform, reason = network(connected)
    assert platform == "onnxruntime_onnx"
    assert reason.startswith("degraded: configs/tensorrt.pbtxt: plan building: ")
    wait_until(
        lambda: network(connected) == ("tensorrt_plan", ""),
        BUILT_S,
        otherwise=process.log.read_text,
    )
    assert len(lanes(connected, road_input)["lane_scores"][0]) >= 2
    assert process.terminate() == 0
    assert plans() == "plans: 1 fit, 0 built"


def edge(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_verb(*arguments, env={**os.environ, **environment})


def refresh(*arguments: str, **environment: str) -> str:
    """The last line of `plan refresh`."""
    done = edge("plan", "refresh", *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
