"""The recorder and its replays with the shipped models, real threads, a real disk and kill -9."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import numpy as np
import pytest
from support.mcap_drive import IDENTITY, Drive, content, is_whole
from support.waiting import wait_until

from edge_server.cameras.calibration import Calibration, calibration_id
from edge_server.cameras.camera import Camera
from edge_server.cameras.frame import Frame
from edge_server.cameras.jpeg import JpegDecoder, encode_jpeg
from edge_server.cameras.mcap_file import McapSource
from edge_server.cameras.source import open_source, recorded_calibration
from edge_server.lanes.camera_model import CameraModel, Lens, Mounting
from edge_server.lanes.departure import DepartureRule
from edge_server.lanes.types import StageLatency
from edge_server.pipeline.event_log import EventLog
from edge_server.pipeline.lane_pipeline import LanePipeline
from edge_server.pipeline.messages import lane_frame_fields
from edge_server.pipeline.perception import NetworkFrame
from edge_server.pipeline.recorder.mcap_writer import PART
from edge_server.pipeline.recorder.recorder import Recorder
from edge_server.pipeline.recorder.recording_writer import RecordingFiles
from edge_server.pipeline.road_follower import LaneLocator, RoadEvents, RoadFollower
from edge_server.pipeline.vehicle import VehicleInputs
from edge_server.pixels import Image
from edge_server.proto.edge.lanes.v1 import lane_service_pb2 as pb
from edge_server.proto.edge.lanes.v1 import lanes_pb2
from edge_server.settings import RecorderSection
from edge_server.tools.plan import load_models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.daemon_process import Process

    from edge_server.inference.data_plane import DataPlane
    from edge_server.lanes.types import LaneFrame

MODELS = Path(__file__).parents[2] / "models"
LENS = Lens("pinhole", 1280, 720, 1150.0, 1150.0, 640.0, 360.0, (0.0, 0.0, 0.0, 0.0, 0.0))
MODEL = CameraModel(LENS, Mounting(1.35, 0.0, 0.0, 0.0, 0.0, 0.0))
CALIBRATION = Calibration(calibration_id(MODEL), MODEL)
FRAMES = 12
PERIOD_NS = 99_999_371  # of no whole number of microseconds
PATIENCE_S = 30.0
# CLOCK_MONOTONIC where a replay begins: after a minute, three days and 400 days of uptime.
UPTIMES_NS = (60_000_000_007, 259_200_123_456_789, 34_560_000_987_654_321)


@pytest.fixture(scope="module")
def data_plane() -> Iterator[DataPlane]:
    with ExitStack() as stack:
        yield load_models(MODELS, stack)


class Followed(NamedTuple):
    """What came of a frame, and the bytes of its lanes."""

    frame: Frame
    lane_frame: LaneFrame
    lanes: bytes


class Road:
    """A calibrated camera's way through the pipeline, on this thread, frame by frame."""

    def __init__(self, data_plane: DataPlane, calibration: Calibration) -> None:
        self.camera = Camera("front", "synthetic://road")
        self._pipeline = LanePipeline(self.camera, data_plane, "lane_detection", ())
        events = RoadEvents(EventLog(), DepartureRule(warns=False))
        self._road = RoadFollower(LaneLocator(calibration), VehicleInputs(), events, 0.95)
        self._calibration = calibration
        self._pipeline.validate()

    def follow(self, frame: Frame) -> Followed:
        detected = self._pipeline.lane_model.detect(frame)
        lane_frame = self._road.follow(self._pipeline._lane_frame(frame, detected), frame.image)
        # The queue's is what it is for frames of the test's own time.
        lane_frame = replace(
            lane_frame, latency_us=StageLatency(), calibration_id=self._calibration.id
        )
        return Followed(frame, lane_frame, lanes_of(lane_frame))


def lanes_of(lane_frame: LaneFrame) -> bytes:
    """Return what a reader gets of the lanes, in every digit: points, tracks, metres, ego."""
    fields = lane_frame_fields(lane_frame, IDENTITY, 0, lane_frame.capture_mono_ns)
    return only_lanes(lanes_pb2.LaneFrame(**fields))


def only_lanes(message: lanes_pb2.LaneFrame) -> bytes:
    ego = message.ego if message.HasField("ego") else None
    kept = lanes_pb2.LaneFrame(lanes=message.lanes, ego=ego, image=message.image)
    return kept.SerializeToString(deterministic=True)


def pictures() -> Iterator[np.ndarray]:
    source = open_source(f"synthetic://road?seed=7&fps=0&frames={FRAMES}")
    while (frame := source.read()) is not None:
        yield frame.image.planes[0]
    source.close()


