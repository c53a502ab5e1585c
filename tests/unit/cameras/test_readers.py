"""The choice of a reader, and what is said about it."""

from __future__ import annotations

import pytest

from edge_server.cameras import gstreamer, opencv_live
from edge_server.cameras.gstreamer import choose_reader, open_live
from edge_server.cameras.source_uri import NO_OPTIONS, SourceOptions, parse_source_uri
from edge_server.errors import SourceError, SourceUriError

RTSP = parse_source_uri("rtsp://cam/x")
MISSING = "PyGObject is missing: apt install python3-gi"


def test_gstreamer_reads_where_it_is_there() -> None:
    assert choose_reader(RTSP, "auto", "") == "gstreamer"
    assert choose_reader(RTSP, "auto", MISSING) == "opencv"
    assert choose_reader(RTSP, "opencv", "") == "opencv"


def test_a_chosen_reader_is_never_replaced() -> None:
    with pytest.raises(SourceError, match="GStreamer is the reader in its settings; PyGObject"):
        choose_reader(RTSP, "gstreamer", MISSING)


@pytest.mark.parametrize("text", ["csi://0", "gst:videotestsrc"])
def test_what_only_gstreamer_reads_names_the_packages(text: str) -> None:
    uri = parse_source_uri(text)
    assert choose_reader(uri, "auto", "") == "gstreamer"
    with pytest.raises(SourceError, match="apt install python3-gi") as caught:
        choose_reader(uri, "auto", MISSING)
    assert caught.value.reason == "no_decoder"
    with pytest.raises(SourceUriError, match="OpenCV, the reader in its settings, cannot"):
        choose_reader(uri, "opencv", "")


def test_a_csi_camera_without_gstreamer_names_what_a_laptop_can_use() -> None:
    with pytest.raises(SourceError, match=r"on a Jetson; elsewhere use /dev/video0"):
        choose_reader(parse_source_uri("csi://0"), "auto", MISSING)


def test_who_reads_and_what_is_lost_by_it_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gstreamer, "gstreamer_missing", lambda _: MISSING)
    monkeypatch.setattr(opencv_live, "open_opencv", lambda *_: None)
    monkeypatch.setattr(gstreamer, "open_gstreamer", lambda *_: None)
    uri = parse_source_uri("rtsp://eve:q8Zr@once/x")
    caplog.set_level("INFO")
    for _ in range(2):
        open_live(uri, NO_OPTIONS)
    (line,) = caplog.messages
    assert line.startswith("camera source rtsp://once/x: read by OpenCV, as PyGObject is missing: ")
    assert "without: decoding in hardware" in line
    monkeypatch.setattr(gstreamer, "gstreamer_missing", lambda _: "")
    open_live(uri, NO_OPTIONS)
    open_live(uri, SourceOptions(reader="opencv"))
    assert caplog.messages[1] == "camera source rtsp://once/x: read by GStreamer"
    assert "read by OpenCV, as chosen; without: " in caplog.messages[2]
