"""The whole daemon as a process: real tritonclient, real mosquitto, real signals."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import grpc
import numpy as np
import onnx
import paho.mqtt.client as mqtt
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper
from paho.mqtt.enums import CallbackAPIVersion
from tritonclient.utils import InferenceServerException

from edge_server.cameras.source import open_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "models"
PATIENCE_S = 30.0


class Process:
    """`edge-server run` with its own notify socket, so that READY is heard as systemd hears it."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        address = folder / "notify"
        self._socket.bind(str(address))
        self._socket.settimeout(PATIENCE_S)
        self.log = folder / "log"
        self.port = _free_port()
        with self.log.open("w") as log:
            self.popen = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "edge_server",
                    "run",
                    f"--grpc-port={self.port}",
                    *arguments,
                ],
                stderr=log,
                env={**os.environ, "NOTIFY_SOCKET": str(address)},
            )

    def wait_for(self, assignment: str) -> None:
        said = ""
        while assignment not in said:
            if self.popen.poll() is not None:
                raise AssertionError(f"ended with {self.popen.returncode}:\n{self.log.read_text()}")
            said = self._socket.recv(4096).decode()

    def terminate(self) -> int:
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(PATIENCE_S)

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self._socket.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts the daemon with these arguments and waits until it says READY."""
    started: list[Process] = []

    def start_process(*arguments: str) -> Process:
        process = Process(tmp_path, *arguments)
        started.append(process)
        process.wait_for("READY=1")
        return process

    yield start_process
    for process in started:
        process.close()


@pytest.fixture
def client(
    request: pytest.FixtureRequest,
) -> Iterator[Callable[[Process], triton.InferenceServerClient]]:
    made: list[triton.InferenceServerClient] = []

    def connect(process: Process) -> triton.InferenceServerClient:
        made.append(triton.InferenceServerClient(f"127.0.0.1:{process.port}"))
        return made[-1]

    yield connect
    for each in made:
        each.close()


@pytest.fixture
def road_image(tmp_path: Path) -> np.ndarray:
    """One rendered road, and a folder of just that image for a camera to look at."""
    source = open_source("synthetic://road?seed=7&fps=0")
    image = source.read()
    source.close()
    assert image is not None
    folder = tmp_path / "road"
    folder.mkdir()
    cv2.imwrite(str(folder / "0.png"), image)
    return image


def image_input(image: np.ndarray) -> triton.InferInput:
    tensor = triton.InferInput("image", [1, *image.shape], "UINT8")
    tensor.set_data_from_numpy(image[np.newaxis])
    return tensor


class Subscriber:
    """Hears topics on a real broker."""

    def __init__(self, port: int, *topics: str) -> None:
        self.messages: dict[str, list[dict]] = {}
        self._heard = threading.Condition()
        self._client = mqtt.Client(CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
        subscribed = threading.Event()
        self._client.on_connect = lambda c, *_: [c.subscribe(topic, 1) for topic in topics]
        self._client.on_subscribe = lambda *_: subscribed.set()
        self._client.on_message = self._receive
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()
        assert subscribed.wait(PATIENCE_S)

    def _receive(self, client: object, userdata: object, message: mqtt.MQTTMessage) -> None:
        with self._heard:
            self.messages.setdefault(message.topic, []).append(json.loads(message.payload))
            self._heard.notify_all()

    def wait(self, topic: str, fits: Callable[[dict], bool] = lambda _: True) -> dict:
        with self._heard:
            found = self._heard.wait_for(
                lambda: [m for m in self.messages.get(topic, []) if fits(m)], PATIENCE_S
            )
        assert found, f"nothing fitting on {topic}; heard: {self.messages.keys()}"
        return found[0]

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


def test_lanes_over_grpc_and_on_mqtt_agree_for_the_same_frame(
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
    mosquitto: object,
    road_image: np.ndarray,
    tmp_path: Path,
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        f'[device]\nid = "tested"\n[repository]\npaths = ["{MODELS}"]\n'
        f'[mqtt]\nhost = "127.0.0.1"\nport = {mosquitto.port}\n'  # type: ignore[attr-defined]
        f'[cameras.front]\nuri = "file://{tmp_path}/road?loop=true&fps=10"\n'
    )
    subscriber = Subscriber(mosquitto.port, "edge/v1/tested/#")  # type: ignore[attr-defined]
    try:
        process = start("--config", str(config))
        message = subscriber.wait("edge/v1/tested/cameras/front/lanes")
        answer = client(process).infer("lane_detection", [image_input(road_image)])
        points, scores = answer.as_numpy("lane_points")[0], answer.as_numpy("lane_scores")[0]

        assert message["camera"] == "front"
        assert message["model"] == {"name": "lane_detection", "version": "1"}
        assert message["image"] == {"width": 1280, "height": 720}
        assert len(message["lanes"]) == len(scores) >= 2
        for lane, rows, score in zip(message["lanes"], points, scores, strict=True):
            present = rows[rows[:, 0] >= 0]
            np.testing.assert_allclose(lane["image_points"]["x"], present[:, 0], atol=0.06)
            np.testing.assert_allclose(lane["image_points"]["y"], present[:, 1], atol=0.06)
            assert lane["confidence"] == pytest.approx(float(score), abs=1e-4)

        assert subscriber.wait("edge/v1/tested/status")["state"] == "online"
        model = subscriber.wait("edge/v1/tested/models/laneDetect_model/state")
        assert model["state"] == "READY"
        subscriber.wait("edge/v1/tested/cameras/front/status", lambda m: m["state"] == "ok")
        assert process.terminate() == 0
        subscriber.wait("edge/v1/tested/status", lambda m: m["state"] == "offline")
    finally:
        subscriber.close()


def test_a_stock_client_finds_the_whole_protocol(
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
    road_image: np.ndarray,
) -> None:
    server = client(start("--model-repository", str(MODELS)))
    assert server.is_server_live()
    assert server.is_server_ready()
    assert server.is_model_ready("lane_detection")
    assert not server.is_model_ready("nothing")
    assert server.get_server_metadata().name == "triton"

    metadata = server.get_model_metadata("laneDetect_model")
    assert (metadata.platform, list(metadata.versions)) == ("onnxruntime_onnx", ["1"])
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [
        ("input", "FP32", [-1, 3, 360, 640])
    ]
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.outputs] == [
        ("predict_lanes", "FP32", [-1, 2784, 77])
    ]
    config = server.get_model_config("lane_detection").config
    assert [step.model_name for step in config.ensemble_scheduling.step] == [
        "lane_preprocess",
        "laneDetect_model",
        "lane_decode",
    ]
    index = {m.name: m.state for m in server.get_model_repository_index().models}
    assert index == dict.fromkeys(
        ("laneDetect_model", "lane_decode", "lane_detection", "lane_preprocess"), "READY"
    )

    scores = triton.InferRequestedOutput("lane_scores")
    answer = server.infer(
        "lane_detection", [image_input(road_image)], outputs=[scores], request_id="42"
    )
    assert answer.get_response().id == "42"
    assert answer.get_response().model_version == "1"
    assert answer.as_numpy("lane_points") is None
    assert len(answer.as_numpy("lane_scores")[0]) >= 2


def test_each_request_that_cannot_work_gets_the_contracts_code_and_text(
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
    road_image: np.ndarray,
) -> None:
    server = client(start("--model-repository", str(MODELS)))
    good = image_input(road_image)
    flat = triton.InferInput("image", [720, 1280, 3], "UINT8")
    flat.set_data_from_numpy(road_image)
    wrong_type = triton.InferInput("image", [1, 720, 1280, 3], "INT8")
    wrong_type.set_data_from_numpy(road_image[np.newaxis].view(np.int8))
    misnamed = triton.InferInput("frame", [1, 720, 1280, 3], "UINT8")
    misnamed.set_data_from_numpy(road_image[np.newaxis])
    for ask, status, text in (
        (
            lambda: server.infer("nothing", [good]),
            "NOT_FOUND",
            "Request for unknown model: 'nothing' is not found",
        ),
        (
            lambda: server.infer("lane_detection", [good], model_version="9"),
            "NOT_FOUND",
            "Request for unknown model: 'lane_detection' version 9 is not found",
        ),
        (
            lambda: server.infer("lane_detection", [flat]),
            "INVALID_ARGUMENT",
            "unexpected shape for input 'image' for model 'lane_detection'. "
            "Expected [-1,-1,-1,3], got [720,1280,3]",
        ),
        (
            lambda: server.infer("lane_detection", [wrong_type]),
            "INVALID_ARGUMENT",
            "inference input 'image' data-type is 'INT8', but model 'lane_detection' expects "
            "'UINT8'",
        ),
        (
            lambda: server.infer("lane_detection", [misnamed]),
            "INVALID_ARGUMENT",
            "unexpected inference input 'frame' for model 'lane_detection'",
        ),
        (
            lambda: server.infer("lane_detection", []),
            "INVALID_ARGUMENT",
            "expected 1 inputs but got 0 inputs for model 'lane_detection'",
        ),
        (
            lambda: server.get_model_metadata("nothing"),
            "NOT_FOUND",
            "Request for unknown model: 'nothing' is not found",
        ),
        (
            lambda: server.load_model("lane_detection"),
            "UNIMPLEMENTED",
            "RepositoryModelLoad is not offered by this server",
        ),
        (
            server.get_system_shared_memory_status,
            "UNIMPLEMENTED",
            "Client shared memory is disabled",
        ),
        (
            lambda: server.get_model_metadata("lane_detection", "x"),
            "INVALID_ARGUMENT",
            "version should be an integral value > 0",
        ),
    ):
        with pytest.raises(InferenceServerException) as caught:
            ask()
        assert caught.value.status() == f"StatusCode.{status}"
        assert text in caught.value.message()


def test_a_stream_is_refused_in_words(
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
    road_image: np.ndarray,
) -> None:
    server = client(start("--model-repository", str(MODELS)))
    told: queue.Queue[InferenceServerException] = queue.Queue()
    server.start_stream(callback=lambda result, error: told.put(error))
    server.async_stream_infer("lane_detection", [image_input(road_image)])
    error = told.get(timeout=PATIENCE_S)
    server.stop_stream()
    assert "ModelStreamInfer is not offered by this server" in str(error)


def test_bytes_that_are_no_message_are_the_callers_error_in_every_method(
    start: Callable[..., Process],
) -> None:
    process = start("--model-repository", str(MODELS))
    with grpc.insecure_channel(f"127.0.0.1:{process.port}") as channel:
        for method in ("ModelInfer", "ModelMetadata", "ServerMetadata", "RepositoryIndex"):
            call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
            with pytest.raises(grpc.RpcError) as caught:
                call(b"\x0a\xff", timeout=PATIENCE_S)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Traceback" not in process.log.read_text()


def test_sigterm_lets_requests_in_flight_finish(
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
    road_image: np.ndarray,
) -> None:
    process = start("--model-repository", str(MODELS))
    server = client(process)
    answered: list[object] = []
    refused = threading.Event()

    def ask_until_refused() -> None:
        while not refused.is_set():
            try:
                answered.append(server.infer("lane_detection", [image_input(road_image)]))
            except InferenceServerException as error:
                answered.append(error)
                refused.set()

    asking = threading.Thread(target=ask_until_refused)
    asking.start()
    while len(answered) < 3:
        assert process.popen.poll() is None
    assert process.terminate() == 0
    asking.join(PATIENCE_S)
    errors = [a for a in answered if isinstance(a, InferenceServerException)]
    # The one that came after the end was refused; none was cut off in the middle.
    assert [(e.status(), e.message()) for e in errors] == [
        (
            "StatusCode.UNAVAILABLE",
            "GRPC server is shutting down and has stopped accepting new requests.",
        )
    ]
    assert "stopped" in process.log.read_text()


def write_endless_onnx(path: Path) -> None:
    """A model that loops as often as its input says."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["more"], ["more_out"]),
            helper.make_node("Identity", ["value"], ["value_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("more", TensorProto.BOOL, []),
            helper.make_tensor_value_info("value", TensorProto.FLOAT, [1]),
        ],
        [
            helper.make_tensor_value_info("more_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("value_out", TensorProto.FLOAT, [1]),
        ],
    )
    graph = helper.make_graph(
        [
            helper.make_node("Squeeze", ["times"], ["count"]),
            helper.make_node("Loop", ["count", "", "start"], ["end"], body=body),
        ],
        "endless",
        [helper.make_tensor_value_info("times", TensorProto.INT64, [1])],
        [helper.make_tensor_value_info("end", TensorProto.FLOAT, [1])],
        [helper.make_tensor("start", TensorProto.FLOAT, [1], [0.0])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8
    path.parent.mkdir(parents=True)
    onnx.save(model, path)


def test_sigterm_ends_the_daemon_even_while_a_model_hangs(
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
    tmp_path: Path,
) -> None:
    write_endless_onnx(tmp_path / "models" / "endless" / "1" / "model.onnx")
    process = start("--model-repository", str(tmp_path / "models"))
    server = client(process)
    times = triton.InferInput("times", [1], "INT64")
    times.set_data_from_numpy(np.array([1], np.int64))
    assert server.infer("endless", [times]).as_numpy("end").tolist() == [0.0]
    times.set_data_from_numpy(np.array([2**40], np.int64))
    failed = threading.Event()
    server.async_infer("endless", [times], callback=lambda result, error: failed.set())
    assert not failed.wait(0.5)
    assert process.terminate() == 0
    assert failed.wait(PATIENCE_S)


def test_calls_behind_a_model_that_hangs_end_at_their_deadline_and_the_rest_goes_on(
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
    tmp_path: Path,
    road_image: np.ndarray,
) -> None:
    write_endless_onnx(tmp_path / "models" / "endless" / "1" / "model.onnx")
    process = start(
        "--model-repository", str(tmp_path / "models"), "--model-repository", str(MODELS)
    )
    server = client(process)
    times = triton.InferInput("times", [1], "INT64")
    times.set_data_from_numpy(np.array([2**40], np.int64))
    ended: queue.Queue[InferenceServerException] = queue.Queue()
    for _ in range(9):
        server.async_infer(
            "endless", [times], callback=lambda result, error: ended.put(error), client_timeout=0.5
        )
    statuses = {ended.get(timeout=PATIENCE_S).status() for _ in range(9)}
    assert statuses == {"StatusCode.DEADLINE_EXCEEDED"}
    assert server.is_server_live()
    assert len(server.infer("lane_detection", [image_input(road_image)]).as_numpy("lane_scores"))


def run_to_its_end(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "edge_server", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.fixture
def broken_models(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODELS, tmp_path / "models"))


def truncate_onnx(models: Path) -> None:
    path = models / "laneDetect_model" / "1" / "model.onnx"
    path.write_bytes(path.read_bytes()[:100_000])


def misspell_field(models: Path) -> None:
    path = models / "lane_decode" / "config.pbtxt"
    path.write_text(path.read_text().replace("max_batch_size", "max_batchsize"))


def forget_tensor(models: Path) -> None:
    path = models / "lane_detection" / "config.pbtxt"
    gives_size = 'output_map { key: "image_size" value: "image_size" }'
    path.write_text(path.read_text().replace(gives_size, "", 1))


@pytest.mark.parametrize("verb", ["run", "check"])
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncate_onnx, "laneDetect_model/1/model.onnx: ONNX Runtime cannot load it"),
        (
            misspell_field,
            'lane_decode/config.pbtxt:4:1: Message type "inference.ModelConfig" has '
            'no field named "max_batchsize". Did you mean "max_batch_size"?',
        ),
        (
            forget_tensor,
            "lane_detection/config.pbtxt: output 'lane_points' for ensemble 'lane_detection' is "
            "not written: at least one of its depending tensors, 'image_size', is not connected",
        ),
    ],
)
def test_a_broken_repository_ends_with_78_and_the_fault_by_name(
    broken_models: Path, verb: str, damage: Callable[[Path], None], says: str
) -> None:
    damage(broken_models)
    port = ["--grpc-port=0"] if verb == "run" else []
    done = run_to_its_end(verb, "--model-repository", str(broken_models), *port)
    assert done.returncode == 78
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_told_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_to_its_end("run", "--model-repository", str(MODELS), f"--grpc-port={port}")
    assert done.returncode == 69
    assert f"gRPC cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "another process may hold the port" in done.stderr
    assert "READY" not in done.stderr


def test_an_unreadable_video_ends_with_69_and_its_path(tmp_path: Path) -> None:
    video = tmp_path / "road.mp4"
    video.write_bytes(b"\0" * 1000)
    done = run_to_its_end(
        "run", "--model-repository", str(MODELS), "--grpc-port=0", f"--camera=front={video}"
    )
    assert done.returncode == 69
    assert str(video) in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_key_ends_with_78_and_the_nearest_one(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[grpc]\nprot = 8001\n")
    done = run_to_its_end("run", "--config", str(config))
    assert done.returncode == 78
    assert done.stderr == (f'edge-server: {config}: grpc.prot: unknown key; did you mean "port"?\n')
