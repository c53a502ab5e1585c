"""OpenCV's reader with a scripted capture and a clock of its own."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import cv2
import numpy as np
import pytest

from edge_server.cameras import opencv_live
from edge_server.cameras.gstreamer_pipelines import VideoMode
from edge_server.cameras.opencv_live import OpenCvSource, open_opencv, read_limit_ms
from edge_server.cameras.source_uri import NO_OPTIONS, parse_source_uri
from edge_server.cameras.v4l2 import VideoDevice
from edge_server.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

S = 1_000_000_000
MS = 1_000_000
PERIOD_MS = 40


class ScriptedCapture:
    """Each step is (ms that the grab takes, timestamp in ms or None for no frame, height)."""

    def __init__(self, steps: Iterable[tuple[int, float | None, int]]) -> None:
        self._steps = iter(steps)
        self.now_ns = 1000 * S
        self.released = 0
        self._stamp_ms = 0.0
        self._height = 0

    def grab(self) -> bool:
        takes_ms, stamp_ms, self._height = next(self._steps)
        self.now_ns += takes_ms * MS
        self._stamp_ms = stamp_ms or 0.0
        return stamp_ms is not None

    def retrieve(self) -> tuple[bool, NDArray[np.uint8]]:
        return self._height > 0, np.zeros((max(self._height, 1), 64, 3), np.uint8)

    def get(self, prop: int) -> float:
        assert prop == cv2.CAP_PROP_POS_MSEC
        return self._stamp_ms

    def release(self) -> None:
        self.released += 1


def source_of(
    capture: ScriptedCapture, clock: str = "rtp", gap_s: float = 0.5, first_frame_s: float = 0.0
) -> OpenCvSource:
    return OpenCvSource(
        capture,
        "rtsp://cam/x",
        clock,  # type: ignore[arg-type]  # a str in these tests
        gap_s=gap_s,
        first_frame_s=first_frame_s,
        late_ns=33 * MS,
        monotonic_ns=lambda: capture.now_ns,
        epoch_ns=lambda: capture.now_ns + 5 * S,
    )


def paced(first: int, count: int) -> list[tuple[int, float | None, int]]:
    return [(PERIOD_MS, PERIOD_MS * number, 48) for number in range(first, first + count)]


def test_what_was_sent_before_is_skipped() -> None:
    burst = [(1, PERIOD_MS * number, 48) for number in range(40)]
    capture = ScriptedCapture([*burst, *paced(40, 10)])
    source = source_of(capture)
    frame = source.read()
    assert frame is not None
    # 40 of the burst, two at the camera's pace, then the first that is given.
    assert frame.id == 0
    assert capture.get(cv2.CAP_PROP_POS_MSEC) == 42 * PERIOD_MS
    assert frame.capture_mono_ns == capture.now_ns
    assert frame.clock == "rtp"
    assert frame.capture_epoch_ns - frame.capture_mono_ns == 5 * S


def test_a_late_frame_is_as_old_as_its_timestamp_says() -> None:
    late = [(PERIOD_MS + 100, 6 * PERIOD_MS, 48), (1, 7 * PERIOD_MS, 48)]
    capture = ScriptedCapture([*paced(0, 6), *late])
    source = source_of(capture)
    for _ in range(3):
        source.read()
    frame = source.read()
    assert frame is not None
    assert capture.now_ns - frame.capture_mono_ns == 100 * MS
    frame = source.read()
    assert frame is not None
    assert capture.now_ns - frame.capture_mono_ns == 61 * MS


def test_a_camera_that_stalls_raises_even_if_ffmpeg_still_holds_a_frame() -> None:
    for stamp in (None, 9 * PERIOD_MS):
        source = source_of(ScriptedCapture([*paced(0, 4), (500, stamp, 48)]))
        source.read()
        with pytest.raises(SourceError, match=r"no frame for 0\.5 s; .* opened again$") as at:
            source.read()
        assert at.value.reason == "stalled"


def test_a_first_frame_may_wait_for_the_next_key_frame() -> None:
    waits = [(500, None, 0)] * 3
    source = source_of(ScriptedCapture([*waits, *paced(0, 9)]), first_frame_s=4.0)
    assert source.read() is not None
    late = ScriptedCapture([*waits, *waits, *waits])
    with pytest.raises(SourceError) as caught:
        source_of(late, first_frame_s=4.0)
    assert caught.value.reason == "stalled"
    assert late.now_ns < 1006 * S


def test_a_closed_stream_is_lost_and_one_bad_image_is_not() -> None:
    gone = (0, None, 0)
    capture = ScriptedCapture([*paced(0, 4), gone, *paced(5, 1), gone, gone, gone])
    source = source_of(capture)
    source.read()
    assert source.read() is not None
    assert source.corrupt == 1
    with pytest.raises(SourceError, match="closed the stream") as caught:
        source.read()
    assert caught.value.reason == "lost"


def test_images_that_cannot_be_decoded_raise_after_some() -> None:
    undecodable = [(PERIOD_MS, 200.0 + number, 0) for number in range(3)]
    source = source_of(ScriptedCapture([*paced(0, 4), *undecodable]))
    source.read()
    with pytest.raises(SourceError, match="cannot be decoded") as caught:
        source.read()
    assert caught.value.reason == "corrupt"


def test_a_changed_size_raises() -> None:
    source = source_of(ScriptedCapture([*paced(0, 4), (PERIOD_MS, 200.0, 96)]))
    source.read()
    with pytest.raises(SourceError, match="from 64 x 48 to 64 x 96") as caught:
        source.read()
    assert caught.value.reason == "changed"


def test_a_camera_without_a_first_frame_is_released() -> None:
    capture = ScriptedCapture([(0, None, 0)] * 3)
    with pytest.raises(SourceError):
        source_of(capture)
    assert capture.released == 1


def test_a_closed_source_reads_no_more() -> None:
    capture = ScriptedCapture(paced(0, 9))
    source = source_of(capture)
    source.close()
    source.close()
    assert capture.released == 1
    source.read()
    with pytest.raises(SourceError, match="closed"):
        source.read()


def test_a_device_stamps_its_frames_itself() -> None:
    begin_ms = 1000 * 1000
    steps = [(PERIOD_MS, begin_ms + PERIOD_MS * (number + 1) - 7, 48) for number in range(3)]
    capture = ScriptedCapture(steps)
    source = source_of(capture, "sensor", gap_s=1.0)
    frame = source.read()
    assert frame is not None
    assert (frame.clock, frame.uncertainty_ns) == ("sensor", 33 * MS)
    assert capture.now_ns - frame.capture_mono_ns == 7 * MS


def test_mjpeg_frames_have_the_time_of_their_arrival() -> None:
    capture = ScriptedCapture(paced(0, 3))
    frame = source_of(capture, "arrival").read()
    assert frame is not None
    assert (frame.clock, frame.capture_mono_ns) == ("arrival", capture.now_ns)


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
        opencv_live, "read_device", lambda path: VideoDevice(path, "Webcam", "uvcvideo", modes, ())
    )
    monkeypatch.setattr(opencv_live, "check_free", busy)
    caplog.set_level("INFO")
    for _ in range(3):
        with pytest.raises(SourceError, match="another program"):
            open_opencv(parse_source_uri("v4l2:///dev/video77"), NO_OPTIONS)
    (line,) = caplog.messages
    assert line.startswith("v4l2:///dev/video77: Webcam takes ")
