"""The modes of a video device in the caps of v4l2src, and the best of them."""

from __future__ import annotations

from fractions import Fraction

import pytest

from edge_server.cameras.gstreamer_pipelines import VideoMode, best_mode, parse_modes
from edge_server.errors import SourceError

# As GStreamer 1.20 to 1.24 write it.
WEBCAM = (
    "video/x-raw, format=(string)YUY2, width=(int)1280, height=(int)720, "
    "pixel-aspect-ratio=(fraction)1/1, framerate=(fraction){ 10/1, 5/1 }; "
    "video/x-raw, format=(string)YUY2, width=(int)640, height=(int)480, "
    'colorimetry=(string){ bt601, "2:4:5:1" }, framerate=(fraction){ 30/1, 24/1 }; '
    "image/jpeg, width=(int)1920, height=(int)1080, parsed=(boolean)true, "
    "framerate=(fraction)30/1; "
    "image/jpeg, width=(int)3840, height=(int)2160, framerate=(fraction)30/1; "
    "video/x-h264, stream-format=(string)byte-stream, width=(int)1920, height=(int)1080"
)


def test_every_size_and_rate_of_the_formats_that_can_be_read_is_a_mode() -> None:
    modes = parse_modes(WEBCAM)
    assert len(modes) == 6
    assert VideoMode("YUY2", (640, 480), Fraction(24)) in modes
    assert VideoMode("JPEG", (3840, 2160), Fraction(30)) in modes


def test_the_largest_image_up_to_full_hd_that_is_quick_enough_is_the_best() -> None:
    assert str(best_mode(parse_modes(WEBCAM))) == "JPEG 1920 x 1080, 30 fps"


def test_raw_goes_before_jpeg_at_the_same_size_and_rate() -> None:
    both = [
        VideoMode("JPEG", (1280, 720), Fraction(30)),
        VideoMode("YUY2", (1280, 720), Fraction(30)),
    ]
    assert best_mode(both).format == "YUY2"


def test_a_device_that_is_only_slow_or_only_large_is_read_all_the_same() -> None:
    slow = [
        VideoMode("YUY2", (1280, 720), Fraction(10)),
        VideoMode("YUY2", (640, 480), Fraction(5)),
    ]
    assert best_mode(slow).size == (1280, 720)
    large = [
        VideoMode("JPEG", (3840, 2160), Fraction(30)),
        VideoMode("JPEG", (2592, 1944), Fraction(30)),
    ]
    assert best_mode(large).size == (2592, 1944)


def test_the_options_of_a_uri_are_obeyed_exactly() -> None:
    modes = parse_modes(WEBCAM)
    assert best_mode(modes, 1280, 720).fps == 10
    assert best_mode(modes, fps=Fraction(24)).size == (640, 480)
    assert best_mode(modes, name="YUY2").size == (640, 480)
    with pytest.raises(SourceError, match=r"no YUY2 1920 x 1080; it has: JPEG 1920 x 1080, 30"):
        best_mode(modes, 1920, 1080, name="YUY2")


def test_a_device_that_scales_by_itself_gets_a_usual_size() -> None:
    caps = (
        "video/x-raw, format=(string){ NV12, YUY2 }, width=(int)[ 16, 4096, 2 ], "
        "height=(int)[ 16, 2160, 2 ], framerate=(fraction)[ 1/1, 120/1 ]"
    )
    assert str(best_mode(parse_modes(caps))) == "NV12 1920 x 1080, 30 fps"


def test_the_caps_of_a_mode_are_those_of_gst_launch() -> None:
    mode = VideoMode("NV12", (640, 360), Fraction(30000, 1001))
    assert mode.caps == "video/x-raw,format=NV12,width=640,height=360,framerate=30000/1001"


def test_a_device_without_any_mode_says_so() -> None:
    with pytest.raises(SourceError, match="no mode; it has: no format that can be read"):
        best_mode(parse_modes("video/x-h264"))
