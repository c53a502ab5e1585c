"""Recordings as cameras: the same pictures, in their order, at the pace of their captures."""

from __future__ import annotations

import logging
import math
import os
import struct
import sys
from typing import TYPE_CHECKING

import lz4.frame
import numpy as np
import pytest
import zstandard
from foxglove_schemas_protobuf.CompressedImage_pb2 import CompressedImage
from mcap.writer import Writer
from support.mcap_drive import HEIGHT, PERIOD_NS, WIDTH, Drive, camera_jpeg

from edge_server.cameras.calibration import Calibration, calibration_id
from edge_server.cameras.frame import UsefulSize
from edge_server.cameras.jpeg import JpegDecoder
from edge_server.cameras.mcap_file import MOST_DAMAGED, McapSource, Records, cameras_in, size_of
from edge_server.cameras.source import open_source, recorded_calibration
from edge_server.cameras.source_uri import SourceOptions
from edge_server.errors import SourceError, SourceUriError
from edge_server.lanes.camera_model import CameraModel, Lens, Mounting

if TYPE_CHECKING:
    from pathlib import Path

    from edge_server.cameras.frame import Frame

LENS = Lens("pinhole", WIDTH, HEIGHT, 288.1, 287.3, 161.2, 95.7, (-0.24, 0.0, 0.1, 0.0, 0.0))
MODEL = CameraModel(LENS, Mounting(1.35, math.radians(1.2), 0.0, math.radians(-0.4), -1.6, 0.0))
CALIBRATION = Calibration(calibration_id(MODEL), MODEL, 0.31)


