"""The body of an HTTP response: what is not part of a chunked one is never waited for."""

from __future__ import annotations

import itertools
import socket
import time
from email.message import Message

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.cameras import http_mjpeg
from edge_server.cameras.http_mjpeg import Chunks, _HttpStream, _redirected, open_stream
from edge_server.cameras.source_uri import parse_source_uri
from edge_server.errors import SourceError

URI = parse_source_uri("http://127.0.0.1:8081/stream")


@given(chunks=st.lists(st.binary(min_size=1, max_size=40)), cuts=st.lists(st.integers(0, 400)))
def test_chunks_come_apart_wherever_they_are_cut(chunks: list[bytes], cuts: list[int]) -> None:
    sent = b"".join(b"%X;x=1\r\n%s\r\n" % (len(each), each) for each in chunks) + b"0\r\n\r\n"
    at = [0, *sorted(min(cut, len(sent)) for cut in cuts), len(sent)]
    parser = Chunks()
    got = [parser.feed(sent[begin:end]) for begin, end in itertools.pairwise(at)]
    assert b"".join(got) == b"".join(chunks)
    assert parser.ended


@pytest.mark.parametrize("data", [b"-5\r\n", b"zz\r\n", b"123456789\r\n", bytes(5000)])
def test_what_has_no_length_is_no_chunk(data: bytes) -> None:
    with pytest.raises(ConnectionResetError):
        Chunks().feed(data)


def test_the_end_of_a_chunk_is_not_ready_to_be_received() -> None:
    ours, camera = socket.socketpair()
    with camera:
        camera.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nJPEG")
        stream = _HttpStream(ours, URI, "", time.monotonic() + 5.0)
        assert stream.receive(5.0) == b"JPEG"
        camera.sendall(b"\r\n")
        assert not stream.ready()
        with pytest.raises(TimeoutError):
            stream.receive(0.01)
        camera.sendall(b"3\r\nEND\r\n0\r\n\r\n")
        assert stream.ready()
        assert stream.receive(5.0) == b"END"
        assert stream.receive(5.0) == b""
        stream.close()


@pytest.mark.parametrize(
    "place",
    [
        "http://other/\x1b[2J",
        "file:///etc/passwd",
        "rtsp://other/stream",
        "http://user:word@other/",
        "/dev/video0",
        "gst:videotestsrc",
    ],
)
def test_a_redirect_leads_to_http_alone_and_brings_no_password(place: str) -> None:
    if place == "/dev/video0":  # a path of the camera
        assert _redirected(URI, URI, place, None)[0].target == place
        return
    with pytest.raises(SourceError, match="redirects to what is no"):
        _redirected(URI, URI, place, None)


class Redirect:
    """A stream whose camera sends its reader elsewhere."""

    def __init__(self, *_: object) -> None:
        self.response = self
        self.status = 302
        self.headers = Message()

    def getheader(self, name: str, default: str | None = None) -> str | None:
        return "http://inside:8000/" if name == "Location" else default

    def close(self) -> None:
        """Nothing is open."""


class Connection:
    def __init__(self, own: str, peer: str) -> None:
        self.own, self.peer = own, peer

    def getsockname(self) -> tuple[str, int]:
        return self.own, 40_000

    def getpeername(self) -> tuple[str, int]:
        return self.peer, 80

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize(
    ("own", "peer"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.9"),
        ("10.0.0.5", "10.0.0.5"),
        ("::1", "::1"),
    ],
)
def test_a_camera_cannot_send_its_reader_to_this_device(
    monkeypatch: pytest.MonkeyPatch, own: str, peer: str
) -> None:
    connections = [Connection("10.0.0.5", "10.0.0.9"), Connection(own, peer)]
    monkeypatch.setattr(http_mjpeg, "connect", lambda *_: connections.pop(0))
    monkeypatch.setattr(http_mjpeg, "_HttpStream", Redirect)
    with pytest.raises(SourceError, match="the camera redirects to this device itself"):
        open_stream(parse_source_uri("http://camera/x"), None, time.monotonic() + 5.0)
