"""Writing of one MCAP file, of which a crash at any moment costs the open chunk alone."""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from itertools import dropwhile
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from foxglove_schemas_protobuf.Color_pb2 import Color
from foxglove_schemas_protobuf.CompressedImage_pb2 import CompressedImage
from foxglove_schemas_protobuf.ImageAnnotations_pb2 import ImageAnnotations
from foxglove_schemas_protobuf.Point2_pb2 import Point2
from foxglove_schemas_protobuf.PointsAnnotation_pb2 import PointsAnnotation
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.timestamp_pb2 import Timestamp
from mcap.writer import CompressionType, Writer

from edge_server.cameras.jpeg import jpeg_of, size_of_jpeg
from edge_server.cameras.mcap_file import (
    ANNOTATIONS,
    EVENTS,
    IMAGES,
    LANES,
    RESULT_ANNOTATIONS,
    RESULTS,
    Records,
)
from edge_server.lanes.types import PictureMark
from edge_server.pipeline.messages import LaneMessage, event_message
from edge_server.pipeline.perception import NetworkFrame, marks_of
from edge_server.process.disk import atomic_replace
from edge_server.proto.edge.lanes.v1 import events_pb2, lanes_pb2
from edge_server.proto.edge.perception.v1 import perception_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from edge_server.board.board import Identity
    from edge_server.cameras.calibration import Calibration
    from edge_server.cameras.frame import Frame
    from edge_server.lanes.types import LaneFrame
    from edge_server.pipeline.event_log import Event

_NS = 1_000_000_000
_RGB = {"yellow": (255, 217, 26), "white": (255, 255, 255), "unknown": (51, 230, 77)}
_DESCRIPTORS = (
    CompressedImage.DESCRIPTOR,
    ImageAnnotations.DESCRIPTOR,
    lanes_pb2.LaneFrame.DESCRIPTOR,
    events_pb2.Event.DESCRIPTOR,
    perception_pb2.NetworkFrame.DESCRIPTOR,
)
_FONT_PX = 14.0


class Topic(NamedTuple):
    """A channel of a file."""

    name: str
    schema: str
    metadata: tuple[tuple[str, str], ...] = ()


class RecordedMessage(NamedTuple):
    """A message as a file has it.

    Attributes:
        log_ns: Unix time at which the recorder got it.
        publish_ns: Unix time of the capture, or of the event.
    """

    topic: Topic
    log_ns: int
    publish_ns: int
    data: bytes


class Arrival(NamedTuple):
    """What the pipeline gave, or a network, and when: `time.time_ns()` and
    `time.monotonic_ns()`."""

    lane_frame: LaneFrame
    frame: Frame | None
    epoch_ns: int
    mono_ns: int


