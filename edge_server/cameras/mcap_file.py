"""MCAP files of the recorder, whole ones and those that break off: read, and played as a camera.

The topics of a camera are `/NAME/image` (foxglove.CompressedImage, JPEG), `/NAME/lanes`
(edge.lanes.v1.LaneFrame) and `/NAME/annotations` (foxglove.ImageAnnotations); `/events` has
edge.lanes.v1.Event. What another network of the camera has found is on `/NAME/networks/NETWORK/`,
`results` (edge.perception.v1.NetworkFrame) and `annotations`. The lanes of a frame come before its
image, and all have the time of its capture as their publish time. The channel of images has as
metadata the camera's name, the size of its pictures in px (`width`, `height`; the JPEGs may be
smaller) and its calibration as JSON.
"""

from __future__ import annotations

import io
import logging
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from foxglove_schemas_protobuf.CompressedImage_pb2 import CompressedImage
from google.protobuf.message import DecodeError
from mcap.exceptions import EndOfFile, McapError
from mcap.reader import make_reader
from mcap.records import Channel, Chunk, Message, Metadata, Schema
from mcap.stream_reader import StreamReader, breakup_chunk

from edge_server.cameras.calibration import Calibration, calibration_id
from edge_server.cameras.frame import LARGEST_PX, Frame, Pace
from edge_server.cameras.jpeg import JpegDecoder
from edge_server.errors import SourceError
from edge_server.process.disk import open_regular
from edge_server.process.text import shown
from edge_server.proto.edge.lanes.v1 import lanes_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from mcap.records import McapRecord

    from edge_server.cameras.frame import UsefulSize
    from edge_server.cameras.source_uri import SourceUri
    from edge_server.pixels import Image

log = logging.getLogger(__name__)

IMAGES, LANES, ANNOTATIONS = "/{}/image", "/{}/lanes", "/{}/annotations"
# No network's topic ends as that of images does.
RESULTS, RESULT_ANNOTATIONS = "/{}/networks/{}/results", "/{}/networks/{}/annotations"
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
    """A message with its channel, and its schema where the file has one."""

    schema: Schema | None
    channel: Channel
    message: Message


