"""LaneService of a real daemon, as vehicle software calls it: with stubs made of the .proto."""

from __future__ import annotations

import contextlib
import importlib
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from support.daemon_process import Process
from support.lane_stubs import CLIENT, SEED, generate_python, write_calibration
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAIT_S = 30.0
MODELS = Path(__file__).parents[2] / "models"
EXAMPLE = Path(__file__).parents[2] / "examples/lanes/lanes.py"
SERVICE = "edge.lanes.v1.LaneService"
MOST_STREAMS = 44


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the generated stubs, which can be imported."""
    folder = tmp_path_factory.mktemp("stubs")
    generate_python(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


@pytest.fixture(scope="module")
def pb(stubs: Path) -> Any:
    return importlib.import_module("edge.lanes.v1.lane_service_pb2")


def settings(folder: Path, **grpc_settings: str) -> Path:
    """A road with manoeuvres, a calibration, and events that are kept."""
    write_calibration(folder / "road.calibration.toml")
    path = folder / "settings.toml"
    lines = [f"{name} = {value}" for name, value in grpc_settings.items()]
    path.write_text(
        f"""
        [repository]
        paths = ["{MODELS}"]
        [device]
        id = "truck-7"
        [events]
        file = "{folder / "events.db"}"
        [grpc]
        socket = "{folder / "socket"}"
        max_lane_streams = {MOST_STREAMS}
        message_timeout_ms = 5000
        {chr(10).join(lines)}
        [cameras.road]
        uri = "synthetic://road?seed={SEED}&fps=10&manoeuvres=true"
        calibration = "{folder / "road.calibration.toml"}"
        max_age_ms = 1000
        """
    )
    return path


class Vehicle:
    """Vehicle software: a connection of its own, and the generated stub."""

    def __init__(self, address: str, pb: Any) -> None:
        # Otherwise gRPC has all channels of this process share one connection.
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.insecure_channel(address, options=options)
        module = importlib.import_module("edge.lanes.v1.lane_service_pb2_grpc")
        self.service = module.LaneServiceStub(self.channel)
        self._pb = pb

    def lanes(self, **first: Any) -> tuple[Any, queue.SimpleQueue[Any]]:
        """The stream, and where its later requests go; None ends them."""
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        requests.put(self._pb.StreamLanesRequest(**first))
        return self.service.StreamLanes(iter(requests.get, None), timeout=WAIT_S), requests


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("daemon")
    config = settings(folder, control='"unix"')
    process = Process(folder, f"--config={config}")
    process.folder = folder  # type: ignore[attr-defined]  # for the socket
    try:
        process.wait_for("READY=1")
        yield process
    finally:
        process.close()


@pytest.fixture
def connect(pb: Any) -> Iterator[Callable[[str], Vehicle]]:
    made: list[Vehicle] = []

    def make(address: str) -> Vehicle:
        made.append(Vehicle(address, pb))
        return made[-1]

    yield make
    for each in made:
        each.channel.close()


@pytest.fixture
def vehicle(daemon: Process, connect: Callable[[str], Vehicle]) -> Vehicle:
    return connect(f"127.0.0.1:{daemon.port}")


def status_of(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return raised.value.code(), raised.value.details()


def test_lanes_stream_with_all_that_a_vehicle_needs(vehicle: Vehicle, pb: Any) -> None:
    (camera,) = vehicle.service.ListCameras(pb.ListCamerasRequest(), timeout=WAIT_S).cameras
    assert (camera.name, camera.state, camera.model) == ("road", "ok", "lane_detection")
    assert (camera.calibration.width, camera.calibration.height) == (1280, 720)
    stream, requests = vehicle.lanes(cameras=["road"], window=2)
    frames = []
    for response in stream:
        assert response.sequence == len(frames) + 1
        frames.append(response.frame)
        requests.put(pb.StreamLanesRequest(acknowledged=response.sequence))
        if len(frames) == 10:
            break
    stream.cancel()
    assert {(f.schema, f.device, f.camera) for f in frames} == {("edge.lanes/1", "truck-7", "road")}
    assert [f.frame_id for f in frames] == sorted({f.frame_id for f in frames})
    for frame in frames:
        assert frame.calib_id == camera.calibration.id
        # The daemon is on this host, so its clock is this one's.
        age_ns = time.monotonic_ns() - frame.time.capture_mono_ns
        assert 0 < 1000 * frame.time.age_us <= age_ns
    on_road = [lane for frame in frames for lane in frame.lanes if lane.HasField("ground")]
    assert on_road
    assert any(frame.ego.HasField("lane_width_m") for frame in frames)
    latest = vehicle.service.GetLatestLanes(pb.GetLatestLanesRequest(camera="road"), timeout=WAIT_S)
    assert latest.frame.frame_id >= frames[-1].frame_id


def test_a_reader_that_sleeps_delays_nobody_and_learns_what_it_lost(
    daemon: Process, connect: Callable[[str], Vehicle], pb: Any
) -> None:
    awake, asleep = (connect(f"127.0.0.1:{daemon.port}") for _ in range(2))
    slow, slow_requests = asleep.lanes(window=2)
    seen = [next(slow).frame.seq for _ in range(2)]
    # So wide that none waits for a busy machine's acknowledgements.
    quick, requests = awake.lanes(window=20)
    frames = []
    for response in quick:
        frames.append(response.frame)
        assert response.lost == 0
        requests.put(pb.StreamLanesRequest(acknowledged=response.sequence))
        if len(frames) == 20:
            break
    quick.cancel()
    numbers = [frame.seq for frame in frames]
    assert numbers == list(range(numbers[0], numbers[0] + 20)), "no frame is missing"
    slow_requests.put(pb.StreamLanesRequest(acknowledged=2))
    woken = next(slow)
    assert woken.lost == woken.frame.seq - seen[-1] - 1
    assert woken.lost >= 10
    # It waited in the daemon, not in the buffers of the connection: it is the newest one.
    assert woken.frame.seq >= numbers[-1]
    slow.cancel()


def test_a_rate_leaves_frames_out_and_loses_none(vehicle: Vehicle, pb: Any) -> None:
    stream, _ = vehicle.lanes(max_hz=2)
    frames = [next(stream) for _ in range(8)]
    stream.cancel()
    assert [response.lost for response in frames] == [0] * 8
    captured_ns = [response.frame.time.capture_mono_ns for response in frames]
    # Half a second older is a frame at most that a busy machine brings.
    assert captured_ns[-1] - captured_ns[1] >= 0.8 * 3e9, "two of ten a second"


def test_forty_readers_and_one_too_many_leave_inference_alone(
    daemon: Process, connect: Callable[[str], Vehicle], pb: Any
) -> None:
    address = f"127.0.0.1:{daemon.port}"
    streams = []
    with subprocess.Popen(
        [sys.executable, EXAMPLE, address, "lanes"],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": f"{CLIENT}:{':'.join(sys.path)}"},
    ) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline().startswith("road ")
        for _ in range(MOST_STREAMS - 1):
            stream, requests = connect(address).lanes(window=1)
            assert next(stream).sequence == 1
            streams.append((stream, requests))
        refused, _ = connect(address).lanes()
        code, text = status_of(lambda: next(refused))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "max_lane_streams" in text
        events = connect(address).service.StreamEvents(
            pb.StreamEventsRequest(after_id=0), timeout=WAIT_S
        )
        assert status_of(lambda: next(events))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        for stream, requests in streams:
            requests.put(pb.StreamLanesRequest(acknowledged=1))
            assert next(stream).sequence == 2
        with triton.InferenceServerClient(address) as client:
            image = triton.InferInput("image", [1, 720, 1280, 3], "UINT8")
            image.set_data_from_numpy(np.zeros((1, 720, 1280, 3), np.uint8))
            assert client.infer("lane_detection", [image]).as_numpy("lane_scores") is not None
        killed.kill()
    # The place of the killed one is free, as soon as the connection is known to be gone.

    def is_free() -> bool:
        again, _ = connect(address).lanes()
        with contextlib.suppress(grpc.RpcError):
            return bool(next(again).sequence)
        return False

    wait_until(is_free, WAIT_S)
    for stream, _ in streams:
        stream.cancel()


@pytest.mark.parametrize(
    ("data", "code"),
    [
        ([b"\xff" * 9], grpc.StatusCode.INVALID_ARGUMENT),
        ([], grpc.StatusCode.INVALID_ARGUMENT),
        ([b"\x0a\x7f" + 127 * b"x" + 200 * (b"\x0a\xff\x04" + 639 * b"x")], None),
        ([b"\x0a\x05other"], grpc.StatusCode.NOT_FOUND),
        ([b"\x15\x00\x00\x80\xbf"], grpc.StatusCode.INVALID_ARGUMENT),  # max_hz -1
        ([b"", b"\xff"], grpc.StatusCode.INVALID_ARGUMENT),
        ([b"", b"\x20\xff\xff\xff\xff\xff\xff\xff\xff\x7f"], grpc.StatusCode.INVALID_ARGUMENT),
        (None, grpc.StatusCode.CANCELLED),  # nothing is ever sent
    ],
)
def test_hostile_requests_get_a_status(
    vehicle: Vehicle, data: list[bytes] | None, code: grpc.StatusCode | None
) -> None:
    call = vehicle.channel.stream_stream(f"/{SERVICE}/StreamLanes")
    never = threading.Event()
    requests = iter(data) if data is not None else iter(lambda: never.wait(WAIT_S), True)
    stream = call(requests, timeout=WAIT_S)
    raised, _ = status_of(lambda: list(stream))
    never.set()
    assert raised is (code or grpc.StatusCode.INVALID_ARGUMENT)


def test_control_calls_are_confined_to_the_socket_and_the_rest_is_on_both(
    daemon: Process, connect: Callable[[str], Vehicle], vehicle: Vehicle, pb: Any
) -> None:
    state = pb.SetVehicleStateRequest(speed_mps=25.0)
    code, text = status_of(lambda: vehicle.service.SetVehicleState(state, timeout=WAIT_S))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "served on the Unix socket" in text
    local = connect(f"unix:{daemon.folder / 'socket'}")  # type: ignore[attr-defined]  # the fixture gave it
    local.service.SetVehicleState(state, timeout=WAIT_S)
    later = pb.SetVehicleStateRequest(mono_ns=time.monotonic_ns() + 10**12)
    code, _ = status_of(lambda: local.service.SetVehicleState(later, timeout=WAIT_S))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    stream, _ = local.lanes()
    assert next(stream).frame.camera == "road"
    stream.cancel()


def test_generic_clients_find_and_call_the_service_by_reflection(vehicle: Vehicle) -> None:
    database = ProtoReflectionDescriptorDatabase(vehicle.channel)
    services = set(database.get_services())
    assert services >= {SERVICE, "inference.GRPCInferenceService", "grpc.health.v1.Health"}
    pool = descriptor_pool.DescriptorPool(database)
    for name in services:
        method = pool.FindServiceByName(name).methods[0]
        assert method.input_type.full_name
    listing = pool.FindServiceByName(SERVICE).methods_by_name["ListCameras"]
    request = message_factory.GetMessageClass(listing.input_type)()
    response: Any = message_factory.GetMessageClass(listing.output_type)
    call = vehicle.channel.unary_unary(
        f"/{SERVICE}/ListCameras", lambda each: each.SerializeToString(), response.FromString
    )
    assert [camera.name for camera in call(request, timeout=WAIT_S).cameras] == ["road"]
    # What newer clients try first.
    v1 = vehicle.channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    (listed,) = v1(iter([asked]), timeout=WAIT_S)
    assert {each.name for each in listed.list_services_response.service} == services


def health(vehicle: Vehicle) -> int:
    check = vehicle.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        health_pb2.HealthCheckRequest.SerializeToString,
        health_pb2.HealthCheckResponse.FromString,
    )
    answered = check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=WAIT_S)
    return int(answered.status)


def test_a_client_that_leaves_a_stream_is_no_error(daemon: Process, vehicle: Vehicle) -> None:
    call = vehicle.channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    for _ in range(10):
        answers = call(iter([asked]), timeout=WAIT_S)
        next(answers)
        answers.cancel()
        # Before its first request has come.
        unasked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        silent = vehicle.service.StreamLanes(iter(unasked.get, None), timeout=WAIT_S)
        # The answer to a later call of the same connection shows that this one has arrived.
        assert health(vehicle) == health_pb2.HealthCheckResponse.SERVING
        silent.cancel()
        unasked.put(None)
    # Likewise for what the cancellations began.
    assert health(vehicle) == health_pb2.HealthCheckResponse.SERVING
    assert "unforeseen" not in daemon.log.read_text()


def test_the_health_check_knows_the_service(vehicle: Vehicle) -> None:
    assert health(vehicle) == health_pb2.HealthCheckResponse.SERVING


def test_a_departure_reaches_those_who_read_events(vehicle: Vehicle, pb: Any) -> None:
    stream = vehicle.service.StreamEvents(pb.StreamEventsRequest(after_id=0), timeout=WAIT_S)
    departure = next(r.event for r in stream if r.event.kind == 1)  # EVENT_KIND_LANE_DEPARTURE
    stream.cancel()
    assert (departure.device, departure.camera) == ("truck-7", "road")
    assert departure.cause in ("left", "right")
    assert departure.HasField("frame_id")
    assert departure.HasField("distance_to_line_m")


def test_events_go_on_after_a_restart_and_the_end_says_why(
    tmp_path: Path, start: Callable[..., Process], connect: Callable[[str], Vehicle], pb: Any
) -> None:
    restricted = '[{protocols = ["lanes"], header = "key", value = "secret"}]'
    config = settings(tmp_path, restricted=restricted)
    with config.open("a") as file:  # a camera that is not there is an event of every start
        file.write('[cameras.absent]\nuri = "/dev/video63"\n')
    key = [("key", "secret")]

    def events(process: Process, **first: Any) -> Any:
        service = connect(f"127.0.0.1:{process.port}").service
        request = pb.StreamEventsRequest(**first)
        return service.StreamEvents(request, timeout=WAIT_S, metadata=key)

    before = start(f"--config={config}")
    stranger = connect(f"127.0.0.1:{before.port}").service
    code, text = status_of(lambda: stranger.ListCameras(pb.ListCamerasRequest(), timeout=WAIT_S))
    assert (code, "expecting header 'key'" in text) == (grpc.StatusCode.PERMISSION_DENIED, True)
    stream = events(before, after_id=0)
    seen = [next(stream).event]
    before.popen.send_signal(signal.SIGTERM)
    last: list[grpc.RpcError] = []

    def read_on() -> None:
        try:
            seen.extend(response.event for response in stream)
        except grpc.RpcError as error:
            last.append(error)

    reader = threading.Thread(target=read_on)
    reader.start()
    assert before.popen.wait(WAIT_S) == 0
    reader.join(WAIT_S)
    assert last[0].code() is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in last[0].details()
    before.close()

    after = start(f"--config={config}")
    newest = seen[-1].id
    resumed = events(after, after_id=newest)
    first = next(resumed).event
    assert first.id > newest
    resumed.cancel()
    kept = events(after, after_id=0)
    again = [next(kept).event for _ in seen]
    kept.cancel()
    assert [(e.id, e.kind, e.epoch_ns) for e in again] == [(e.id, e.kind, e.epoch_ns) for e in seen]
    assert len({e.log for e in again}) == 1
    (same,) = {e.log for e in again}
    resumed = events(after, after_id=newest, log=same)
    assert next(resumed).event == first
    resumed.cancel()
    other = events(after, after_id=newest, log=f"{same}x")
    assert status_of(lambda: next(other))[0] is grpc.StatusCode.OUT_OF_RANGE
    beyond = events(after, after_id=1_000_000)
    assert status_of(lambda: next(beyond))[0] is grpc.StatusCode.OUT_OF_RANGE
