"""Reading of MCAP files that the recorder has written: whole ones, and those that break off.

The topics of a camera are `/NAME/image` (foxglove.CompressedImage, JPEG), `/NAME/lanes`
(edge.lanes.v1.LaneFrame) and `/NAME/annotations` (foxglove.ImageAnnotations); `/events` has
edge.lanes.v1.Event. The lanes of a frame come before its image, and both have the time of its
capture as their publish time. The channel of images has as metadata the camera's name, the size of
its pictures in px (`width`, `height`; the JPEGs may be smaller) and its calibration as JSON.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from foxglove_schemas_protobuf.CompressedImage_pb2 import CompressedImage
from google.protobuf.message import DecodeError
from mcap.exceptions import EndOfFile, McapError
from mcap.reader import make_reader
from mcap.records import Channel, Message, Metadata, Schema
from mcap.stream_reader import StreamReader

from edge_server.cameras.calibration import Calibration, calibration_id
from edge_server.errors import SourceError
from edge_server.proto.edge.lanes.v1 import lanes_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

IMAGES, LANES, ANNOTATIONS = "/{}/image", "/{}/lanes", "/{}/annotations"
EVENTS = "/events"
# A record of the recorder has a chunk of 256 KiB, or one picture.
_LARGEST_RECORD_BYTES = 1 << 28
# What damaged bytes raise in the library, beside its own errors.
_DAMAGE = (McapError, DecodeError, struct.error, ValueError, KeyError, OverflowError)


class Record(NamedTuple):
    """A message with its channel and schema.

    Attributes:
        schema: None where the file has none.
    """

    schema: Schema | None
    channel: Channel
    message: Message


class Records:
    """The records of a file in their order, up to its end or to where it breaks off.

    Attributes:
        damage: why the file ended without its summary; "" while that is not known.
        metadata: the metadata records read so far, by name.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.damage = ""
        self.metadata: dict[str, Mapping[str, str]] = {}
        self._path = path

    def __iter__(self) -> Iterator[Record]:
        """Yield each message.

        Raises:
            OSError: the file cannot be opened or read.
        """
        schemas: dict[int, Schema] = {}
        channels: dict[int, Channel] = {}
        with self._path.open("rb") as file:
            reader = StreamReader(file, validate_crcs=True, record_size_limit=_LARGEST_RECORD_BYTES)
            try:
                for record in reader.records:
                    match record:
                        case Schema():
                            schemas[record.id] = record
                        case Channel():
                            channels[record.id] = record
                        case Metadata():
                            self.metadata[record.name] = record.metadata
                        case Message():
                            channel = channels[record.channel_id]
                            yield Record(schemas.get(channel.schema_id), channel, record)
            except EndOfFile:
                self.damage = "it ends in the middle"
            except _DAMAGE as error:
                self.damage = f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Picture:
    """A recorded picture.

    Attributes:
        jpeg: as the camera sent it, or as it was encoded.
        mono_ns: CLOCK_MONOTONIC of its capture, of the boot in which it was recorded; None where
            only the Unix time is known.
        epoch_ns: Unix time of its capture.
        size: width and height of the camera's picture, px; None where that is the JPEG's.
    """

    jpeg: bytes
    mono_ns: int | None
    epoch_ns: int
    size: tuple[int, int] | None


class PictureRecords:
    """The pictures of one camera of a file.

    Attributes:
        records: as they are read.
        damaged: number of pictures that could not be read.
    """

    def __init__(self, path: Path, camera: str) -> None:
        self.records = Records(path)
        self.damaged = 0
        self._topics = IMAGES.format(camera), LANES.format(camera)

    def __iter__(self) -> Iterator[Picture]:
        images, lanes = self._topics
        captures: tuple[int, int] | None = None  # epoch and monotonic time of the newest lanes
        for _, channel, message in self.records:
            try:
                if channel.topic == lanes:
                    of = lanes_pb2.LaneFrame.FromString(message.data).time
                    captures = message.publish_time, of.capture_mono_ns
                elif channel.topic == images:
                    image = CompressedImage.FromString(message.data)
                    known = captures is not None and captures[0] == message.publish_time
                    mono_ns = captures[1] if captures is not None and known else None
                    size = _size_of(channel)
                    yield Picture(image.data, mono_ns, message.publish_time, size)
            except DecodeError:
                self.damaged += 1


def cameras_in(path: Path) -> dict[str, Calibration | None]:
    """Return the cameras of a file in the order of their first pictures, with the calibration that
    each had then.

    Raises:
        SourceError: the file cannot be read, or has no pictures.
    """
    found: dict[str, Calibration | None] = {}
    prefix, _, suffix = IMAGES.partition("{}")
    damage = ""
    try:
        channels = _channels_of_summary(path)
        if channels is None:
            records = Records(path)
            channels = {record.channel.id: record.channel for record in records}
            damage = records.damage
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}; check the path and its rights") from error
    for channel in channels.values():
        if channel.topic.startswith(prefix) and channel.topic.endswith(suffix):
            name = channel.topic.removeprefix(prefix).removesuffix(suffix)
            found.setdefault(name, _calibration_of(path, channel))
    if not found:
        raise SourceError(
            f"{path}: has no pictures of a camera{damage and f' ({damage})'}; name a file of the "
            "recorder"
        )
    return found


def _channels_of_summary(path: Path) -> Mapping[int, Channel] | None:
    """Return the channels that the end of a file lists; None where it has no such end."""
    with path.open("rb") as file:
        try:
            summary = make_reader(file).get_summary()
        except (*_DAMAGE, OSError):  # a seek to where a damaged footer points
            return None
    return None if summary is None else summary.channels


def _size_of(channel: Channel) -> tuple[int, int] | None:
    try:
        return int(channel.metadata["width"]), int(channel.metadata["height"])
    except (KeyError, ValueError):
        return None


def _calibration_of(path: Path, channel: Channel) -> Calibration | None:
    text = channel.metadata.get("calibration")
    if not text:
        return None
    try:
        calibration = msgspec.json.decode(text.encode(), type=Calibration)
    except (msgspec.MsgspecError, UnicodeEncodeError) as error:
        raise SourceError(f"{path}: its calibration is damaged: {error}") from error
    if calibration_id(calibration.model) != calibration.id:
        raise SourceError(f"{path}: its calibration is damaged: its id is that of another one")
    return calibration