class Clock:
    """Nanoseconds that only a sleep moves."""

    def __init__(self) -> None:
        self.now_ns = 5_000_000_000
        self.slept: list[float] = []

    def __call__(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_ns += math.ceil(seconds * 1e9)


def recording(directory: Path, count: int = 12, **settings: object) -> Path:
    drive = Drive(directory, **settings)
    drive.frames(count, jpeg=True)
    drive.stop()
    (path,) = drive.files()
    return path


def played(source: McapSource) -> list[Frame]:
    frames = []
    while (frame := source.read()) is not None:
        frames.append(frame)
    return frames


def source_of(path: Path, clock: Clock, **options: object) -> McapSource:
    return McapSource(
        path,
        "front",
        JpegDecoder("test"),
        clock=clock,
        sleep=clock.sleep,
        **options,
    )


def test_a_replay_has_the_pictures_of_the_camera_in_their_order(tmp_path: Path) -> None:
    path = recording(tmp_path)
    frames = played(source_of(path, Clock()))
    assert [frame.id for frame in frames] == list(range(12))
    for number, frame in enumerate(frames):
        assert frame.jpeg == camera_jpeg(number)
        pixels = JpegDecoder("camera").decode(camera_jpeg(number))[0].planes[0]
        np.testing.assert_array_equal(frame.image.planes[0], pixels)
        assert frame.size == (WIDTH, HEIGHT)


@pytest.mark.parametrize("speed", [1.0, 4.0])
def test_capture_times_move_as_they_did_on_the_road(tmp_path: Path, speed: float) -> None:
    path = recording(tmp_path)
    clock = Clock()
    began_ns = clock.now_ns
    frames = played(source_of(path, clock, speed=speed))
    moments = [frame.capture_mono_ns - began_ns for frame in frames]
    assert moments == [number * round(PERIOD_NS / speed) for number in range(12)]
    assert len(clock.slept) == 11


def test_a_rate_replaces_the_pace(tmp_path: Path) -> None:
    path = recording(tmp_path)
    clock = Clock()
    played(source_of(path, clock, fps=0.0))
    assert not clock.slept


def test_a_late_replay_goes_on_from_its_present_picture(tmp_path: Path) -> None:
    path = recording(tmp_path)
    clock = Clock()
    source = source_of(path, clock)
    source.read()
    clock.now_ns += 2_000_000_000
    late = source.read()
    after = source.read()
    assert late is not None
    assert after is not None
    assert after.capture_mono_ns - late.capture_mono_ns == PERIOD_NS
    assert late.capture_mono_ns >= 7_000_000_000


def test_it_plays_again_from_the_start(tmp_path: Path) -> None:
    path = recording(tmp_path, count=3)
    source = source_of(path, Clock(), loop=True)
    jpegs = [source.read().jpeg for _ in range(7)]
    assert jpegs == [camera_jpeg(number % 3) for number in range(7)]


def test_a_picture_that_was_made_smaller_keeps_the_coordinates_of_the_camera(
    tmp_path: Path,
) -> None:
    path = recording(tmp_path, width=160)
    frame = source_of(path, Clock()).read()
    assert frame is not None
    assert (frame.image.width, frame.image.height) == (160, 96)
    assert frame.size == (WIDTH, HEIGHT)


def test_no_picture_is_decoded_larger_than_its_model_needs(tmp_path: Path) -> None:
    path = recording(tmp_path)
    useful = UsefulSize()
    source = open_source(f"mcap://{path}?fps=0", options=SourceOptions(useful=useful))
    useful.size = (WIDTH // 2, HEIGHT // 2)  # known after the source is open
    frame = source.read()
    assert frame is not None
    assert (frame.image.width, frame.size) == (WIDTH // 2, (WIDTH, HEIGHT))


def test_a_file_that_breaks_off_ends_there_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = recording(tmp_path, count=40)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with caplog.at_level(logging.WARNING):
        frames = played(source_of(path, Clock()))
    assert 5 < len(frames) < 25
    (record,) = caplog.records
    assert f"broke off after {len(frames)} pictures of camera front" in record.message


def test_the_log_has_the_damage_once_however_often_a_recording_plays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = recording(tmp_path, count=40)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    source = source_of(path, Clock(), fps=0, loop=True)
    assert all(source.read() for _ in range(100))
    assert len(caplog.records) == 1


def test_the_calibration_comes_with_the_recording_bit_for_bit(tmp_path: Path) -> None:
    path = recording(tmp_path, count=40, calibration=CALIBRATION)
    assert recorded_calibration(f"mcap://{path}") == CALIBRATION
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 4 // 5])
    assert recorded_calibration(f"mcap://{path}") == CALIBRATION
    assert recorded_calibration("file:///clip.mp4") is None


def test_of_several_cameras_one_must_be_named(tmp_path: Path) -> None:
    drive = Drive(tmp_path)
    drive.frames(4, jpeg=True)
    drive.frames(4, jpeg=True, camera="rear")
    drive.stop()
    (path,) = drive.files()
    with pytest.raises(SourceError, match=r"several cameras; write \?camera= and one of front, r"):
        open_source(f"mcap://{path}")
    with pytest.raises(SourceError, match="has no camera 'left'"):
        open_source(f"mcap://{path}?camera=left")
    frame = open_source(f"mcap://{path}?camera=rear&fps=0").read()
    assert frame is not None
    assert frame.jpeg == camera_jpeg(4)


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("mcap://drive.mcap", "wants an absolute path"),
        ("mcap:///drive.mcap?speed=0", "speed is '0'; write 0.1 to 10"),
        ("mcap:///drive.mcap?sped=1", "did you mean 'speed'"),
        ("mcap:///drive.mcap?fps=x", "fps is 'x'"),
    ],
)
def test_a_wrong_uri_is_explained(uri: str, says: str) -> None:
    with pytest.raises(SourceUriError, match=says.replace("?", r"\?")):
        open_source(uri)


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="No such file"):
        open_source(f"mcap://{tmp_path}/absent.mcap")
    empty, text = tmp_path / "empty", tmp_path / "text"
    empty.write_bytes(b"")
    text.write_text("no recording at all, and longer than its magic number")
    for path in (empty, text):
        with pytest.raises(SourceError, match="has no pictures of a camera"):
            open_source(f"mcap://{path}")


def _record(opcode: int, content: bytes, length: int | None = None) -> bytes:
    return struct.pack("<BQ", opcode, len(content) if length is None else length) + content


def _chunk(compression: bytes, data: bytes, unpacked_bytes: int) -> bytes:
    head = struct.pack("<QQQII", 0, 0, unpacked_bytes, 0, len(compression)) + compression
    return _record(6, head + struct.pack("<Q", len(data)) + data)


_ZEROS = bytes(65 << 20)
_HOSTILE = {
    "zstd": _chunk(b"zstd", b"no frame of zstd", 100),
    "lz4": _chunk(b"lz4", b"no frame of lz4 at all", 100),
    "zstd of a false size": _chunk(
        b"zstd", zstandard.ZstdCompressor(write_content_size=False).compress(b"a"), 2**62
    ),
    "large zstd": _chunk(b"zstd", zstandard.compress(_ZEROS), 100),
    "large lz4": _chunk(b"lz4", lz4.frame.compress(_ZEROS), 100),
    "a chunk longer than its record": _record(
        6, struct.pack("<QQQIIQ", 0, 0, 0, 0, 0, 2**62) + bytes(100)
    ),
    "a name longer than its record": _record(4, struct.pack("<HHI", 1, 0, 2**32 - 1) + b"name"),
    "a message shorter than its header": _record(5, b"12") + bytes(100),
}


