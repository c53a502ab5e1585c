"""Plans in a daemon of its own, asked by the real client; GPU and TensorRT are simulated."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime
import pytest
import tritonclient.grpc as triton
from prometheus_client.parser import text_string_to_metric_families
from support.adding_models import network
from support.daemon_process import Process
from support.mosquitto import Mosquitto, Subscriber
from support.polling_server import POLL
from support.simulated_gpu import SIMULATED_GPU
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


MODELS = Path(__file__).parents[2] / "models"
LANES = """
name: "laneDetect_model"
platform: "tensorrt_plan"
max_batch_size: 1
input [ { name: "input" data_type: TYPE_FP32 dims: [ 3, 360, 640 ] } ]
output [ { name: "predict_lanes" data_type: TYPE_FP32 dims: [ 2784, 77 ] } ]
instance_group [ { kind: KIND_GPU count: 2 } ]
"""
NO_GRAPHS = 'parameters { key: "cuda_graphs" value { string_value: "false" } }'


@pytest.fixture
def plan_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., bytes]:
    """The plan that the simulated TensorRT would build of an ONNX file."""
    monkeypatch.syspath_prepend(SIMULATED_GPU)
    from tensorrt.simulated_plan import SimulatedPlan

    return lambda onnx, **said: SimulatedPlan(**said).file(onnx.read_bytes())


@pytest.fixture
def models(tmp_path: Path, plan_of: Callable[..., bytes]) -> Path:
    """The shipped repository, its network a plan."""
    models = tmp_path / "models"
    shutil.copytree(MODELS, models)
    network = models / "laneDetect_model"
    (network / "1" / "model.plan").write_bytes(plan_of(network / "1" / "model.onnx"))
    (network / "1" / "model.onnx").unlink()
    (network / "config.pbtxt").write_text(LANES)
    return models


def lanes(client: triton.InferenceServerClient, road: triton.InferInput) -> dict[str, np.ndarray]:
    result = client.infer("lane_detection", [road])
    response = result.get_response()
    return {output.name: result.as_numpy(output.name) for output in response.outputs}


def copies(process: Process) -> dict[tuple[str, str], float]:
    """(model, direction) → how many tensors were copied between host and device."""
    return {
        (sample.labels["model"], sample.labels["direction"]): sample.value
        for family in text_string_to_metric_families(process.metrics())
        for sample in family.samples
        if sample.name == "edge_tensor_copies_total"
    }


def test_the_lanes_come_from_a_plan_that_gives_what_its_onnx_file_does(
    on_gpu: Callable[..., None],
    models: Path,
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
    road_input: triton.InferInput,
) -> None:
    process = start(f"--model-repository={models}")
    connected = client(process)
    assert len(lanes(connected, road_input)["lane_scores"][0]) >= 2
    statistics = connected.get_inference_statistics("laneDetect_model", as_json=True)
    assert int(statistics["model_stats"][0]["inference_count"]) == 1
    # A GPU that shares the host's memory reads the frame and writes the rows where they are.
    assert not any(copies(process).values())
    image = np.random.default_rng(0).random((1, 3, 360, 640), np.float32)
    given = triton.InferInput("input", list(image.shape), "FP32")
    given.set_data_from_numpy(image)
    made = connected.infer("laneDetect_model", [given]).as_numpy("predict_lanes")
    session = onnxruntime.InferenceSession(MODELS / "laneDetect_model" / "1" / "model.onnx")
    (expected,) = session.run(["predict_lanes"], {"input": image})
    np.testing.assert_allclose(made, expected, rtol=1e-4, atol=1e-4)
    assert "without CUDA graphs" not in process.log.read_text()
    assert process.terminate() == 0


def test_a_plan_that_cannot_be_a_graph_serves_and_the_index_says_so(
    on_gpu: Callable[..., None],
    models: Path,
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
    road_input: triton.InferInput,
) -> None:
    on_gpu("capture=refused")
    connected = client(start(f"--model-repository={models}"))
    assert len(lanes(connected, road_input)["lane_scores"][0]) >= 2
    found = {each.name: each for each in connected.get_model_repository_index().models}
    assert found["laneDetect_model"].state == "READY"
    assert found["laneDetect_model"].reason.startswith("runs without CUDA graphs: ")


def test_tensorrt_is_loaded_before_the_daemon_is_ready_also_without_a_plan(
    on_gpu: Callable[..., None], tmp_path: Path, start: Callable[..., Process]
) -> None:
    (tmp_path / "empty").mkdir()
    process = start(f"--model-repository={tmp_path / 'empty'}", "--model-control-mode=explicit")
    wait_until(lambda: ": ready, " in process.log.read_text())
    lines = process.log.read_text().splitlines()
    loaded, ready = (
        next(i for i, line in enumerate(lines) if words in line)
        for words in ("tensorrt: 10.3.0.30, loaded in", ": ready, ")
    )
    assert loaded < ready


def test_the_configuration_is_completed_from_the_plan(
    on_gpu: Callable[..., None],
    models: Path,
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
) -> None:
    (models / "laneDetect_model" / "config.pbtxt").write_text("max_batch_size: 1")
    connected = client(start(f"--model-repository={models}"))
    config = connected.get_model_config("laneDetect_model").config
    assert config.platform == "tensorrt_plan"
    assert [list(tensor.dims) for tensor in config.input] == [[3, 360, 640]]
    assert [group.kind for group in config.instance_group] == [1]
    assert connected.get_model_metadata("laneDetect_model").platform == "tensorrt_plan"


def test_a_plan_of_another_version_leaves_the_model_unavailable_with_the_remedy(
    on_gpu: Callable[..., None],
    models: Path,
    plan_of: Callable[..., bytes],
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
) -> None:
    on_gpu("version=10.16.2.1")
    connected = client(start(f"--model-repository={models}", "--exit-on-error=false"))
    index = connected.get_model_repository_index().models
    reason = next(model.reason for model in index if model.name == "laneDetect_model")
    assert "Serialized Engine Version: 10.3.0.30" in reason
    assert "edge-server plan build laneDetect_model" in reason
    with pytest.raises(InferenceServerException):
        connected.get_model_metadata("lane_detection")


def test_a_run_that_breaks_the_device_ends_the_daemon_with_its_own_code(
    on_gpu: Callable[..., None],
    models: Path,
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
    road_input: triton.InferInput,
) -> None:
    # The two runs before are those that prove the model.
    (models / "laneDetect_model" / "config.pbtxt").write_text(LANES + NO_GRAPHS)
    on_gpu("fail=run:2")
    process = start(f"--model-repository={models}")
    with pytest.raises(InferenceServerException):
        lanes(client(process), road_input)
    assert process.popen.wait(30) == 86


def adding(path: Path, number: float) -> None:
    """An ONNX file that adds `number` to a batch of its input."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_bytes(network(number, ("n", 4)))
    beside.rename(path)


