"""The whole daemon as a process, heard by real tritonclient and real mosquitto."""

from __future__ import annotations

import itertools
import math
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from support.endless_onnx import write_endless_onnx
from support.free_ports import free_ports
from support.mosquitto import Subscriber
from support.waiting import wait_until

from edge_server.api.grpc import client
from edge_server.daemon import daemon as daemon_module
from edge_server.daemon.daemon import Daemon
from edge_server.errors import EdgeServerError, InternalError, StageStuck
from edge_server.mqtt.link import Link
from edge_server.pipeline.event_log import EventLog
from edge_server.requests import InferRequest, InferResponse
from edge_server.settings import read_settings
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.daemon_process import Process
    from support.mosquitto import Mosquitto
    from support.polling_server import Server

MODELS = Path(__file__).parents[2] / "models"
PATIENCE_S = 30.0


def test_lanes_over_grpc_and_on_mqtt_agree_for_the_same_frame(
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
    mosquitto: Mosquitto,
    road_input: triton.InferInput,
    tmp_path: Path,
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        f'[device]\nid = "tested"\n[repository]\npaths = ["{MODELS}"]\n'
        f'[mqtt]\nhost = "127.0.0.1"\nport = {mosquitto.port}\n'
        f'[cameras.front]\nuri = "file://{tmp_path}/road?loop=true&fps=3"\nmax_age_ms = 1000\n'
    )
    subscriber = Subscriber(mosquitto.port, "edge/v1/tested/#")
    try:
        process = start("--config", str(config))
        message = subscriber.wait("edge/v1/tested/cameras/front/lanes", lambda m: m["lanes"])
        answer = client(process).infer("lane_detection", [road_input])
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

        subscriber.wait("edge/v1/tested/status", lambda m: m["state"] == "online")
        subscriber.wait(
            "edge/v1/tested/models/laneDetect_model/state", lambda m: m["state"] == "READY"
        )
        subscriber.wait("edge/v1/tested/cameras/front/status", lambda m: m["state"] == "ok")
        assert process.terminate() == 0
        subscriber.wait("edge/v1/tested/status", lambda m: m["state"] == "offline")
    finally:
        subscriber.close()


def test_a_stock_client_finds_the_whole_protocol(
    shipped: Process,
    client: Callable[..., triton.InferenceServerClient],
    road_input: triton.InferInput,
) -> None:
    server = client(shipped)
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
    answer = server.infer("lane_detection", [road_input], outputs=[scores], request_id="42")
    assert answer.get_response().id == "42"
    assert answer.get_response().model_version == "1"
    assert answer.as_numpy("lane_points") is None
    assert len(answer.as_numpy("lane_scores")[0]) >= 2


def test_bytes_that_are_no_message_are_the_callers_error_in_every_method(shipped: Process) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{shipped.port}") as channel:
        for method in ("ModelInfer", "ModelMetadata", "ServerMetadata", "RepositoryIndex"):
            call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
            with pytest.raises(grpc.RpcError) as caught:
                call(b"\x0a\xff", timeout=PATIENCE_S)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Traceback" not in shipped.log.read_text()


def test_a_camera_whose_model_fails_is_reported_everywhere_until_it_gives_lanes_again(
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
    mosquitto: Mosquitto,
    road_image: np.ndarray,
    tmp_path: Path,
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        f'[device]\nid = "tested"\n[repository]\npaths = ["{MODELS}"]\n'
        'mode = "explicit"\nload = ["lane_detection"]\n'
        f'[mqtt]\nhost = "127.0.0.1"\nport = {mosquitto.port}\n'
        f'[cameras.front]\nuri = "file://{tmp_path}/road?loop=true&fps=3"\nmax_age_ms = 1000\n'
    )
    root = "edge/v1/tested"
    lanes, camera = f"{root}/cameras/front/lanes", f"{root}/cameras/front/status"
    subscriber = Subscriber(mosquitto.port, f"{root}/#")
    try:
        process = start("--config", str(config))
        server = client(process)
        subscriber.wait(lanes, lambda m: m["status"] == "FRAME_STATUS_OK")
        subscriber.wait(camera, lambda m: (m["state"], m["lanes"]) == ("ok", "ok"))
        wait_until(lambda: process.metric("edge_camera_lanes_ok{") == 1, PATIENCE_S)

        server.unload_model("lane_detection")
        # On a busy machine a frame may be too old, or one before it under way.
        frame = subscriber.wait(
            lanes,
            lambda m: (
                m["status"] == "FRAME_STATUS_INVALID"
                and m["model"] == {"name": "lane_detection", "version": ""}
                and [each.partition(":")[0] for each in m["reasons"]] == ["model_failed"]
            ),
        )
        assert frame["lanes"] == []
        (reason,) = frame["reasons"]
        assert "'lane_detection'" in reason
        failing = ("failing", "model_failed")
        told = subscriber.wait(camera, lambda m: (m["lanes"], m["reason"]) == failing)
        assert told["state"] == "ok"
        assert "'lane_detection'" in told["text"]
        subscriber.wait(f"{root}/status", lambda m: m.get("no_lanes") == ["front"])
        wait_until(lambda: process.metric("edge_camera_lanes_ok{") == 0, PATIENCE_S)
        process.wait_for("no lanes: ")

        server.load_model("lane_detection")
        subscriber.wait_for_last(lanes, lambda m: m["status"] == "FRAME_STATUS_OK")
        subscriber.wait_for_last(camera, lambda m: (m["lanes"], m["reason"]) == ("ok", ""))
        subscriber.wait_for_last(f"{root}/status", lambda m: m.get("no_lanes") == [])
        assert process.terminate() == 0
    finally:
        subscriber.close()


