"""The choice of a reader, and what is said about it."""

from __future__ import annotations

import pytest

from edge_server.cameras import gstreamer, opencv_live
from edge_server.cameras.gstreamer import open_live, why_opencv
from edge_server.cameras.source_uri import NO_OPTIONS, SourceOptions, parse_source_uri
from edge_server.errors import SourceError, SourceUriError

RTSP = parse_source_uri("rtsp://cam/x")
MISSING = "PyGObject is missing: apt install python3-gi"


@pytest.fixture(params=["", MISSING])
def missing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(gstreamer, "gstreamer_missing", lambda _: request.param)
    return str(request.param)


def test_gstreamer_reads_where_it_is_there(missing: str) -> None:
    assert why_opencv(RTSP, "auto") == (f"as {missing}" if missing else "")
    assert why_opencv(RTSP, "opencv") == "as chosen"


def test_a_chosen_reader_is_never_replaced(missing: str) -> None:
    if missing:
        with pytest.raises(SourceError, match="GStreamer is the reader in its settings; PyGObject"):
            why_opencv(RTSP, "gstreamer")
    else:
        assert why_opencv(RTSP, "gstreamer") == ""


@pytest.mark.parametrize("element", ["nvv4l2decoder", "jpegdec"])
def test_jpegs_over_http_are_gstreamers_where_hardware_decodes_them(
    element: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gstreamer, "gstreamer_missing", lambda _: "")
    monkeypatch.setattr(gstreamer, "registry_has", lambda name: name == element)
    uri = parse_source_uri("http://cam/x")
    why = "as GStreamer here has no hardware that decodes JPEG"
    assert why_opencv(uri, "auto") == ("" if element.startswith("nv") else why)
    assert why_opencv(uri, "gstreamer") == ""


@pytest.mark.parametrize("text", ["csi://0", "gst:videotestsrc"])
def test_what_only_gstreamer_reads_names_the_packages(text: str, missing: str) -> None:
    uri = parse_source_uri(text)
    if missing:
        with pytest.raises(SourceError, match="apt install python3-gi") as caught:
            why_opencv(uri, "auto")
        assert caught.value.reason == "no_decoder"
        if text.startswith("csi"):
            assert "on a Jetson; elsewhere use /dev/video0" in str(caught.value)
    else:
        assert why_opencv(uri, "auto") == ""
    with pytest.raises(SourceUriError, match="OpenCV, the reader in its settings, cannot"):
        why_opencv(uri, "opencv")


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
