"""OpenCV's reader with a scripted capture and a clock of its own."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import cv2
import numpy as np
import pytest

from edge_server.cameras import opencv_live, v4l2
from edge_server.cameras.jpeg import JpegDecoder
from edge_server.cameras.opencv_live import OpenCvStream, open_opencv, read_limit_ms
from edge_server.cameras.source_uri import NO_OPTIONS, parse_source_uri
from edge_server.cameras.v4l2 import VideoDevice, VideoMode
from edge_server.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

PERIOD_MS = 40


class ScriptedCapture:
    """Each step is (ms that the grab takes, timestamp in ms or None for no frame)."""

    def __init__(self, steps: Iterable[tuple[int, float | None]]) -> None:
        self._steps = iter(steps)
        self.now = 1000.0
        self.stamp_ms = 0.0
        self.gives: NDArray[np.uint8] | None = np.zeros((48, 64, 3), np.uint8)

    def grab(self) -> bool:
        takes_ms, stamp_ms = next(self._steps)
        self.now += takes_ms / 1e3
        self.stamp_ms = stamp_ms or 0.0
        return stamp_ms is not None

    def retrieve(self) -> tuple[bool, NDArray[np.uint8]]:
        return self.gives is not None, self.gives

    def get(self, prop: int) -> float:
        assert prop == cv2.CAP_PROP_POS_MSEC
        return self.stamp_ms

    def release(self) -> None:
        """Nothing is open."""


def stream_of(capture: ScriptedCapture, jpeg: JpegDecoder | None = None) -> OpenCvStream:
    return OpenCvStream(capture, 0.5, jpeg=jpeg, clock=lambda: capture.now)


def test_what_was_sent_before_is_skipped() -> None:
    burst = [(1, PERIOD_MS * number) for number in range(40)]
    capture = ScriptedCapture([*burst, *[(PERIOD_MS, PERIOD_MS * each) for each in range(40, 50)]])
    stream_of(capture).skip_backlog()
    # 40 of the burst, and two at the camera's pace.
    assert capture.stamp_ms == 41 * PERIOD_MS


def test_a_burst_without_end_is_skipped_for_three_seconds() -> None:
    capture = ScriptedCapture((10, 40.0 * number) for number in range(10_000))
    stream_of(capture).skip_backlog()
    assert capture.now == pytest.approx(1003.0, abs=0.02)


def test_a_timeout_is_no_frame_and_a_closed_stream_is_lost() -> None:
    stream = stream_of(ScriptedCapture([(500, None), (0, None), (40, 80.0), *[(0, None)] * 3]))
    assert [stream.grab(1.0), stream.grab(1.0)] == [False, True]
    assert stream.damaged == 1
    with pytest.raises(SourceError, match="closed the stream") as caught:
        stream.grab(1.0)
    assert caught.value.reason == "lost"


def test_pixels_or_jpegs_are_retrieved_and_what_is_damaged_says_so() -> None:
    capture = ScriptedCapture([(0, 7.0)])
    stream = stream_of(capture)
    assert stream.grab(1.0)
    assert stream.retrieve().stamp_ns == 7_000_000
    jpeg = cv2.imencode(".jpg", capture.gives)[1].reshape(1, -1)
    for gives, word in ((None, "cannot be decoded"), (jpeg[:, :-9], "its end is missing")):
        capture.gives = gives
        with pytest.raises(ValueError, match=word):
            stream_of(capture, JpegDecoder("rtsp://cam/x")).retrieve()
    capture.gives = jpeg
    picture = stream_of(capture, JpegDecoder("rtsp://cam/x")).retrieve()
    assert (picture.image.width, picture.jpeg) == (64, jpeg.tobytes())


@pytest.mark.parametrize(
    ("fps", "limit_ms"),
    [(25.0, 500), (6.0, 500), (2.0, 1500), (1.0, 1800), (1e-4, 1800), (1e-300, 1800)]
    + [(each, 500) for each in (0.0, -5.0, float("nan"), float("inf"))],
)
def test_a_rate_that_a_camera_states_never_holds_its_reader(fps: float, limit_ms: int) -> None:
    assert read_limit_ms(fps) == limit_ms


def test_the_mode_of_a_device_that_another_program_holds_for_days_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(path: str, _mode: VideoMode) -> None:
        raise SourceError(f"{path}: another program holds the camera")

    modes = (VideoMode("YUY2", (640, 480), Fraction(30)),)
    monkeypatch.setattr(
        v4l2, "read_device", lambda path: VideoDevice(path, "Webcam", "uvcvideo", modes, ())
    )
    monkeypatch.setattr(opencv_live, "check_free", busy)
    caplog.set_level("INFO")
    for _ in range(3):
        with pytest.raises(SourceError, match="another program"):
            open_opencv(parse_source_uri("v4l2:///dev/video77"), NO_OPTIONS)
    (line,) = caplog.messages
    assert line.startswith("v4l2:///dev/video77: Webcam takes ")
