"""LaneVideo: a video is whole or an error, and a file of its name stays until there is one."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import cv2
import numpy as np
import pytest

from edge_server.cameras.frame import Frame
from edge_server.cameras.lane_video import LaneVideo, draw_lane_frame
from edge_server.errors import SourceError
from edge_server.lanes.types import Ego, LaneFrame, PictureMark
from edge_server.pixels import Image, PixelFormat

if TYPE_CHECKING:
    from pathlib import Path

WIDTH, HEIGHT = 64, 48
NOISE = np.random.default_rng(1).integers(0, 255, (HEIGHT, WIDTH, 3), np.uint8)

BGR = Image(PixelFormat.BGR, (NOISE,))


def write(path: Path, *at_s: float) -> LaneVideo:
    """A video of frames that are captured at these times; four wait at most."""
    video = LaneVideo(path)
    for number, second in enumerate(at_s):
        capture_ns = 1 + round(second * 1e9)
        lane_frame = LaneFrame("front", number, capture_ns, 0, 0, WIDTH, HEIGHT, "m")
        video(lane_frame, Frame(number, BGR, capture_ns, 0))
    video.close()
    return video


@pytest.mark.parametrize("name", ["drive.mp4", "drive.avi", "rtp:drive.mp4"])
def test_a_video_is_there_once_it_is_whole(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    video = write(path, 0.0, 0.1)
    assert (video.frames, video.missed) == (2, 0)
    assert cv2.VideoCapture(f"file:{path}").get(cv2.CAP_PROP_FRAME_COUNT) == 4
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_frames_that_stand_for_no_picture_do_not_count(tmp_path: Path) -> None:
    assert write(tmp_path / "drive.avi", 0.0, 0.001, 0.002, 0.1).frames == 2


def test_a_path_without_a_folder_may_have_a_colon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path.__class__("front:left.mp4")
    assert write(path, 0.0).frames == 1
    assert path.stat().st_size


@pytest.mark.parametrize("suffix", [".mp4", ".avi"])
def test_a_disk_that_is_full_is_an_error_and_leaves_what_was_there(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"drive{suffix}"
    path.write_text("of yesterday")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))
    try:
        with pytest.raises(SourceError, match=r"took 0 of \d+ pictures; free space"):
            write(path, 0.0, 1.0, 2.0, 3.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "of yesterday"
    assert list(tmp_path.iterdir()) == [path]


def test_no_frame_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "drive.mp4"
    path.write_text("of yesterday")
    with pytest.raises(SourceError, match="there was no frame"):
        write(path)
    assert path.read_text() == "of yesterday"


@pytest.mark.parametrize(
    ("curvature", "std", "shown"),
    [
        (1 / 300, 1 / 3000, "bend left 300 m"),
        (-1 / 300, 1 / 3000, "bend right 300 m"),
        (1 / 4570, 1 / 8000, "straight"),
        # On straight road, where the deviation is larger than the bend: neither is known.
        (-1 / 4570, 1 / 1500, ""),
        (1 / 3640, 1 / 1500, ""),
    ],
)
def test_a_bend_that_cannot_be_told_from_a_straight_road_has_no_radius(
    curvature: float, std: float, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    monkeypatch.setattr(
        "edge_server.cameras.lane_video.write", lambda _picture, text, *_: texts.append(text)
    )
    ego = Ego(0.1, curvature_1pm=curvature, curvature_std_1pm=std)
    frame = LaneFrame("front", 0, 0, 0, 0, 320, 240, "m", ego=ego, calibration_id="x")
    draw_lane_frame(np.zeros((240, 320, 3), np.uint8), frame)
    (measured,) = [text for text in texts if "offset" in text]
    assert measured.split("   ")[3:] == [shown] * bool(shown)


def test_what_cannot_be_drawn_is_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    video = LaneVideo(tmp_path / "drive.avi")
    video(None, Frame(0, Image(PixelFormat.BGR, (NOISE,)), 1, 0))
    with pytest.raises(SourceError, match=r"drive\.avi: not written: 'NoneType'"):
        video.close()
    assert "worker video: ended by an error" in caplog.text


@pytest.mark.parametrize("fps", [10.0, 29.97, 60.0])
def test_a_recording_in_lockstep_has_every_frame_in_its_video_at_its_own_rate(
    tmp_path: Path, fps: float
) -> None:
    video = LaneVideo(tmp_path / "drive.mp4")
    for number in range(40):  # ten times what may wait
        capture_ns = 1 + round(number * 1e9 / fps)
        lane_frame = LaneFrame("front", number, 0, capture_ns, 0, WIDTH, HEIGHT, "m")
        video(lane_frame, Frame(number, BGR, capture_ns, 0, clock="recording"))
    video.close()
    assert (video.frames, video.missed) == (40, 0)
    written = cv2.VideoCapture(str(tmp_path / "drive.mp4"))
    assert written.get(cv2.CAP_PROP_FRAME_COUNT) == 40
    assert written.get(cv2.CAP_PROP_FPS) == pytest.approx(fps, rel=1e-3)


def test_marks_of_networks_are_drawn_into_their_frames_and_those_of_the_next_half_second(
    tmp_path: Path,
) -> None:
    video = LaneVideo(tmp_path / "drive.avi")
    corners = np.array([[32.0, 4], [60, 4], [60, 40], [32, 40], [32, 4]])
    for number in range(4):
        at_ns = round(number * 4e8)
        if number == 1:
            video.mark("signs", at_ns, [PictureMark(corners, "", (255, 0, 0), filled=True)])
        lane_frame = LaneFrame("front", number, 0, at_ns, 0, WIDTH, HEIGHT, "m")
        grey = Image.of_bgr(np.full((HEIGHT, WIDTH, 3), 128, np.uint8))
        video(lane_frame, Frame(number, grey, at_ns, 0, clock="recording"))
    video.close()
    written = cv2.VideoCapture(str(tmp_path / "drive.avi"))
    pictures = [written.read()[1] for _ in range(4)]
    red = [int(each[30, 46, 2]) - int(each[30, 46, 0]) > 30 for each in pictures]
    assert red == [False, True, True, False]
    # The tint is within the mark alone.
    assert abs(int(pictures[1][30, 20, 2]) - 128) < 20