def test_names_that_are_not_utf_8_end_nothing_and_are_reported_escaped(
    serve: Callable[..., Server], mosquitto: Mosquitto, tmp_path: Path
) -> None:
    for name in (b"m\xff", b"n"):
        (tmp_path / "repository" / os.fsdecode(name) / "1").mkdir(parents=True)
    (tmp_path / "repository/n" / os.fsdecode(b"labels\xff.txt")).symlink_to("nowhere")
    port = mosquitto.port
    subscriber = Subscriber(port, "edge/v1/tested/#")
    try:
        server = serve(f"--mqtt=127.0.0.1:{port}", "--device-id=tested", "--exit-on-error=false")
        subscriber.wait("edge/v1/tested/status", lambda m: m["state"] == "online")
        said = subscriber.wait(
            "edge/v1/tested/models/n/state", lambda m: m["state"] == "UNAVAILABLE"
        )
        assert server.index()["n"][0][0] == "UNAVAILABLE"
        assert said["reason"]
        assert 'edge_model_state{model="n"' in server.process.metrics()
        assert server.process.terminate() == 0
    finally:
        subscriber.close()


def test_what_cannot_be_reported_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    overrides = {
        "repository": {"paths": [str(tmp_path)]},
        "grpc": {"port": 0},
        "metrics": {"enabled": False},
        "http": {"enabled": False},
        "mqtt": {"host": "127.0.0.1", "port": 9},
    }
    daemon = Daemon(read_settings(None, overrides))
    stop, looks = threading.Event(), itertools.count()

    def index(**_: object) -> None:
        if next(looks) > 12:
            stop.set()
        raise UnicodeEncodeError("utf-8", "m\udcff", 1, 2, "surrogates not allowed")

    monkeypatch.setattr(daemon.data_plane, "index", index)
    try:
        daemon.start(threading.Event())
        daemon.run(stop)
    finally:
        daemon.stop()
    told = [r for r in caplog.records if "cannot be reported; it goes on" in r.getMessage()]
    assert 1 <= len(told) <= 5, "each of the five reports is logged once"


@pytest.mark.parametrize("lanes", [False, True])
def test_a_grpc_server_that_responds_to_nobody_ends_a_daemon_without_lanes(
    lanes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "_PERIOD_S", 0.05)
    overrides = {
        "repository": {"paths": [str(MODELS if lanes else tmp_path)]},
        "grpc": {"port": 0, "socket": str(tmp_path / "grpc.sock")},
        "metrics": {"enabled": False},
        "http": {"enabled": False},
        "cameras": {"road": {"uri": "synthetic://road?seed=7&fps=10"}} if lanes else {},
    }
    daemon = Daemon(read_settings(None, overrides))
    stop = threading.Event()
    timer = threading.Timer(2 * PATIENCE_S, stop.set)
    says = "gRPC does not respond on unix:"

    def watch() -> None:
        wait_until(lambda: says in caplog.text, PATIENCE_S)
        frames = daemon._lanes.latency.frames()
        wait_until(lambda: daemon._lanes.latency.frames() > frames + 10, PATIENCE_S)
        stop.set()

    try:
        daemon.start(threading.Event())
        timer.start()
        if lanes:
            wait_until(daemon._lanes.latency.frames, PATIENCE_S)
        for side in daemon._grpc._sides:
            side.server.stop(None).wait()
        if lanes:
            with ThreadPoolExecutor(1) as pool:
                watched = pool.submit(watch)
                daemon.run(stop)
                watched.result(PATIENCE_S)
        else:
            with pytest.raises(StageStuck, match=says):
                daemon.run(stop)
    finally:
        timer.cancel()
        daemon.stop()


def test_a_run_of_onnxruntime_that_hangs_is_ended_and_the_daemon_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "MODEL_STUCK_S", 0.5)
    write_endless_onnx(tmp_path / "models" / "endless" / "1" / "model.onnx")
    overrides = {
        "repository": {"paths": [str(tmp_path / "models")]},
        "grpc": {"port": 0},
        "metrics": {"enabled": False},
        "http": {"enabled": False},
    }
    daemon = Daemon(read_settings(None, overrides))
    stop = threading.Event()
    timer = threading.Timer(PATIENCE_S, stop.set)
    answers: list[object] = []

    def ask(times: int) -> None:
        inputs = {"times": Tensor(np.array([times], np.int64))}
        try:
            answers.append(daemon.data_plane.infer(InferRequest("endless", inputs)))
        except EdgeServerError as error:
            answers.append(error)
        stop.set()

    asking = threading.Thread(target=ask, args=(2**62,))
    try:
        daemon.start(threading.Event())
        timer.start()
        asking.start()
        daemon.run(stop)
        asking.join(PATIENCE_S)
        ask(1)
    finally:
        timer.cancel()
        daemon.stop()
    assert str(answers[0]) == (
        "model 'endless': the run hung and was ended; send other inputs, or correct the model"
    )
    assert isinstance(answers[1], InferResponse)