def record(
    directory: Path, data_plane: DataPlane, frames: Callable[[Road], Iterator[Frame]]
) -> tuple[Path, list[Followed]]:
    """Record a drive of a calibrated camera; return the file and what the pipeline gave."""
    events = EventLog()
    files = RecordingFiles(directory, IDENTITY.boot_id, most_bytes=1 << 30, reserve_bytes=0)
    recorder = Recorder(
        RecorderSection(mode="continuous"), files, IDENTITY, events, lambda _: CALIBRATION
    )
    road = Road(data_plane, CALIBRATION)
    found = []
    for frame in frames(road):
        found.append(road.follow(frame))
        recorder(found[-1].lane_frame, frame)
        # A network's results are beside them, and no replay sees those.
        of_frame = replace(found[-1].lane_frame, lanes=(), ego=None, latency_us=StageLatency())
        recorder(NetworkFrame(**vars(of_frame), network="image"))
        for _ in range(2):
            recorder.encode(0.0)
    recorder.write()
    recorder.end()
    (path,) = directory.glob("*.mcap")
    return path, found


def camera_of_jpegs(road: Road) -> Iterator[Frame]:
    """Yield what a camera that sends JPEGs gives: decoded as its model needs them."""
    decoder = JpegDecoder("camera", road.camera.useful)
    for number, pixels in enumerate(pictures()):
        jpeg = encode_jpeg(Image.of_bgr(pixels), 80)
        decoded = decoder.decode(jpeg)
        assert decoded is not None
        image, picture_size = decoded
        yield frame_of(number, image, jpeg, picture_size)


def camera_of_pixels(road: Road) -> Iterator[Frame]:
    for number, pixels in enumerate(pictures()):
        yield frame_of(number, Image.of_bgr(pixels))


def frame_of(
    number: int,
    image: Image,
    jpeg: bytes | None = None,
    picture_size: tuple[int, int] | None = None,
) -> Frame:
    moment_ns = 10**12 + number * PERIOD_NS
    return Frame(
        number,
        image,
        moment_ns,
        1_790_000_000 * 10**9 + moment_ns,
        picture_size=picture_size,
        jpeg=jpeg,
    )


def replay(path: Path, data_plane: DataPlane, uptime_ns: int) -> list[Followed]:
    calibration = recorded_calibration(f"mcap://{path}")
    assert calibration == CALIBRATION
    road = Road(data_plane, calibration)
    clock = Clock(uptime_ns)
    source = McapSource(
        path, "front", JpegDecoder("replay", road.camera.useful), clock=clock, sleep=clock.sleep
    )
    found = []
    while (frame := source.read()) is not None:
        found.append(road.follow(frame))
    return found


class Clock:
    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9) + 1


def test_a_drive_of_a_jpeg_camera_replays_to_the_same_lanes_bit_for_bit_at_any_uptime(
    tmp_path: Path, data_plane: DataPlane
) -> None:
    path, driven = record(tmp_path, data_plane, camera_of_jpegs)
    replays = [replay(path, data_plane, uptime_ns) for uptime_ns in UPTIMES_NS]

    assert {len(each) for each in (driven, *replays)} == {FRAMES}
    assert sum(len(each.lane_frame.lanes) for each in driven) > FRAMES
    assert any(lane.ground is not None for lane in driven[-1].lane_frame.lanes)
    assert any(lane.id for lane in driven[-1].lane_frame.lanes)
    for again in replays:
        for drive, once in zip(driven, again, strict=True):
            np.testing.assert_array_equal(drive.frame.image.planes[0], once.frame.image.planes[0])
            assert once.lanes == drive.lanes
    with path.open("rb") as file:
        from mcap.reader import make_reader

        recorded = [
            only_lanes(lanes_pb2.LaneFrame.FromString(message.data))
            for _, _, message in make_reader(file).iter_messages("/front/lanes")
        ]
    assert recorded == [each.lanes for each in driven]


def test_a_drive_of_pixels_loses_by_its_jpegs_once_and_replays_alike(
    tmp_path: Path, data_plane: DataPlane
) -> None:
    path, driven = record(tmp_path, data_plane, camera_of_pixels)
    first, *others = [replay(path, data_plane, uptime_ns) for uptime_ns in UPTIMES_NS]
    for other in others:
        assert [each.lanes for each in first] == [each.lanes for each in other]
    offsets = []
    for drive, once in zip(driven, first, strict=True):
        assert drive.frame.size == once.frame.size == (1280, 720)
        if drive.lane_frame.ego and once.lane_frame.ego:
            a, b = drive.lane_frame.ego, once.lane_frame.ego
            if a.lateral_offset_m is not None and b.lateral_offset_m is not None:
                offsets.append(abs(a.lateral_offset_m - b.lateral_offset_m))
    assert len(offsets) > FRAMES // 2
    assert np.median(offsets) < 0.05


