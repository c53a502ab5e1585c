"""What OpenCV gets from the environment: quiet, over TCP, and with the user's own options."""

from __future__ import annotations

import os

import pytest

from edge_server.cameras.opencv_settings import settle_opencv

OPTIONS = "OPENCV_FFMPEG_CAPTURE_OPTIONS"


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ("", "rtsp_transport;tcp|fpsprobesize;0"),
        ("max_delay;500000", "rtsp_transport;tcp|fpsprobesize;0|max_delay;500000"),
        ("rtsp_transport;udp", "rtsp_transport;udp|fpsprobesize;0"),
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