BUILT_HERE = """
platform: "tensorrt_plan"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
parameters { key: "auto_build" value { string_value: "true" } }
"""
BUILDING = re.compile(r"building model\.plan with TensorRT 10\.3: \d+ % \(timing kernels\)")


def asked(client: triton.InferenceServerClient) -> float:
    given = triton.InferInput("x", [2, 4], "FP32")
    given.set_data_from_numpy(np.zeros((2, 4), np.float32))
    return float(client.infer("adding", [given]).as_numpy("y")[0, 0])


def model_states(client: triton.InferenceServerClient) -> tuple[str, str]:
    """What the index says of it: the state, and the reason."""
    (model,) = client.get_model_repository_index().models
    return model.state, model.reason


@pytest.fixture
def follow(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
) -> Callable[[], tuple[Process, triton.InferenceServerClient]]:
    """Starts a daemon that follows `tmp_path/models`; the plans it builds are below
    `tmp_path/state`."""
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))

    def begin() -> tuple[Process, triton.InferenceServerClient]:
        process = start(
            f"--model-repository={tmp_path / 'models'}",
            "--model-control-mode=poll",
            "--repository-poll-secs=0.2",
        )
        return process, client(process)

    return begin


def test_a_plan_is_built_from_the_onnx_file_beside_it_while_the_old_one_serves(
    on_gpu: Callable[..., None],
    tmp_path: Path,
    follow: Callable[[], tuple[Process, triton.InferenceServerClient]],
) -> None:
    on_gpu("build_s=3")
    model = tmp_path / "models" / "adding"
    adding(model / "1" / "model.onnx", 1)
    (model / "config.pbtxt").write_text(BUILT_HERE)
    process, connected = follow()
    assert asked(connected) == 1
    plans = tmp_path / "state" / "plans"
    assert len(list(plans.glob("*/model.plan"))) == 1
    adding(model / "1" / "model.onnx", 2)
    answers, said = {1.0}, {("READY", "")}

    def is_new() -> bool:
        said.add(model_states(connected))
        answers.add(asked(connected))
        return 2 in answers

    wait_until(is_new, 60, otherwise=process.log.read_text)
    assert answers == {1, 2}
    # Which of the percentages were asked for in time is chance.
    assert any(BUILDING.fullmatch(reason) for _, reason in said)
    assert {state for state, _ in said} == {"READY"}
    assert model_states(connected) == ("READY", "")
    process.wait_for_log("model adding: a plan is built: missing")
    process.wait_for_log("model adding: plan: building")
    assert len(list(plans.glob("*/model.plan"))) == 2