def test_a_recorder_that_is_killed_leaves_files_that_are_read_to_their_last_chunk(
    tmp_path: Path,
) -> None:
    chance = np.random.default_rng(20)
    program = Path(__file__).parents[1] / "support" / "recorder_process.py"
    recovered = 0
    for _ in range(6):
        process = subprocess.Popen(
            [sys.executable, str(program), str(tmp_path)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        # Of some seconds of its own time; a chunk has one of them, a file three.
        for second in range(int(chance.integers(2, 12))):
            assert process.stdout.readline() == b"%d\n" % (30 * second)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()

        parts = list(tmp_path.glob(f"*{PART}"))
        left = {path: content(path).frame_ids for path in parts}
        Drive(tmp_path).stop()  # what the next start does
        assert not list(tmp_path.glob(f"*{PART}"))
        for path, frame_ids in left.items():
            whole = path.with_name(path.name.removesuffix(PART))
            assert whole.exists() == bool(frame_ids)
            if frame_ids:
                recovered += 1
                assert content(whole).frame_ids == frame_ids
                assert frame_ids == list(range(frame_ids[0], frame_ids[0] + len(frame_ids)))
    assert recovered >= 3
    files = list(tmp_path.glob("*.mcap"))
    assert len(files) > 6
    assert all(is_whole(path) for path in files)


def test_what_the_daemon_records_on_request_it_plays_as_a_camera(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    recordings, config = tmp_path / "recordings", tmp_path / "config.toml"
    calibration = tmp_path / "front.toml"
    calibration.write_text(
        "[lens]\nkind = 'pinhole'\nwidth = 1280\nheight = 720\nfx = 1150.0\nfy = 1150.0\n"
        "cx = 640.0\ncy = 360.0\ndistortion = [0.0, 0.0, 0.0, 0.0, 0.0]\n"
        "[mounting]\nheight_m = 1.35\n"
    )
    models = f'[repository]\npaths = ["{MODELS}"]\n'
    config.write_text(
        f'{models}[recorder]\nmode = "events"\ndirectory = "{recordings}"\nafter_s = 1.0\n'
        f'[cameras.front]\nuri = "synthetic://road?seed=7&fps=10"\ncalibration = "{calibration}"\n'
    )
    process = start("--config", str(config))

    def recorded() -> Path | None:
        """The file, once its pictures are enough; each request prolongs it."""
        request = pb.RecordRequest(cause="test", after_s=2)
        try:
            file = call(process, "Record", request, pb.RecordResponse).file
            enough = len(content(recordings / f"{file}{PART}").images) >= 5
        except (grpc.RpcError, FileNotFoundError):  # no frame has come, or the file is complete
            return None
        return recordings / file if enough else None

    path = wait_until(recorded, PATIENCE_S, otherwise=process.log.read_text)
    wait_until(path.exists, PATIENCE_S, otherwise=process.log.read_text)
    assert process.terminate() == 0
    assert is_whole(path)
    assert len(content(path).images) >= 5
    process.close()

    config.write_text(f'{models}[cameras.road]\nuri = "mcap://{path}?loop=true"\n')
    process = start("--config", str(config))
    cameras = call(process, "ListCameras", pb.ListCamerasRequest(), pb.ListCamerasResponse).cameras
    assert [camera.name for camera in cameras] == ["road"]
    assert (cameras[0].calibration.height_m, cameras[0].calibration.fx) == (1.35, 1150.0)

    def on_ground() -> bool:
        request = pb.GetLatestLanesRequest(camera="road")
        try:
            frame = call(process, "GetLatestLanes", request, pb.GetLatestLanesResponse).frame
        except grpc.RpcError:
            return False
        return any(lane.HasField("ground") for lane in frame.lanes)

    wait_until(on_ground, PATIENCE_S, otherwise=process.log.read_text)
    off = pytest.raises(grpc.RpcError, match=r"the recorder is off; set recorder\.mode")
    with off:
        call(process, "Record", pb.RecordRequest(cause="test"), pb.RecordResponse)


def call(process: Process, method: str, request: Any, response: Any) -> Any:
    with grpc.insecure_channel(f"127.0.0.1:{process.port}") as channel:
        method_of = channel.unary_unary(
            f"/edge.lanes.v1.LaneService/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        return method_of(request, timeout=PATIENCE_S, wait_for_ready=True)
