"""Recordings as cameras: the same pictures, in their order, at the pace of their captures."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from mcap_drive import HEIGHT, PERIOD_NS, WIDTH, Drive, camera_jpeg

from edge_server.cameras.calibration import Calibration, calibration_id
from edge_server.cameras.frame import UsefulSize
from edge_server.cameras.jpeg import JpegDecoder
from edge_server.cameras.mcap_source import McapSource
from edge_server.cameras.source import SourceOptions, open_source, recorded_calibration
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
    drive = Drive(directory, **settings)  # type: ignore[arg-type]
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
        **options,  # type: ignore[arg-type]
    )


def test_a_replay_has_the_pictures_of_the_camera_in_their_order(tmp_path: Path) -> None:
    path = recording(tmp_path)
    frames = played(source_of(path, Clock()))
    assert [frame.id for frame in frames] == list(range(12))
    for number, frame in enumerate(frames):
        assert frame.jpeg == camera_jpeg(number)
        pixels, _ = JpegDecoder("camera").decode(camera_jpeg(number))  # type: ignore[misc]
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
    jpegs = [source.read().jpeg for _ in range(7)]  # type: ignore[union-attr]
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
