"""The cameras that other tests rely on do what they claim, seen by OpenCV's own FFmpeg."""

from __future__ import annotations

import os
import socket
import time
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING

import cv2
import numpy as np
import pytest
from support.live_cameras.time_code import read_time, write_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from http.client import HTTPResponse

    from support.live_cameras.rtsp import RtspCamera
    from support.live_cameras.started import LiveCameras

PATIENCE_S = 30.0
READ_MS = 5000
RIGHT, WRONG = "correct", "wrong"


@contextmanager
def capture(uri: str, transport: str = "tcp") -> Iterator[cv2.VideoCapture]:
    """An open reader; FFmpeg is quiet."""
    before = dict(os.environ)
    os.environ["OPENCV_FFMPEG_CAPTURE_OPTIONS"] = f"rtsp_transport;{transport}"
    os.environ["OPENCV_FFMPEG_LOGLEVEL"] = "-8"
    limits = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, READ_MS, cv2.CAP_PROP_READ_TIMEOUT_MSEC, READ_MS]
    made = cv2.VideoCapture(uri, cv2.CAP_FFMPEG, [*limits, cv2.CAP_PROP_N_THREADS, 1])
    try:
        yield made
    finally:
        made.release()
        os.environ.clear()
        os.environ.update(before)


def wait_for_picture(
    reader: cv2.VideoCapture, fits: Callable[[np.ndarray], bool] = lambda _: True
) -> np.ndarray:
    """Read on until a picture fits; the picture."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        found, image = reader.read()
        assert found, "the stream ended"
        if fits(image):
            return image
    raise AssertionError("no picture fitted")


def age_ms(image: np.ndarray) -> float | None:
    shown = read_time(cv2.cvtColor(image, cv2.COLOR_BGR2GRAY))
    return None if shown is None else (time.monotonic_ns() - shown) / 1e6


@pytest.mark.parametrize(
    ("codec", "transport"),
    [("h264", "tcp"), ("h264", "udp"), ("h265", "tcp"), ("h265", "udp"), ("jpeg", "tcp")],
)
def test_a_reader_sees_the_clip_and_when_it_was_shown(
    live_cameras: LiveCameras, codec: str, transport: str
) -> None:
    camera = live_cameras.rtsp(codec=codec, stamp=True)
    with capture(camera.uri(), transport) as reader:
        image = wait_for_picture(reader, lambda image: age_ms(image) is not None)
    assert image.shape == (360, 640, 3)
    assert 0 < age_ms(image) < PATIENCE_S * 1000
    clip = np.fromfile(live_cameras.clip().path, np.uint8).reshape(-1, 540, 640)
    grey = cv2.cvtColor(image, cv2.COLOR_BGR2GRAY)[32:].astype(int)
    nearest = min(np.abs(grey - (each[32:360] - 16.0) * 255 / 219).mean() for each in clip)
    assert nearest < 8


def test_pictures_freeze_darken_and_change_their_size(live_cameras: LiveCameras) -> None:
    camera = live_cameras.rtsp(codec="jpeg", fps=25)
    with capture(camera.uri()) as reader:
        wait_for_picture(reader)
        camera.command("black")
        wait_for_picture(reader, lambda image: image.max() < 20)
        camera.command("white")
        wait_for_picture(reader, lambda image: image.min() > 230)
        camera.command("play")
        wait_for_picture(reader, lambda image: image.std() > 20)
        camera.command("freeze")
        newest = wait_for_picture(reader)
        wait_for_picture(reader, lambda image: np.array_equal(image, newest))
        camera.command("play")
        wait_for_picture(reader, lambda image: not np.array_equal(image, newest))
        camera.show(live_cameras.clip(320, 240))
        wait_for_picture(reader, lambda image: image.shape == (240, 320, 3))


@pytest.mark.parametrize("digest", [False, True])
def test_only_the_right_password_opens_the_stream(live_cameras: LiveCameras, digest: bool) -> None:
    camera = live_cameras.rtsp(user="driver", password=RIGHT, digest=digest)
    for password, opens in ((WRONG, False), (RIGHT, True)):
        with capture(camera.uri(password=password)) as reader:
            assert reader.isOpened() == opens
    assert b"401" in _describe(camera)


def _describe(camera: RtspCamera) -> bytes:
    with socket.create_connection(("127.0.0.1", camera.port), PATIENCE_S) as asked:
        uri = f"rtsp://127.0.0.1:{camera.port}/camera"
        asked.sendall(f"DESCRIBE {uri} RTSP/1.0\r\nCSeq: 1\r\n\r\n".encode())
        return asked.recv(4096)


def test_a_killed_camera_comes_back_at_its_port(live_cameras: LiveCameras) -> None:
    camera = live_cameras.rtsp()
    for _ in range(2):
        with capture(camera.uri()) as reader:
            wait_for_picture(reader)
            camera.kill()
            assert not all(reader.read()[0] for _ in range(100))
        camera.start()


def test_a_proxy_stalls_and_cuts(live_cameras: LiveCameras) -> None:
    camera = live_cameras.rtsp()
    proxy = live_cameras.proxy(camera.port)
    with capture(camera.uri(proxy.port)) as reader:
        wait_for_picture(reader)
        proxy.stall()
        with socket.create_connection(("127.0.0.1", proxy.port), PATIENCE_S) as asked:
            asked.settimeout(0.3)
            asked.sendall(b"OPTIONS * RTSP/1.0\r\nCSeq: 1\r\n\r\n")
            with pytest.raises(TimeoutError):
                asked.recv(1)
            asked.settimeout(PATIENCE_S)
            proxy.flow()
            assert asked.recv(8) == b"RTSP/1.0"
        proxy.cut()
        assert not all(reader.read()[0] for _ in range(200))
    assert proxy.accepted == 2


def test_a_relay_loses_some_packets_of_the_media(live_cameras: LiveCameras) -> None:
    camera = live_cameras.rtsp()
    relay = live_cameras.relay(camera.port, loss=0.05)
    with capture(camera.uri(relay.port), "udp") as reader:
        wait_for_picture(reader, lambda _: relay.passed > 300)
    assert 0.02 < relay.lost / (relay.lost + relay.passed) < 0.09


def test_hosts_that_do_not_respond(live_cameras: LiveCameras) -> None:
    with socket.create_connection(("127.0.0.1", live_cameras.silent_port()), PATIENCE_S) as asked:
        asked.settimeout(0.3)
        asked.sendall(b"OPTIONS * RTSP/1.0\r\nCSeq: 1\r\n\r\n")
        with pytest.raises(TimeoutError):
            asked.recv(1)
    with pytest.raises(TimeoutError):
        socket.create_connection(("127.0.0.1", live_cameras.dropping_port()), 0.3)


def test_jpegs_over_http_stall_break_and_come_back(live_cameras: LiveCameras) -> None:
    camera = live_cameras.mjpeg(fps=30, user="driver", password=RIGHT)
    with capture(camera.uri(password=WRONG)) as reader:
        assert not reader.isOpened()
    with capture(camera.uri()) as reader:
        assert wait_for_picture(reader).shape == (360, 640, 3)
        camera.stall()
        camera.kill()
        assert not all(reader.read()[0] for _ in range(100))
    camera.start()
    camera.flow()
    with capture(camera.uri()) as reader:
        wait_for_picture(reader)


def test_jpegs_are_damaged_as_they_leave_the_camera(live_cameras: LiveCameras) -> None:
    camera = live_cameras.mjpeg(fps=30)
    with urllib.request.urlopen(camera.uri(), timeout=PATIENCE_S) as stream:  # noqa: S310 - http
        whole = _next_part(stream)
        assert whole[:2] == b"\xff\xd8"
        assert whole[-2:] == b"\xff\xd9"
        for damage, beginning, ending in (
            ("truncated", b"\xff\xd8", False),
            ("corrupt", b"\xff\xd8", True),
            ("no_jpeg", b"<h", False),
        ):
            camera.damage = damage
            parts = (_next_part(stream) for _ in range(100))
            assert any(
                part[:2] == beginning
                and part.endswith(b"\xff\xd9") == ending
                and (bytes(64) in part) == (damage == "corrupt")
                for part in parts
            )


def _next_part(stream: HTTPResponse) -> bytes:
    length = 0
    while line := stream.readline().strip().lower():
        if line.startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    return stream.read(length) if length else _next_part(stream)


def test_a_time_code_survives_noise_and_is_refused_where_it_is_damaged() -> None:
    picture = bytearray(640 * 360)
    write_time(picture, 640, 360, 123_456_700_000)
    luma = np.frombuffer(picture, np.uint8).reshape(360, 640)
    noise = np.random.default_rng(1).normal(0, 15, luma.shape)
    assert read_time(np.clip(luma + noise, 0, 255).astype(np.uint8)) == 123_456_700_000
    damaged = luma.copy()
    damaged[:, 160:200] = 128
    assert read_time(damaged) is None
    assert read_time(np.zeros((360, 640), np.uint8)) is None
