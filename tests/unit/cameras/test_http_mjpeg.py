"""JPEGs over HTTP: the newest of those that have come, and redirects that lead nowhere else."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import cv2
import numpy as np
import pytest

from edge_server.cameras import http_mjpeg
from edge_server.cameras.http_mjpeg import (
    MjpegStream,
    MultipartParser,
    Wire,
    _get,
    _redirected,
    open_response,
)
from edge_server.cameras.jpeg import JpegDecoder
from edge_server.cameras.network import SilentError
from edge_server.cameras.source_uri import parse_source_uri
from edge_server.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.certificates import Authority

URI = parse_source_uri("http://127.0.0.1:8081/stream")
WAIT_S = 30.0


def part(width: int, height: int = 480) -> bytes:
    """A picture of noise, so that it has some kilobytes."""
    pixels = np.random.default_rng(1).integers(0, 255, (height, width, 3), np.uint8)
    jpeg = cv2.imencode(".jpg", pixels)[1].tobytes()
    return b"--b\r\nContent-Length: %d\r\n\r\n%s\r\n" % (len(jpeg), jpeg)


class Camera:
    """Sends what the test says, in chunks or plainly."""

    def __init__(self, chunked: bool, authority: Authority | None = None) -> None:
        ours, self._socket = socket.socketpair()
        self._chunked = chunked
        if authority is not None:
            ours, self._socket = _encrypted(ours, self._socket, authority)
        coding = b"Transfer-Encoding: chunked\r\n" if chunked else b""
        self._socket.sendall(b"HTTP/1.1 200 OK\r\n%s\r\n" % coding)
        wire = Wire(ours, time.monotonic() + WAIT_S)
        response = http.client.HTTPResponse(wire, method="GET")
        response.begin()
        parser, decoder = MultipartParser(b"b"), JpegDecoder("cam")
        self.stream = MjpegStream(response, wire, parser, decoder)

    def send(self, data: bytes) -> None:
        self._socket.sendall(b"%X\r\n%s\r\n" % (len(data), data) if self._chunked else data)

    def close(self) -> None:
        self._socket.close()

    def width(self) -> int:
        assert self.stream.grab(WAIT_S)
        return self.stream.retrieve().image.width


def _encrypted(
    ours: socket.socket, theirs: socket.socket, authority: Authority
) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*authority.issue("camera"))
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(server.wrap_socket, theirs, server_side=True)
        return client.wrap_socket(ours), accepted.result(WAIT_S)


@pytest.fixture(params=[False, True], ids=["plain", "chunked"])
def camera(request: pytest.FixtureRequest) -> Iterator[Camera]:
    made = Camera(request.param)
    yield made
    made.stream.close()
    made.close()


def test_of_images_that_wait_only_the_newest_is_given(camera: Camera) -> None:
    camera.send(part(10))
    assert camera.width() == 10
    for width in (30, 40, 50):
        camera.send(part(width))
    assert camera.width() == 50


def test_an_image_that_waits_in_the_layer_of_tls_is_not_left_there(authority: Authority) -> None:
    """One record of TLS brings both images, and http.client reads the first part of it."""
    camera = Camera(chunked=True, authority=authority)
    camera.send(part(10))
    assert camera.width() == 10
    camera.send(part(11, height=240) + part(12))
    assert camera.width() == 12
    camera.stream.close()
    camera.close()


def test_a_head_that_comes_byte_by_byte_takes_no_longer_than_any_other() -> None:
    ours, camera = socket.socketpair()
    over = threading.Event()

    def send() -> None:
        camera.sendall(b"HTTP/1.1 200 ")
        while not over.wait(0.002):
            camera.sendall(b"x")

    with ours, camera, ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send)
        try:
            with pytest.raises(SilentError):
                _get(Wire(ours, time.monotonic() + 0.1), URI, "")
        finally:
            over.set()
        assert sent.exception(WAIT_S) is None or isinstance(sent.exception(), BrokenPipeError)


def test_a_chunk_that_comes_byte_by_byte_ends_the_wait_in_time() -> None:
    camera = Camera(chunked=True)
    over = threading.Event()

    def send() -> None:
        while not over.wait(0.002):
            camera._socket.sendall(b"0")

    with ThreadPoolExecutor(1) as pool:
        pool.submit(send)
        try:
            assert not camera.stream.grab(0.1)
        finally:
            over.set()
    with pytest.raises(SourceError, match="a part of what came before is lost"):
        camera.stream.grab(0.1)
    camera.stream.close()
    camera.close()


class EndlessSocket:
    """Always has something to read: `begin`, and then `more` again and again."""

    def __init__(self, begin: bytes, more: bytes) -> None:
        self.reads = 0
        self._begin, self._more = begin, more

    def settimeout(self, _seconds: float) -> None:
        pass

    def recv_into(self, buffer: memoryview) -> int:
        self.reads += 1
        assert self.reads < 10
        begin, self._begin = self._begin, b""
        data = begin + self._more * ((len(buffer) - len(begin)) // len(self._more))
        buffer[: len(data)] = data
        return len(data)


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"trailer: x\r\n"),
    ],
    ids=["heads", "trailers"],
)
def test_what_never_ends_is_read_no_longer_than_it_may(begin: bytes, more: bytes) -> None:
    endless = EndlessSocket(begin, more)
    wire = Wire(endless, time.monotonic())
    response = http.client.HTTPResponse(wire, method="GET")

    def read() -> None:
        response.begin()
        response.read1()

    with pytest.raises(TimeoutError):
        read()
    assert endless.reads == 1


def test_an_image_that_has_come_is_not_kept_until_the_next_one_has(camera: Camera) -> None:
    camera.send(part(10) + part(20)[:100])
    began = time.monotonic()
    assert camera.width() == 10
    assert time.monotonic() - began < WAIT_S / 2
    assert not camera.stream.grab(0.01)


def test_a_closed_stream_is_lost(camera: Camera) -> None:
    camera.send(part(10))
    assert camera.width() == 10
    camera.close()
    with pytest.raises(SourceError) as caught:
        camera.stream.grab(WAIT_S)
    assert caught.value.reason == "lost"


def test_what_is_no_chunk_breaks_the_connection() -> None:
    camera = Camera(chunked=True)
    camera._socket.sendall(b"zz\r\n")
    with pytest.raises(SourceError, match="the connection broke") as caught:
        camera.stream.grab(WAIT_S)
    assert caught.value.reason == "lost"
    camera.stream.close()
    camera.close()


@pytest.mark.parametrize(
    ("uri", "target", "host"),
    [
        ("http://[fe80::abcd]/x", b"/x", b"[fe80::abcd]:80"),
        ("http://camera:8080/käm era?a=1%202", b"/k%C3%A4m%20era?a=1%202", b"camera:8080"),
        ("http://камера/", b"/", "камера:80".encode()),
    ],
)
def test_any_address_makes_a_request(uri: str, target: bytes, host: bytes) -> None:
    ours, camera = socket.socketpair()
    with ours, camera:
        camera.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
        wire = Wire(ours, time.monotonic() + WAIT_S)
        response = _get(wire, parse_source_uri(uri), "Basic é")
        assert response.status == 204
        request = camera.recv(4096).split(b"\r\n")
    assert request[0] == b"GET %s HTTP/1.1" % target
    assert b"Host: " + host in request
    assert "Authorization: Basic é".encode() in request


@pytest.mark.parametrize(
    "place",
    [
        "http://other/\x1b[2J",
        "file:///etc/passwd",
        "rtsp://other/stream",
        "http://user:word@other/",
        "gst:videotestsrc",
    ],
)
def test_a_redirect_leads_to_http_alone_and_brings_no_password(place: str) -> None:
    with pytest.raises(SourceError, match="redirects to an address that is not"):
        _redirected(URI, URI, place, None)


def test_a_redirect_to_a_path_stays_at_the_camera() -> None:
    assert _redirected(URI, URI, "/dev/video0", None)[0].target == "/dev/video0"


class Connection:
    """A connection whose other end redirects every request."""

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
    ours, camera = socket.socketpair()
    with ours, camera:
        camera.sendall(b"HTTP/1.1 302 Found\r\nLocation: http://inside:8000/\r\n\r\n")
        redirect = http.client.HTTPResponse(ours)
        redirect.begin()
        connections = [Connection("10.0.0.5", "10.0.0.9"), Connection(own, peer)]
        monkeypatch.setattr(http_mjpeg, "connect", lambda *_: connections.pop(0))
        monkeypatch.setattr(http_mjpeg, "_get", lambda *_: redirect)
        with pytest.raises(SourceError, match="the camera redirects to this device itself"):
            open_response(parse_source_uri("http://camera/x"), None, time.monotonic() + 5.0)
