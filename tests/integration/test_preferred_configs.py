"""The shipped lane network on the accelerator: built, taken over, rebuilt; GPU, NVDLA and TensorRT
are simulated."""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from integration.test_tensorrt import copies, lanes
from support.daemon_process import Process
from support.polling_server import POLL
from support.processes import first_to_kill, is_running
from support.verb import run_verb
from support.waiting import wait_until

from edge_server.backends.tensorrt.plan_options import sha256_of

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    import tritonclient.grpc as triton

CHECKOUT = Path(__file__).parents[2]
MODELS = f"--model-repository={CHECKOUT / 'models'}"
# A build has the lowest priority, on a machine that runs other tests.
BUILT_S = 120.0
MODES = pytest.mark.parametrize(
    "mode", [pytest.param((), marks=pytest.mark.long, id="none"), pytest.param(POLL, id="poll")]
)


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

    wait_until(takes_over, BUILT_S, every_s=1.0, otherwise=process.log.read_text)
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


def built_of(tmp_path: Path) -> str:
    """The ONNX file beside the shipped network that the only plan was built of."""
    (side_car,) = tmp_path.glob("state/plans/*/model.plan.json")
    digest = json.loads(side_car.read_bytes())["onnx_sha256"]
    files = (CHECKOUT / "models" / "laneDetect_model" / "1").glob("*.onnx")
    (name,) = (each.name for each in files if sha256_of(each) == digest)
    return name


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


def test_two_daemons_build_one_plan_and_serve_on_when_it_has_gone(
    on_gpu: Callable[..., None],
    tmp_path: Path,
    client: Callable[[Process], triton.InferenceServerClient],
    road_input: triton.InferInput,
) -> None:
    on_gpu("build_s=2")
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
        (folder / "settings.toml").write_text(
            f'[repository]\npaths = ["{CHECKOUT}/models"]\n[events]\nfile = "{folder}/events"\n'
        )
    with ExitStack() as stack:
        processes = []
        for folder in folders:
            processes.append(Process(folder, f"--config={folder}/settings.toml"))
            stack.callback(processes[-1].close)
        for process in processes:
            process.wait_for("READY=1")
        connected = [client(process) for process in processes]

        def logs() -> str:
            return "\n".join(process.log.read_text() for process in processes)

        wait_until(
            lambda: [network(each)[0] for each in connected] == ["tensorrt_plan"] * 2,
            BUILT_S,
            otherwise=logs,
        )
        assert logs().count("plan: building") == 1
        shutil.rmtree(tmp_path / "state" / "plans")
        for each in connected:
            assert len(lanes(each, road_input)["lane_scores"][0]) >= 2
            assert network(each) == ("tensorrt_plan", "")


@pytest.mark.long
def test_a_build_that_is_killed_is_told_and_a_changed_configuration_is_built(
    on_gpu: Callable[..., None],
    tmp_path: Path,
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
) -> None:
    on_gpu("build_s=4")
    models = tmp_path / "models"
    shutil.copytree(CHECKOUT / "models", models)
    process = start(f"--model-repository={models}", *POLL)
    connected = client(process)

    def change(old: str, new: str) -> None:
        config = models / "laneDetect_model" / "configs" / "tensorrt.pbtxt"
        text = config.read_text()
        assert old in text
        (tmp_path / "new").write_text(text.replace(old, new))
        (tmp_path / "new").rename(config)

    def is_said(words: str) -> None:
        wait_until(lambda: words in network(connected)[1], BUILT_S, otherwise=process.log.read_text)

    # As the kernel does where memory runs out.
    os.kill(wait_until(lambda: first_to_kill(process.popen.pid), BUILT_S), signal.SIGKILL)
    is_said("was killed: most likely for want of memory")
    change('"fp16"', '"fp61"')
    is_said("fp61")
    change('"fp61"', '"fp32"')
    first = wait_until(lambda: first_to_kill(process.popen.pid), BUILT_S)
    # What is being built is not wanted any more.
    change('"fp32"', '"int8"')
    wait_until(lambda: not is_running(first), BUILT_S)
    wait_until(
        lambda: network(connected)[0] == "tensorrt_plan", BUILT_S, otherwise=process.log.read_text
    )
    assert built_of(tmp_path) == "model_int8.onnx"
    assert not list(tmp_path.glob("state/plans/*/.*.tmp"))


