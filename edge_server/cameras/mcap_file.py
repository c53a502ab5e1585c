"""Reading of MCAP files that the recorder has written: whole ones, and those that break off.

The topics of a camera are `/NAME/image` (foxglove.CompressedImage, JPEG), `/NAME/lanes`
(edge.lanes.v1.LaneFrame) and `/NAME/annotations` (foxglove.ImageAnnotations); `/events` has
edge.lanes.v1.Event. The lanes of a frame come before its image, and both have the time of its
capture as their publish time. The channel of images has as metadata the camera's name, the size of
its pictures in px (`width`, `height`; the JPEGs may be smaller) and its calibration as JSON.
"""

from __future__ import annotations

import io
import struct
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from foxglove_schemas_protobuf.CompressedImage_pb2 import CompressedImage
from google.protobuf.message import DecodeError
from mcap.exceptions import EndOfFile, McapError
from mcap.reader import make_reader
from mcap.records import Channel, Chunk, Message, Metadata, Schema
from mcap.stream_reader import StreamReader, breakup_chunk

from edge_server.cameras.calibration import Calibration, calibration_id
from edge_server.cameras.frame import LARGEST_PX
from edge_server.errors import SourceError
from edge_server.process.disk import open_regular
from edge_server.proto.edge.lanes.v1 import lanes_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from mcap.records import McapRecord

IMAGES, LANES, ANNOTATIONS = "/{}/image", "/{}/lanes", "/{}/annotations"
EVENTS = "/events"
# A record of the recorder has a chunk of 256 KiB, or one picture. A chunk that another tool has
# compressed may unpack to as much.
_LARGEST_RECORD_BYTES = 1 << 26
_TOO_LARGE = f"a chunk that unpacks to more than {_LARGEST_RECORD_BYTES >> 20} MiB"
# Its channels, schemas and metadata are kept while it is read: a recorder's have a few kilobytes.
_TOO_MUCH_KEPT = f"channels, schemas and metadata of more than {_LARGEST_RECORD_BYTES >> 20} MiB"
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
        kept_bytes = 0
        with _BoundedFile(io.FileIO(open_regular(self._path))) as file:
            try:
                for record in _unpacked_records(file):
                    kept_bytes += _kept_bytes(record)
                    if kept_bytes > _LARGEST_RECORD_BYTES:
                        raise McapError(_TOO_MUCH_KEPT)
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
    """The pictures of one camera of a file; one that cannot be read has an empty JPEG.

    Attributes:
        records: as they are read.
    """

    def __init__(self, path: Path, camera: str) -> None:
        self.records = Records(path)
        self._topics = IMAGES.format(camera), LANES.format(camera)

    def __iter__(self) -> Iterator[Picture]:
        images, lanes = self._topics
        captures: tuple[int, int] | None = None  # epoch and monotonic time of the newest lanes
        for _, channel, message in self.records:
            if channel.topic == lanes:
                with suppress(DecodeError):
                    of = lanes_pb2.LaneFrame.FromString(message.data).time
                    captures = message.publish_time, of.capture_mono_ns
            elif channel.topic == images:
                try:
                    jpeg = CompressedImage.FromString(message.data).data
                except DecodeError:
                    jpeg = b""
                known = captures is not None and captures[0] == message.publish_time
                mono_ns = captures[1] if captures is not None and known else None
                yield Picture(jpeg, mono_ns, message.publish_time, size_of(channel))


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


class _BoundedFile(io.BufferedReader):
    """A file of which nothing larger than a record is read at once: a damaged length within a
    record would ask the library for memory that nobody has.

    Attributes:
        left: the bytes that may be read; None where a file may be of any length.
    """

    left: int | None = None

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _LARGEST_RECORD_BYTES:
            raise McapError(f"a field of {size} bytes")
        if self.left is not None:
            self.left -= size
            if self.left < 0:
                raise McapError(_TOO_MUCH_KEPT)
        return super().read(size)


def _unpacked_records(file: _BoundedFile) -> Iterator[McapRecord]:
    """Yield the records of a file, those within chunks too.

    Raises:
        McapError, …: see `_DAMAGE`.
    """
    reader = StreamReader(
        file, emit_chunks=True, validate_crcs=True, record_size_limit=_LARGEST_RECORD_BYTES
    )
    for record in reader.records:
        if isinstance(record, Chunk):
            yield from breakup_chunk(_unpacked(record), validate_crc=True)
        else:
            yield record


def _kept_bytes(record: McapRecord) -> int:
    """Return how much memory `record` takes until the file is closed."""
    match record:
        case Schema():
            return len(record.data) + len(record.name) + len(record.encoding)
        case Channel() | Metadata():
            return sum(len(key) + len(value) for key, value in record.metadata.items())
    return 0


def _unpacked(chunk: Chunk) -> Chunk:
    """Return `chunk` without its compression, which mcap would undo at any size.

    Where a library for it is missing the chunk stays as it is, and mcap names it: packages leave
    both out, as the recorder does not compress.

    Raises:
        McapError: the chunk is damaged, or too large.
    """
    unpack = {"zstd": _zstd, "lz4": _lz4}.get(chunk.compression)
    try:
        data = None if unpack is None else unpack(chunk)
    except ModuleNotFoundError:
        return chunk
    return chunk if data is None else replace(chunk, compression="", data=data)


def _zstd(chunk: Chunk) -> bytes:
    import zstandard  # noqa: PLC0415 - optional

    try:
        size = zstandard.frame_content_size(chunk.data)
        if max(size, chunk.uncompressed_size) > _LARGEST_RECORD_BYTES:
            raise McapError(_TOO_LARGE)
        decompressor = zstandard.ZstdDecompressor()
        return decompressor.decompress(chunk.data, max_output_size=chunk.uncompressed_size)
    except zstandard.ZstdError as error:
        raise McapError(f"a chunk of damaged zstd: {error}") from error


def _lz4(chunk: Chunk) -> bytes:
    import lz4.frame  # noqa: PLC0415 - optional

    decompressor = lz4.frame.LZ4FrameDecompressor()
    try:
        data: bytes = decompressor.decompress(chunk.data, max_length=_LARGEST_RECORD_BYTES)
    except RuntimeError as error:
        raise McapError(f"a chunk of damaged lz4: {error}") from error
    if not decompressor.eof:
        raise McapError(_TOO_LARGE)
    return data


def _channels_of_summary(path: Path) -> Mapping[int, Channel] | None:
    """Return the channels that the end of a file lists; None where it has no such end."""
    with _BoundedFile(io.FileIO(open_regular(path))) as file:
        file.left = _LARGEST_RECORD_BYTES  # the library keeps all of it
        try:
            summary = make_reader(file).get_summary()
        except (*_DAMAGE, OSError):  # a seek to where a damaged footer points
            return None
    return None if summary is None else summary.channels


def size_of(channel: Channel) -> tuple[int, int] | None:
    """Return the size that a channel of images states; None where no camera has such a one."""
    try:
        width, height = int(channel.metadata["width"]), int(channel.metadata["height"])
    except (KeyError, ValueError):
        return None
    return (width, height) if min(width, height) > 0 and width * height <= LARGEST_PX else None


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