class FrameMessages:
    """Makes the messages of frames; for one thread."""

    def __init__(
        self,
        identity: Identity,
        quality: int,
        width: int,
        calibration: Callable[[str], Calibration | None],
    ) -> None:
        self._identity = identity
        self._quality = quality
        self._width = width
        self._calibration = calibration
        self._counts: dict[str, int] = {}
        self._texts: dict[str, str] = {}  # calibrations by their ids
        self._scales: dict[str, float] = {}  # of the newest pictures, by camera

    def of(self, arrival: Arrival) -> list[RecordedMessage]:
        """Return the messages of a frame, the lanes first, or of what a network has found in it."""
        lane_frame, frame, epoch_ns, mono_ns = arrival
        camera, captured_ns = lane_frame.camera, lane_frame.capture_epoch_ns
        network = lane_frame.network if isinstance(lane_frame, NetworkFrame) else ""
        source = f"{camera}/{network}"
        count = self._counts[source] = self._counts.get(source, 0) + 1

        def message(name: str, data: bytes, schema: str, *metadata: tuple[str, str]) -> None:
            topic = Topic(name.format(camera, network), schema, metadata)
            messages.append(RecordedMessage(topic, epoch_ns, captured_ns, data))

        messages: list[RecordedMessage] = []
        made = LaneMessage(lane_frame, self._identity, count).sent_at(mono_ns)
        if network or lane_frame.model_name:  # a camera may have no lane model
            name = RESULTS if network else LANES
            message(name, made.SerializeToString(), made.DESCRIPTOR.full_name)
        stamp = Timestamp(seconds=captured_ns // _NS, nanos=captured_ns % _NS)
        if isinstance(lane_frame, NetworkFrame):
            if lane_frame.result is not None and camera in self._scales:
                marks = ((mark, 2.0) for mark in marks_of(lane_frame))
                drawn = _annotations(marks, stamp, self._scales[camera])
                name = drawn.DESCRIPTOR.full_name
                message(RESULT_ANNOTATIONS, drawn.SerializeToString(), name)
            return messages
        if frame is None:
            return messages
        jpeg = jpeg_of(frame, self._quality, self._width)
        image = CompressedImage(timestamp=stamp, frame_id=camera, data=jpeg, format="jpeg")
        width, height = frame.size
        message(
            IMAGES,
            image.SerializeToString(),
            image.DESCRIPTOR.full_name,
            ("camera", camera),
            ("width", str(width)),
            ("height", str(height)),
            *self._calibration_of(camera, lane_frame.calibration_id),
        )
        scale = self._scales[camera] = size_of_jpeg(jpeg)[0] / width
        if lane_frame.model_name:
            drawn = _annotations(_lines_of(lane_frame), stamp, scale)
            message(ANNOTATIONS, drawn.SerializeToString(), drawn.DESCRIPTOR.full_name)
        return messages

    def of_event(self, event: Event, epoch_ns: int) -> RecordedMessage:
        """Return the message of `event`."""
        made = event_message(event, self._identity)
        topic = Topic(EVENTS, made.DESCRIPTOR.full_name)
        return RecordedMessage(topic, epoch_ns, event.epoch_ns, made.SerializeToString())

    def _calibration_of(self, camera: str, id_: str) -> tuple[tuple[str, str], ...]:
        if not id_:
            return ()
        if id_ not in self._texts:
            calibration = self._calibration(camera)
            if calibration is None or calibration.id != id_:  # replaced by a reload just now
                return ()
            self._texts[id_] = msgspec.json.encode(calibration).decode()
        return (("calibration", self._texts[id_]),)


def _annotations(
    marks: Iterable[tuple[PictureMark, float]], stamp: Timestamp, scale: float
) -> ImageAnnotations:
    """Return marks, each with the thickness of its line, in a picture that is `scale` times as
    large as the camera's."""
    drawn = ImageAnnotations()
    for (points, text, rgb, filled), thickness in marks:
        red, green, blue = (each / 255 for each in rgb)
        line = drawn.points.add(
            timestamp=stamp,
            type=PointsAnnotation.LINE_LOOP if filled else PointsAnnotation.LINE_STRIP,
            points=[Point2(x=x, y=y) for x, y in (points * scale).tolist()],
            outline_color=Color(r=red, g=green, b=blue, a=1.0),
            fill_color=Color(r=red, g=green, b=blue, a=0.3 * filled),
            thickness=thickness,
        )
        if text:
            drawn.texts.add(
                timestamp=stamp,
                position=line.points[0],
                text=text,
                font_size=_FONT_PX,
                text_color=line.outline_color,
                background_color=Color(a=0.6),
            )
    return drawn


def _lines_of(lane_frame: LaneFrame) -> Iterator[tuple[PictureMark, float]]:
    for lane in lane_frame.lanes:
        if np.isfinite(lane.points).all():
            yield PictureMark(lane.points, "", _RGB[lane.color]), 2.0 if lane.predicted else 4.0


def schema_data(schema: str) -> bytes:
    """Return the type with that full name and all that it is made of, as MCAP wants it: a
    FileDescriptorSet."""
    (descriptor,) = (each for each in _DESCRIPTORS if each.full_name == schema)
    files: dict[str, FileDescriptorProto] = {}

    def add(file: Any) -> None:
        if file.name not in files:
            for dependency in file.dependencies:
                add(dependency)
            proto = FileDescriptorProto()
            file.CopyToProto(proto)
            files[file.name] = proto

    add(descriptor.file)
    return FileDescriptorSet(file=files.values()).SerializeToString()


class RingEntry(NamedTuple):
    """Messages that belong together.

    Attributes:
        mono_ns: `time.monotonic_ns()` at which the recorder got them.
    """

    number: int
    mono_ns: int
    size_bytes: int
    messages: Sequence[RecordedMessage]


class Ring:
    """The entries of the last `keep_s`, and no more than `most_bytes`; safe from any thread."""

    def __init__(self, keep_s: float, most_bytes: int) -> None:
        self.size_bytes = 0
        self._keep_ns = round(keep_s * 1e9)
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._entries: deque[RingEntry] = deque()
        self._newest = 0

    def append(self, mono_ns: int, messages: Sequence[RecordedMessage]) -> None:
        size = sum(len(each.data) for each in messages)
        with self._lock:
            self._newest += 1
            self._entries.append(RingEntry(self._newest, mono_ns, size, messages))
            self.size_bytes += size
            oldest_ns = mono_ns - self._keep_ns
            while self._entries and (
                self._entries[0].mono_ns < oldest_ns or self.size_bytes > self._most_bytes
            ):
                self.size_bytes -= self._entries.popleft().size_bytes

    def after(self, number: int) -> list[RingEntry]:
        """Return the entries with greater numbers."""
        with self._lock:
            return list(dropwhile(lambda entry: entry.number <= number, self._entries))

    def before(self, mono_ns: int) -> int:
        """Return the number of the last entry before `mono_ns`, or of the one that was forgotten
        last."""
        with self._lock:
            number = self._newest - len(self._entries)
            for entry in self._entries:
                if entry.mono_ns >= mono_ns:
                    break
                number = entry.number
            return number


# Three pictures: what a crash costs.
_CHUNK_BYTES = 256 << 10
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
PART = ".part"
RECOVERING = ".recovering"
RECORDING = "edge.recording"  # the metadata record: what the file is of


class _Output:
    """A file without a buffer of its own: what is written is the kernel's, at once.

    It is no `io.RawIOBase`: mcap would put a buffer before one, and lose its content.
    """

    def __init__(self, path: Path) -> None:
        self.size = 0
        self._descriptor = os.open(path, _FLAGS, 0o640)

    def write(self, data: bytes) -> int:
        rest = memoryview(data)
        while rest:
            written = os.write(self._descriptor, rest)
            self.size += written
            rest = rest[written:]
        return len(data)

    def tell(self) -> int:
        return self.size

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        # Once: another thread may have been given the same number since.
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class McapWriter:
    """Writes `path` with a suffix, and names it `path` when it is whole.

    Args:
        schema: returns the definition of a type of messages by its full name.

    Raises:
        OSError: of every method too: the disk is full, or failed. Only `abandon` may follow.
    """

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, str],
        *,
        suffix: str = PART,
        schema: Callable[[str], bytes] = schema_data,
    ) -> None:
        self.path = path
        self.part = path.with_name(path.name + suffix)
        self.messages = 0
        self._schema = schema
        self._output = _Output(self.part)
        # JPEGs do not get smaller; compression would cost 1 ms for each.
        self._writer = Writer(self._output, _CHUNK_BYTES, CompressionType.NONE)
        self._schemas: dict[str, int] = {}
        self._channels: dict[Topic, int] = {}
        try:
            self._writer.start(library="edge-server")
            self._writer.add_metadata(RECORDING, dict(metadata))
        except BaseException:
            self.abandon()
            raise

    @property
    def size(self) -> int:
        """Bytes on disk; those of the open chunk are not."""
        return self._output.size

    def write(self, message: RecordedMessage) -> None:
        """Add a message; it is in the file with the end of its chunk."""
        topic = message.topic
        if topic.schema not in self._schemas:
            self._schemas[topic.schema] = self._writer.register_schema(
                topic.schema, "protobuf", self._schema(topic.schema)
            )
        if topic not in self._channels:
            self._channels[topic] = self._writer.register_channel(
                topic.name, "protobuf", self._schemas[topic.schema], dict(topic.metadata)
            )
        self.messages += 1
        self._writer.add_message(
            self._channels[topic],
            message.log_ns,
            message.data,
            message.publish_ns,
            self.messages % 2**32,
        )

    def sync(self) -> None:
        """Return when what is in the file is safe from a power cut."""
        self._output.sync()

    def finish(self, name: str = "") -> Path:
        """Complete the file, name it, and return its path."""
        self._writer.finish()
        self._output.close()
        path = self.path.with_name(name or self.path.name)
        atomic_replace(self.part, path)
        return path

    def abandon(self) -> None:
        """Leave the file as it is; one without a message is removed. Raises nothing."""
        with suppress(OSError):
            self._output.close()
            if not self.size or not self.messages:
                self.part.unlink(missing_ok=True)


def recover(part: Path) -> Path | None:
    """Make a whole file of one that was being written, with all its messages up to where it breaks
    off; return its path, or None where it has none. `part` is gone afterwards.

    Raises:
        OSError: the disk is full, or failed; `part` stays.
    """
    records, schemas = Records(part), dict[str, bytes]()
    path = part.with_name(part.name.removesuffix(PART))
    writer: McapWriter | None = None
    try:
        for schema, channel, message in records:
            if writer is None:
                about = {**records.metadata.get(RECORDING, {}), "recovered": "true"}
                suffix = PART + RECOVERING
                writer = McapWriter(path, about, suffix=suffix, schema=schemas.__getitem__)
            if schema is not None:  # ours all have one
                schemas[schema.name] = schema.data
                topic = Topic(channel.topic, schema.name, tuple(channel.metadata.items()))
                stamps = message.log_time, message.publish_time
                writer.write(RecordedMessage(topic, *stamps, message.data))
        if writer is not None:
            writer.finish()
    except BaseException:
        if writer is not None:
            writer.abandon()
            writer.part.unlink(missing_ok=True)
        raise
    part.unlink()
    return None if writer is None else path