@pytest.mark.long
def test_a_disk_that_fills_while_a_plan_is_built_is_told_and_the_plan_follows_once_there_is_room(
    on_gpu: Callable[..., None],
    tmp_path: Path,
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
) -> None:
    if os.geteuid():
        pytest.skip("a disk of its own needs root")
    on_gpu("build_s=3")
    state = tmp_path / "state"
    state.mkdir()
    own_disk = f'mount -t tmpfs -o size=24m tmpfs {state}; exec "$@"'
    within = ("unshare", "--mount", "--propagation=private", "sh", "-ec", own_disk, "sh")
    process = start(MODELS, within=within)
    connected = client(process)

    def is_said(words: str) -> None:
        wait_until(lambda: words in network(connected)[1], BUILT_S, otherwise=process.log.read_text)

    is_said("plan building: model.plan")
    filler = Path(f"/proc/{process.popen.pid}/root{state}/filler")
    with suppress(OSError), filler.open("wb") as file:
        while file.write(bytes(1 << 16)):
            pass
    is_said("No space left on device")
    is_said("the disk has 0 MiB left, and a plan of model.onnx takes about 8; make room there")
    filler.unlink()
    wait_until(
        lambda: network(connected) == ("tensorrt_plan", ""),
        BUILT_S,
        otherwise=process.log.read_text,
    )


def test_without_a_gpu_the_onnx_file_serves_and_check_says_why() -> None:
    done = edge("check", MODELS, "--allow-metrics=false", LD_LIBRARY_PATH="/nowhere")
    assert done.returncode == 0, done.stderr
    (line,) = (each for each in done.stdout.splitlines() if "laneDetect_model" in each)
    assert line.startswith(
        "model laneDetect_model version 1: READY, config.pbtxt on CPU: configs/tensorrt.pbtxt: "
        "there is no GPU: no CUDA driver"
    )
    assert refresh(MODELS, LD_LIBRARY_PATH="/nowhere").startswith(
        "plans: none is needed: no CUDA driver"
    )


@pytest.fixture
def row(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Runs `doctor` with these settings: the level of its row of the models, and what it found."""
    config = tmp_path / "config.toml"

    def run(*lines: str, **environment: str) -> tuple[str, str]:
        config.write_text("\n".join(["[repository]", f'paths = ["{CHECKOUT}/models"]', *lines]))
        done = edge("doctor", "--config", str(config), "--json", **environment)
        (found,) = (each for each in json.loads(done.stdout)["checks"] if each["name"] == "models")
        return found["level"], found["found"]

    return run


def test_doctor_names_the_configuration_that_would_serve_in_one_row(
    on_gpu: Callable[..., None], row: Callable[..., tuple[str, str]]
) -> None:
    on_gpu("version=10.16.2.1,dla_cores=0")
    level, found = row()
    assert level == "warning"
    assert found.startswith(
        "laneDetect_model: config.pbtxt on CPU: degraded: configs/tensorrt.pbtxt: plan building: "
    )
    assert refresh(MODELS) == "plans: 0 fit, 1 built"
    assert row() == ("ok", "laneDetect_model: configs/tensorrt.pbtxt on GPU 0")


@pytest.mark.long
def test_doctor_names_what_serves_where_there_is_no_gpu_or_no_nvdla_core(
    on_gpu: Callable[..., None], row: Callable[..., tuple[str, str]]
) -> None:
    level, found = row(LD_LIBRARY_PATH="/nowhere")
    assert level == "ok"
    assert found.startswith(
        "laneDetect_model: config.pbtxt on CPU: configs/tensorrt.pbtxt: there is no GPU: "
    )
    on_gpu("version=10.16.2.1,dla_cores=0")
    assert refresh(MODELS) == "plans: 0 fit, 1 built"
    level, found = row('config_name = "nvdla"')
    assert level == "warning"
    assert found.startswith(
        "laneDetect_model: configs/tensorrt.pbtxt on GPU 0: degraded: configs/nvdla.pbtxt: "
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


def edge(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_verb(*arguments, env={**os.environ, **environment})


def refresh(*arguments: str, **environment: str) -> str:
    """The last line of `plan refresh`."""
    done = edge("plan", "refresh", *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