class Records:
    """The records of a file in their order, up to its end or to where it breaks off.

    Attributes:
        damage: why the file ended without its summary; "" while that is not known.
        metadata: the metadata records read so far, by name.
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
class RecordedPicture:
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


def pictures_of(records: Records, camera: str) -> Iterator[RecordedPicture]:
    """Yield the pictures of one camera; one that cannot be read has an empty JPEG."""
    images, lanes = IMAGES.format(camera), LANES.format(camera)
    captures: tuple[int, int] | None = None  # epoch and monotonic time of the newest lanes
    for _, channel, message in records:
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
            yield RecordedPicture(jpeg, mono_ns, message.publish_time, size_of(channel))


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


# A recording whose pictures are damaged, so many one after another, has none that can be shown.
MOST_DAMAGED = 10
# A longer gap between two pictures is one of the recording, or a step of its clock.
_LONGEST_GAP_S = 5.0


def chosen_camera(uri: SourceUri) -> tuple[str, Calibration | None]:
    """Return the camera of a recording that `uri` plays, and its calibration; raise SourceError
    where it has no such camera, or several and `uri` names none."""
    cameras = cameras_in(Path(uri.path))
    wanted = uri.query.get("camera")
    if wanted is None and len(cameras) == 1:
        (wanted,) = cameras
    if wanted not in cameras:
        what = "has several cameras" if wanted is None else f"has no camera {wanted!r}"
        raise SourceError(
            f"{uri.label}: {what}; write ?camera= and one of {', '.join(map(shown, cameras))}"
        )
    return wanted, cameras[wanted]


def open_mcap(uri: SourceUri, useful: UsefulSize | None) -> McapSource:
    """Return the source of a recording; see `chosen_camera`."""
    camera, _ = chosen_camera(uri)
    return McapSource(
        Path(uri.path),
        camera,
        JpegDecoder(uri.label, useful),
        fps=uri.fps(),
        speed=uri.speed(),
        loop=uri.flag("loop"),
    )


class McapSource:
    """Plays the pictures of one camera in their order; a FrameSource.

    At its own pace a picture is due as long after the one before as it was captured after it, and
    its capture time is the moment at which it is due: from frame to frame it moves by the same
    nanoseconds in every replay at the same speed, and at speed 1 as it did on the road. A replay
    that is late by more than `CATCH_UP_S` goes on from its present picture.

    Args:
        path: a file of the recorder; one that breaks off ends there, with a line in the log.
        camera: its name in the file.
        decoder: of its JPEGs.
        fps: replaces the pace of their captures; 0 is lock-step with that pace, see `Pace`.
        speed: how many times as fast as it was recorded.
        loop: restart at the end.

    Raises:
        SourceError: the file cannot be read, or has no picture that can be decoded among the first
            `MOST_DAMAGED`.
    """

    def __init__(
        self,
        path: Path,
        camera: str,
        decoder: JpegDecoder,
        *,
        fps: float | None = None,
        speed: float = 1.0,
        loop: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.corrupt = 0
        self._path = path
        self._camera = camera
        self._decoder = decoder
        self._speed = speed
        self._loop = loop
        self._clock = clock
        self._own_pace = not fps
        self._pace = Pace(fps or 0.0, lockstep=fps == 0, clock=clock, sleep=sleep)
        self._count = 0
        self._damage = ""  # that the log has, in whatever round
        self._last: RecordedPicture | None = None
        self._pictures: Iterator[RecordedPicture] = self._play()
        # It is decoded when it is read: the size that its model needs is not known before.
        first = self._next()
        if first is None:
            raise SourceError(f"{path}: has no picture of camera {camera} that can be decoded")
        self._pictures = chain((first[0],), self._pictures)

    def read(self) -> Frame | None:
        following = self._next()
        if following is None:
            return None
        picture, (image, size) = following
        mono_ns = self._wait(picture)
        size = picture.size or size
        self._count += 1
        return Frame(
            self._count - 1,
            image,
            mono_ns,
            time.time_ns() - (self._clock() - mono_ns),
            clock="recording" if self._pace.lockstep else "arrival",
            picture_size=None if size == (image.width, image.height) else size,
            jpeg=picture.jpeg,
        )

    def close(self) -> None:
        self._pictures = iter(())

    def _next(self) -> tuple[RecordedPicture, tuple[Image, tuple[int, int] | None]] | None:
        """Return the next picture that can be decoded, and what `JpegDecoder` makes of it."""
        damage = ""
        for _ in range(MOST_DAMAGED):
            picture = next(self._pictures, None)
            if picture is None:
                return None
            try:
                return picture, self._decoder.decode(picture.jpeg)
            except ValueError as error:
                damage = str(error)
                self.corrupt += 1
        raise SourceError(
            f"{self._path}: {MOST_DAMAGED} pictures of camera {self._camera} one after another are "
            f"damaged ({damage}); play another recording",
            reason="corrupt",
        )

    def _wait(self, picture: RecordedPicture) -> int:
        """Block until `picture` is due; return the capture time of its frame."""
        before, self._last = self._last, picture
        if self._own_pace:
            gap_ns = 0 if before is None else _gap_ns(before, picture)
            return self._pace.wait(round(gap_ns / self._speed))
        self._pace.wait()
        return self._clock()

    def _play(self) -> Iterator[RecordedPicture]:
        while True:
            records = Records(self._path)
            count = 0
            try:
                for picture in pictures_of(records, self._camera):
                    count += 1
                    yield picture
            except OSError as error:
                raise SourceError(f"{self._path}: cannot be read: {error.strerror}") from error
            before, self._damage = self._damage, records.damage
            if self._damage not in ("", before):
                log.warning(
                    "recording %s: broke off after %d pictures of camera %s: %s",
                    self._path,
                    count,
                    self._camera,
                    self._damage,
                )
            if not self._loop or not count:
                return


def _gap_ns(before: RecordedPicture, picture: RecordedPicture) -> int:
    """Return the time between the captures; 0 where that is none of a drive."""
    if before.mono_ns is not None and picture.mono_ns is not None:
        gap_ns = picture.mono_ns - before.mono_ns
    else:
        gap_ns = picture.epoch_ns - before.epoch_ns
    return gap_ns if 0 < gap_ns < _LONGEST_GAP_S * 1e9 else 0