@pytest.mark.parametrize("what", _HOSTILE)
def test_damage_of_any_kind_ends_a_recording_and_asks_for_no_memory(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = recording(tmp_path, count=40)
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(_record(15, b"", 4))] + _HOSTILE[what])
    source = open_source(f"mcap://{path}?fps=0")
    assert len(played(source)) == 40
    assert "broke off after 40 pictures" in caplog.text


def _text(content: bytes) -> bytes:
    return struct.pack("<I", len(content)) + content


_LONG = bytes(30 << 20)
_KEPT = {
    "channels": lambda number: _record(
        4,
        struct.pack("<HH", number, 0)
        + _text(b"/front/image")
        + _text(b"protobuf")
        + _text(_text(b"calibration") + _text(_LONG)),
    ),
    "schemas": lambda number: _record(
        3, struct.pack("<H", number) + _text(b"name") + _text(b"encoding") + _text(_LONG)
    ),
    "metadata": lambda number: _record(
        12, _text(b"%d" % number) + _text(_text(b"key") + _text(_LONG))
    ),
}


@pytest.mark.parametrize("of", _KEPT)
def test_a_small_file_does_not_unpack_to_gigabytes_that_are_kept(tmp_path: Path, of: str) -> None:
    path = tmp_path / "bomb.mcap"
    with path.open("wb") as file:
        file.write(b"\x89MCAP0\r\n" + _record(1, bytes(8)))
        for number in range(1, 6):
            record = _KEPT[of](number)
            if of == "metadata":  # which no chunk has
                file.write(record)
            else:
                file.write(_chunk(b"zstd", zstandard.compress(record), len(record)))
    records = Records(path)
    assert not list(records)
    assert "channels, schemas and metadata of more than 64 MiB" in records.damage
    assert len(records.metadata) <= 2


def test_a_summary_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "bomb.mcap"
    begin = b"\x89MCAP0\r\n" + _record(1, bytes(8)) + _record(15, bytes(4))
    with path.open("wb") as file:
        file.write(begin)
        for number in range(1, 6):
            file.write(_KEPT["channels"](number))
        file.write(_record(2, struct.pack("<QQI", len(begin), 0, 0)) + b"\x89MCAP0\r\n")
    with pytest.raises(SourceError, match="more than 64 MiB"):
        cameras_in(path)


@pytest.mark.parametrize("size", ["0", "-320", "9" * 30, "9" * 400])
def test_a_size_that_no_camera_has_is_not_believed(tmp_path: Path, size: str) -> None:
    path = recording(tmp_path)
    channel = next(each.channel for each in Records(path) if each.channel.topic == "/front/image")
    assert size_of(channel) == (WIDTH, HEIGHT)
    channel.metadata["width"] = size
    assert size_of(channel) is None


def test_a_pipe_is_no_recording_and_nobody_waits_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.mcap")
    with pytest.raises(SourceError, match="is no regular file"):
        recorded_calibration(f"mcap://{tmp_path}/pipe.mcap")


@pytest.mark.parametrize("library", ["zstd", "lz4"])
def test_without_a_library_for_a_compression_all_else_is_read(
    tmp_path: Path,
    library: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("zstandard", "lz4", "lz4.frame"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(f"mcap.stream_reader.{library.replace('zstd', 'zstandard')}", None)
    path = recording(tmp_path, count=40)
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(_record(15, b"", 4))] + _HOSTILE[library])
    assert len(played(open_source(f"mcap://{path}?fps=0"))) == 40
    assert "UnsupportedCompressionError" in caplog.text


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("message", [b"", b"\xff"])
def test_damaged_pictures_alone_end_a_replay_after_as_many_as_of_a_camera(
    tmp_path: Path, message: bytes, looped: bool
) -> None:
    path = tmp_path / "damaged.mcap"
    with path.open("wb") as file:
        writer = Writer(file)
        writer.start()
        channel = writer.register_channel("/front/image", "protobuf", 0)
        for number in range(3 * MOST_DAMAGED):
            if number == MOST_DAMAGED - 1:
                image = CompressedImage(data=camera_jpeg(0)).SerializeToString()
                writer.add_message(channel, number, image, number)
            writer.add_message(channel, number, message, number)
        writer.finish()
    source = source_of(path, Clock(), loop=looped)
    assert source.read() is not None
    with pytest.raises(SourceError, match="10 pictures of camera front") as raised:
        source.read()
    assert raised.value.reason == "corrupt"
    assert source.corrupt == 2 * MOST_DAMAGED - 1
