"""Drives for the recorder: frames of a drawn road with lanes, and what a file has of them."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from mcap.reader import NonSeekingReader, make_reader

from edge_server.board.board import Identity
from edge_server.cameras.frame import Frame
from edge_server.cameras.jpeg import encode_jpeg
from edge_server.lanes.types import Lane, LaneFrame
from edge_server.pipeline.event_log import Event, EventLog
from edge_server.pipeline.recorder.recorder import Recorder
from edge_server.pipeline.recorder.recording_writer import RecordingFiles
from edge_server.pixels import Image
from edge_server.proto.edge.lanes.v1 import lanes_pb2
from edge_server.settings import RecorderSection

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from edge_server.cameras.calibration import Calibration

IDENTITY = Identity("truck-7", "1", "0123abcd-4567", "client")
WIDTH, HEIGHT = 320, 192
PERIOD_NS = 33_366_700
START_NS = 7_000_000_000_000
EPOCH_NS = 1_790_000_000_000_000_000


@lru_cache(maxsize=16)
def picture(number: int) -> np.ndarray:
    """A picture with a texture, so that its JPEG is of a camera's size; one of 16."""
    pixels = np.random.default_rng(number).integers(0, 60, (HEIGHT, WIDTH, 3), np.uint8)
    pixels[:, 40 + 9 * number : 60 + 9 * number] = 220
    return pixels


@lru_cache(maxsize=16)
def camera_jpeg(number: int) -> bytes:
    """The picture as a camera sends it; the recorder would encode it with another quality."""
    return encode_jpeg(Image.of_bgr(picture(number)), 80)


class Drive:
    """A recorder with a clock that `frames` moves; its threads are not started."""

    def __init__(
        self,
        directory: Path,
        *,
        most_bytes: int = 1 << 30,
        free: Callable[[Path], int] = lambda _: 1 << 40,
        calibration: Calibration | None = None,
        **settings: object,
    ) -> None:
        self.now_ns = START_NS
        self.count = 0
        self.events = EventLog()
        self.directory = directory
        self.calibration = calibration
        files = RecordingFiles(
            directory, IDENTITY.boot_id, most_bytes=most_bytes, reserve_bytes=0, free=free
        )
        self.recorder = Recorder(
            RecorderSection(**{"mode": "continuous", **settings}),
            files,
            IDENTITY,
            self.events,
            lambda _: calibration,
            clock_ns=lambda: self.now_ns,
        )
        files.recover()

    def frames(self, count: int, *, jpeg: bool = False, camera: str = "front") -> None:
        """Give frames, encode each, and write about five times a second."""
        for _ in range(count):
            self.give(jpeg=jpeg, camera=camera)
            self.recorder.encode(0.0)
            if self.count % 6 == 0:
                self.recorder.write()

    def give(self, *, jpeg: bool = False, camera: str = "front") -> None:
        pixels = picture(self.count % 16)
        data = camera_jpeg(self.count % 16) if jpeg else None
        moment_ns = self.now_ns - START_NS
        id_ = "" if self.calibration is None else self.calibration.id
        frame = Frame(
            self.count,
            Image.of_bgr(pixels),
            self.now_ns,
            EPOCH_NS + moment_ns,
            jpeg=data,
        )
        points = np.array([[100 + self.count % 7, 180], [120, 90]], np.float32)
        lanes = LaneFrame(
            camera,
            self.count,
            0,
            self.now_ns,
            EPOCH_NS + moment_ns,
            WIDTH,
            HEIGHT,
            "lane_detection",
            "1",
            lanes=(Lane(points, 0.75),),
            calibration_id=id_,
        )
        self.recorder(lanes, frame)
        self.count += 1
        self.now_ns += PERIOD_NS

    def event(self, kind: str = "lane_departure", cause: str = "left") -> None:
        """Put an event that happens now."""
        self.events.put(Event(kind, "begin", cause, "", self.now_ns, EPOCH_NS))
        self.events._give_ids(self.events._arrived)
        self.events._arrived.clear()
        self.events._write({}, 0.0)
        self.recorder.write()

    def stop(self) -> None:
        self.recorder._encode_rest()
        self.recorder.end()

    def names(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())

    def files(self) -> list[Path]:
        return sorted(self.directory.glob("*.mcap"))


class Content(NamedTuple):
    """The messages of a file: topics in their order, JPEGs and lanes of the camera `front`."""

    topics: list[str]
    frame_ids: list[int]
    images: list[bytes]
    log_ns: list[int]
    publish_ns: list[int]


def content(path: Path) -> Content:
    """Return what a reader of other people's finds in a file, whole or not."""
    from foxglove_schemas_protobuf.CompressedImage_pb2 import CompressedImage
    from mcap.exceptions import EndOfFile

    found = Content([], [], [], [], [])
    with path.open("rb") as file:
        messages = NonSeekingReader(file).iter_messages(log_time_order=False)
        try:
            for _, channel, message in messages:
                found.topics.append(channel.topic)
                if channel.topic == "/front/lanes":
                    lanes = lanes_pb2.LaneFrame.FromString(message.data)
                    found.frame_ids.append(lanes.frame_id)
                elif channel.topic == "/front/image":
                    found.images.append(CompressedImage.FromString(message.data).data)
                    found.log_ns.append(message.log_time)
                    found.publish_ns.append(message.publish_time)
        except EndOfFile:
            pass
    return found


def is_whole(path: Path) -> bool:
    """Whether a seeking reader finds the summary, with the count of the messages."""
    with path.open("rb") as file:
        reader = make_reader(file, validate_crcs=True)
        count = sum(1 for _ in reader.iter_messages())
        summary = reader.get_summary()
        assert summary is not None
        assert summary.statistics is not None
        return summary.statistics.message_count == count