def test_how_far_a_first_plan_is_stands_on_mqtt_until_it_is_there(
    on_gpu: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mosquitto: Mosquitto,
    start: Callable[..., Process],
) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    on_gpu("build_s=3")
    (tmp_path / "models").mkdir()
    settings = tmp_path / "settings.toml"
    settings.write_text(
        f'[device]\nid = "tested"\n[mqtt]\nhost = "127.0.0.1"\nport = {mosquitto.port}\n'
    )
    topic = "edge/v1/tested/models/adding/state"
    subscriber = Subscriber(mosquitto.port, topic)
    try:
        start(f"--config={settings}", f"--model-repository={tmp_path / 'models'}", *POLL)
        onnx = tmp_path / "adding" / "1" / "model.onnx"
        adding(onnx, 1)
        (tmp_path / "adding" / "config.pbtxt").write_text(BUILT_HERE)
        (tmp_path / "adding").rename(tmp_path / "models" / "adding")
        subscriber.wait(topic, lambda said: said["state"] == "READY" and said["reason"] == "")
    finally:
        subscriber.close()
    said = subscriber.messages[topic]
    assert {each["state"] for each in said} == {"LOADING", "READY"}
    assert any(BUILDING.fullmatch(each["reason"]) for each in said)


@pytest.fixture
def told_at_start(
    on_gpu: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mosquitto: Mosquitto,
) -> Iterator[tuple[Subscriber, list[str]]]:
    """Who hears a device whose only model has a plan to be built, and how that one is started."""
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    on_gpu("build_s=3")
    adding(tmp_path / "models" / "adding" / "1" / "model.onnx", 1)
    (tmp_path / "models" / "adding" / "config.pbtxt").write_text(BUILT_HERE)
    settings = tmp_path / "settings.toml"
    settings.write_text(
        f'[device]\nid = "tested"\n[mqtt]\nhost = "127.0.0.1"\nport = {mosquitto.port}\n'
    )
    subscriber = Subscriber(mosquitto.port, "edge/v1/tested/#")
    yield subscriber, [f"--config={settings}", f"--model-repository={tmp_path / 'models'}"]
    subscriber.close()


STATUS, ADDING = "edge/v1/tested/status", "edge/v1/tested/models/adding/state"


def states(messages: list[dict[str, str]]) -> list[str]:
    return [said["state"] for said in messages]


@pytest.mark.parametrize(
    "mode", [pytest.param((), marks=pytest.mark.long, id="none"), pytest.param(POLL, id="poll")]
)
def test_how_far_the_plan_of_a_start_is_stands_on_mqtt_before_the_device_is_online(
    told_at_start: tuple[Subscriber, list[str]],
    mode: tuple[str, ...],
    start: Callable[..., Process],
) -> None:
    subscriber, arguments = told_at_start
    process = start(*arguments, *mode)
    subscriber.wait(STATUS, lambda said: said["state"] == "online")
    heard = list(subscriber.in_order)
    online = next(i for i, (_, said) in enumerate(heard) if said.get("state") == "online")
    before = [said for topic, said in heard[:online] if topic == ADDING]
    assert any(BUILDING.fullmatch(said["reason"]) for said in before)
    assert states(before)[-1] == "READY"
    assert process.terminate() == 0
    subscriber.wait(STATUS, lambda said: said["state"] == "offline")
    assert states(subscriber.messages[STATUS]) == ["starting", "online", "offline"]
    assert states(subscriber.messages[ADDING])[-1] == "READY"


def test_systemd_is_asked_for_more_time_while_the_plan_of_a_start_is_built(
    told_at_start: tuple[Subscriber, list[str]], tmp_path: Path
) -> None:
    _, arguments = told_at_start
    process = Process(tmp_path, *arguments)
    try:
        process.wait_for("EXTEND_TIMEOUT_USEC=90000000\nSTATUS=adding: building model.plan")
        process.wait_for("READY=1")
    finally:
        process.close()


def test_a_device_that_is_stopped_while_it_builds_was_never_online(
    told_at_start: tuple[Subscriber, list[str]], tmp_path: Path
) -> None:
    subscriber, arguments = told_at_start
    process = Process(tmp_path, *arguments)
    try:
        subscriber.wait(ADDING, lambda said: said["reason"].startswith("building"))
        process.terminate()
        subscriber.wait(STATUS, lambda said: said["state"] == "offline")
    finally:
        process.close()
    assert states(subscriber.messages[STATUS]) == ["starting", "offline"]


