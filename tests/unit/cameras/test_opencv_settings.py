"""What OpenCV gets from the environment: quiet, over TCP, and with the user's own options."""

from __future__ import annotations

import os

import pytest

from edge_server.cameras import opencv_settings
from edge_server.cameras.opencv_settings import ffmpeg_options, no_camera_opens, settle_opencv

FORMATS = f"format_whitelist;{opencv_settings._CONTAINERS}|max_streams;8"
OPTIONS = "OPENCV_FFMPEG_CAPTURE_OPTIONS"


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ("", f"rtsp_transport;tcp|{FORMATS}"),
        ("max_delay;500000", f"rtsp_transport;tcp|{FORMATS}|max_delay;500000"),
        ("rtsp_transport;udp", f"rtsp_transport;udp|{FORMATS}"),
        ("format_whitelist;hls", "rtsp_transport;tcp|format_whitelist;hls|max_streams;8"),
    ],
)
def test_options_of_the_environment_are_kept(
    monkeypatch: pytest.MonkeyPatch, given: str, options: str
) -> None:
    monkeypatch.setenv(OPTIONS, given)
    monkeypatch.setenv("OPENCV_FFMPEG_LOGLEVEL", "48")
    for _ in range(2):
        settle_opencv()
        assert os.environ[OPTIONS] == options
        # FFmpeg's debug lines would quote passwords.
        assert os.environ["OPENCV_FFMPEG_LOGLEVEL"] == "-8"


def test_a_file_opens_without_the_options_of_cameras_but_waits_for_none_for_long() -> None:
    rates = "fpsprobesize;0"
    with ffmpeg_options({"probesize": "32"}, 0.0):
        assert os.environ[OPTIONS].endswith(f"|{rates}|probesize;32")
        with no_camera_opens(0.0):
            assert rates in os.environ[OPTIONS]
        assert rates in os.environ[OPTIONS]
    with no_camera_opens(0.0):
        assert rates not in os.environ[OPTIONS]
        with pytest.raises(TimeoutError), ffmpeg_options({}, 0.0):
            pass
    with ffmpeg_options({}, 0.0):
        assert rates in os.environ[OPTIONS]


def test_a_file_that_hangs_keeps_no_camera_from_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opencv_settings, "_OPTIONS_READ_S", 0.0)
    with no_camera_opens(0.0), ffmpeg_options({"probesize": "32"}, 2.0):
        assert os.environ[OPTIONS].endswith("|probesize;32")
    with ffmpeg_options({}, 0.0):
        pass