class HangingParts:
    """A daemon in this process, of which one part hangs for as long as the test runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, part: str, cameras: str) -> None:
        self.let_go, self.stop = threading.Event(), threading.Event()
        self._give_up = threading.Timer(2 * PATIENCE_S, self.stop.set)
        hung: list[object] = []
        hangs: Any = {"events": EventLog, "mqtt": Link}[part]
        tick = hangs._tick

        def hang(of: object, now: float) -> bool | None:
            if not hung or of in hung:
                hung.append(of)
                self.let_go.wait(2 * PATIENCE_S)
                return False
            return tick(of, now)

        monkeypatch.setattr({"events": EventLog, "mqtt": Link}[part], "_tick", hang)
        overrides = {
            "repository": {"paths": [str(MODELS)]},
            "grpc": {"port": 0},
            "metrics": {"enabled": False},
            "http": {"enabled": False},
            "mqtt": {"host": "127.0.0.1", "port": free_ports(1)[0]},
            "cameras": {"road": {"uri": cameras}} if cameras else {},
        }
        self.daemon = Daemon(read_settings(None, overrides), [self._see])
        self.frames = 0
        lanes = self.daemon._lanes
        self.workers = [lanes.events.worker, *lanes.publisher.workers()]
        for worker in self.workers[:1] if part == "events" else self.workers[1:]:
            worker.deadline_s = 0.5

    def _see(self, *_: object) -> None:
        self.frames += 1

    def run(self) -> None:
        try:
            self.daemon.start(threading.Event())
            self._give_up.start()
            self.daemon.run(self.stop)
        finally:
            self._give_up.cancel()
            # The restart is systemd's; here nobody waits for what hangs.
            self.let_go.set()
            self.daemon.stop()


@pytest.mark.parametrize("part", ["events", "mqtt"])
def test_a_part_that_hangs_does_not_end_a_daemon_whose_lanes_progress(
    part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = HangingParts(monkeypatch, part, "synthetic://road?seed=7&fps=10")
    seen = {
        "events": "worker events: no progress for more than 0.5 s; the daemon goes on, as lanes do",
        "mqtt": "mqtt: open again",
    }[part]

    def watch() -> None:
        wait_until(lambda: seen in caplog.text, PATIENCE_S)
        frames = world.frames
        wait_until(lambda: world.frames > frames + 10, PATIENCE_S)
        world.stop.set()

    with ThreadPoolExecutor(1) as pool:
        watched = pool.submit(watch)
        world.run()
        watched.result(PATIENCE_S)
    if part == "mqtt":
        assert world.daemon._lanes.publisher.workers() != world.workers[1:]


def test_a_part_that_hangs_does_not_hide_one_that_died(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = HangingParts(monkeypatch, "events", "synthetic://road?seed=7&fps=10")

    def watch() -> None:
        wait_until(lambda: "worker events: no progress" in caplog.text, PATIENCE_S)
        assert world.daemon._grpc.self_call is not None
        world.daemon._grpc.self_call.worker.failure = ZeroDivisionError("planted")

    with ThreadPoolExecutor(1) as pool:
        watched = pool.submit(watch)
        with pytest.raises(InternalError, match="worker grpc-self-call: ZeroDivisionError"):
            world.run()
        watched.result(PATIENCE_S)


def test_a_part_that_hangs_ends_a_daemon_without_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    world = HangingParts(monkeypatch, "events", "")
    with pytest.raises(StageStuck, match="worker events: no progress"):
        world.run()


@pytest.mark.long
def test_a_daemon_that_got_no_processor_goes_on(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    """Stopped for longer than the deadline of any of its threads."""
    config = tmp_path / "config.toml"
    config.write_text(
        f'[repository]\npaths = ["{MODELS}"]\n'
        '[cameras.front]\nuri = "synthetic://road?seed=7&fps=10"\n'
    )
    process = start("--config", str(config))

    def frames() -> float:
        lines = process.metrics().splitlines()
        found = [line for line in lines if line.startswith("edge_camera_last_lanes_age_seconds{")]
        return float(found[0].split()[-1]) if found else math.inf

    wait_until(lambda: frames() < 1.0, PATIENCE_S)
    process.popen.send_signal(signal.SIGSTOP)
    until = time.monotonic() + 12.0
    wait_until(lambda: time.monotonic() > until, PATIENCE_S)
    process.popen.send_signal(signal.SIGCONT)
    wait_until(lambda: frames() < 1.0, PATIENCE_S)
    assert process.popen.poll() is None
    assert "no progress" not in process.log.read_text()