def test_a_device_with_a_wrong_model_says_why_and_was_never_online(
    told_at_start: tuple[Subscriber, list[str]], tmp_path: Path
) -> None:
    subscriber, arguments = told_at_start
    (tmp_path / "models" / "adding" / "1" / "model.onnx").write_bytes(b"no ONNX file")
    process = Process(tmp_path, *arguments)
    try:
        assert process.popen.wait(60) == 78
        subscriber.wait(STATUS, lambda said: said["state"] == "offline")
    finally:
        process.close()
    assert states(subscriber.messages[STATUS]) == ["starting", "offline"]
    last = subscriber.messages[ADDING][-1]
    assert last["state"] == "UNAVAILABLE"
    assert "the file is no ONNX model" in last["reason"]


def test_a_plan_that_cannot_be_built_leaves_what_serves_alone(
    on_gpu: Callable[..., None],
    tmp_path: Path,
    follow: Callable[[], tuple[Process, triton.InferenceServerClient]],
) -> None:
    model = tmp_path / "models" / "adding"
    adding(model / "1" / "model.onnx", 1)
    (model / "config.pbtxt").write_text(BUILT_HERE)
    process, connected = follow()
    (model / "1" / "model.new").write_bytes(b"no ONNX file")
    (model / "1" / "model.new").rename(model / "1" / "model.onnx")

    def state() -> str:
        assert asked(connected) == 1
        state, reason = model_states(connected)
        return state if "the file is no ONNX model" in reason else ""

    assert wait_until(state, 60, otherwise=process.log.read_text) == "READY"
    assert asked(connected) == 1


@pytest.mark.long
def test_a_plan_that_kills_the_daemon_is_quarantined_and_what_served_serves_again(
    on_gpu: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plan_of: Callable[..., bytes],
    client: Callable[[Process], triton.InferenceServerClient],
) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    model = tmp_path / "models" / "adding"
    onnx = model / "1" / "model.onnx"
    adding(onnx, 1)
    (model / "config.pbtxt").write_text(BUILT_HERE.replace('"true"', '"false"'))
    repository = f"--model-repository={tmp_path / 'models'}"
    build = [sys.executable, "-m", "edge_server", "plan", "build", "adding", repository]
    subprocess.run(build, check=True, timeout=60)
    arguments = [repository, "--model-control-mode=poll", "--repository-poll-secs=0.2"]
    with started(tmp_path / "first", arguments) as process:
        assert asked(client(process)) == 1
        # A side-car that vouches for it, so that nobody else reads it before.
        deadly = plan_of(onnx, crashes=True, profiles=[{"x": ((1, 4), (8, 4), (8, 4))}])
        side_car = model / "1" / "model.plan.json"
        said = json.loads(side_car.read_text())
        said["plan_sha256"] = hashlib.sha256(deadly).hexdigest()
        (model / "1" / "model.plan").write_bytes(deadly)
        side_car.write_text(json.dumps(said))
        assert process.popen.wait(30) == -signal.SIGABRT
    for life in range(8):
        with started(tmp_path / f"again_{life}", arguments) as process:
            if "quarantined" in process.log.read_text():
                break
            with suppress(subprocess.TimeoutExpired):
                process.popen.wait(5)
    with started(tmp_path / "last", arguments) as process:
        assert asked(client(process)) == 1
        assert process.popen.poll() is None


@contextmanager
def started(folder: Path, arguments: list[str]) -> Iterator[Process]:
    folder.mkdir()
    process = Process(folder, *arguments)
    try:
        with suppress(AssertionError):
            process.wait_for("READY=1")
        yield process
    finally:
        process.close()


CHAIN = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
ensemble_scheduling { step [
  { model_name: "first" model_version: -1
    input_map { key: "x" value: "x" } output_map { key: "y" value: "between" } },
  { model_name: "second" model_version: -1
    input_map { key: "x" value: "between" } output_map { key: "y" value: "y" } }
] }
"""


def test_between_two_plans_of_an_ensemble_nothing_is_copied_to_the_host(
    on_gpu: Callable[..., None],
    tmp_path: Path,
    plan_of: Callable[..., bytes],
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
) -> None:
    on_gpu(cuda="integrated=0")
    models = tmp_path / "models"
    for name, number in (("first", 1), ("second", 10)):
        adding(models / name / "1" / "model.onnx", number)
        plan = plan_of(
            models / name / "1" / "model.onnx", profiles=[{"x": ((1, 4), (4, 4), (8, 4))}]
        )
        (models / name / "1" / "model.onnx").rename(tmp_path / name)
        (models / name / "1" / "model.plan").write_bytes(plan)
    (models / "adding" / "1").mkdir(parents=True)
    (models / "adding" / "config.pbtxt").write_text(CHAIN)
    process = start(f"--model-repository={models}")
    connected = client(process)
    assert asked(connected) == 11
    counted = copies(process)
    # Only at both ends: the second plan brings its answer to the host itself.
    assert {name for name, copied in counted.items() if copied} == {
        ("first", "to_device"),
        ("second", "to_host"),
    }
