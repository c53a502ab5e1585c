"""GStreamer's messages in words: cause, next step, reason."""

from __future__ import annotations

import pytest

from edge_server.cameras import gstreamer_player
from edge_server.cameras.gstreamer_player import BusMessage, check_messages, fault_of
from edge_server.cameras.live_source import StreamEnded
from edge_server.cameras.source_uri import SourceUri, parse_source_uri
from edge_server.errors import SourceError
from edge_server.process.text import remember_secret

FOUND = SourceError("the camera is off", reason="unavailable")
RTSP, HTTP, WEBCAM, CSI, OWN = map(
    parse_source_uri,
    ("rtsp://camera:554/live", "http://camera/mjpeg", "/dev/video0", "csi://0", "gst:x ! y"),
)
RESOURCE, STREAM, CORE = "resource", "stream", "core"


def error(domain: str, code: int, text: str = "It failed.", debug: str = "") -> BusMessage:
    return BusMessage("error", domain, code, text, debug)


@pytest.mark.parametrize(
    ("uri", "message", "reason", "words"),
    [
        (RTSP, error(RESOURCE, 15), "unauthorized", "user name or password refused"),
        (RTSP, error(RESOURCE, 3), "not_found", "no such stream; check the path"),
        (RTSP, error(STREAM, 6, "No H.266."), "no_decoder", "No H.266; apt install"),
        (RTSP, error(CORE, 12, "No plugin."), "no_decoder", "nvidia-l4t-gstreamer"),
        (RTSP, error(STREAM, 7), "corrupt", "cannot be decoded"),
        (HTTP, BusMessage("status", code=401), "unauthorized", "user name or password refused"),
        (HTTP, BusMessage("status", code=404), "not_found", "check the path"),
        (HTTP, BusMessage("status", code=503), "unavailable", "HTTP status 503"),
        (WEBCAM, error(RESOURCE, 4), "unavailable", "another program .* fuser -v /dev/video0"),
        (WEBCAM, error(RESOURCE, 13), "unavailable", "bandwidth"),
        (WEBCAM, error(RESOURCE, 1), "unavailable", "dmesg"),
        (CSI, error(RESOURCE, 1, "TIMEOUT"), "lost", "restart nvargus-daemon; .* reboot"),
        (OWN, error(CORE, 7), "unavailable", "raw video in system memory"),
        (OWN, error(STREAM, 1), "unavailable", "gst-launch-1.0"),
    ],
)
def test_each_fault_names_the_camera_its_cause_and_the_next_step(
    uri: SourceUri, message: BusMessage, reason: str, words: str
) -> None:
    found = fault_of(uri, message, running=False)
    assert found.reason == reason
    assert str(found).startswith(f"{uri.label}: ")
    with pytest.raises(type(found), match=words):
        raise found


def test_an_end_of_a_running_camera_is_a_loss() -> None:
    assert fault_of(RTSP, BusMessage("end"), running=True).reason == "lost"
    assert fault_of(RTSP, error(RESOURCE, 9), running=True).reason == "lost"
    assert fault_of(RTSP, BusMessage("silence"), running=True).reason == "stalled"
    unplugged = fault_of(WEBCAM, error(RESOURCE, 14), running=True)
    assert (unplugged.reason, "unplugged" in str(unplugged)) == ("lost", True)


def test_why_a_camera_does_not_respond_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gstreamer_player, "find_fault", lambda *_: FOUND)
    for code in (5, 7, 9):
        assert fault_of(RTSP, error(RESOURCE, code), running=False) is FOUND
    assert fault_of(HTTP, BusMessage("status", code=0), running=False) is FOUND


def test_a_password_in_gstreamers_text_is_masked() -> None:
    remember_secret("hunter2-of-a-pipeline")
    found = fault_of(OWN, error(STREAM, 1, "rtsp://u:hunter2-of-a-pipeline@camera"), running=False)
    assert "hunter2" not in str(found)


def test_the_status_of_http_goes_before_the_error_that_it_leads_to() -> None:
    failed = error(STREAM, 1, "Internal data stream error.")
    with pytest.raises(SourceError, match="check the path"):
        check_messages(HTTP, [failed, BusMessage("status", code=404)], live=True, running=False)
    fine = [BusMessage("status", code=200)]
    assert check_messages(HTTP, fine, live=True, running=False) == 0


def test_the_end_of_a_live_camera_is_a_loss_and_of_a_file_the_end() -> None:
    end = [BusMessage("end")]
    with pytest.raises(SourceError, match="closed the stream"):
        check_messages(RTSP, end, live=True, running=True)
    with pytest.raises(StreamEnded):
        check_messages(OWN, end, live=False, running=True)


def test_parts_that_cannot_be_decoded_are_counted() -> None:
    decode, other = (BusMessage("warning", STREAM, code) for code in (7, 1))
    assert check_messages(RTSP, [decode, other, decode], live=True, running=True) == 2
