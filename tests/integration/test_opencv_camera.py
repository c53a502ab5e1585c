"""OpenCV's reader against cameras that stream on loopback, fail, and refuse."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pytest
from support.live_cameras.clip import Clip, jpegs
from support.live_cameras.mjpeg import MjpegCamera
from support.live_cameras.time_code import read_time
from support.verb import run_verb
from support.waiting import wait_until

from edge_server.cameras.frame import UsefulSize
from edge_server.cameras.opencv_live import open_opencv
from edge_server.cameras.source_uri import NO_OPTIONS, SourceOptions, parse_source_uri
from edge_server.errors import SourceError
from edge_server.pixels import PixelFormat

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.live_cameras.started import LiveCameras

    from edge_server.cameras.frame import Frame, FrameSource

_T = TypeVar("_T")

AWKWARD = "q8Zr@:/#%?[]&+ é"
WRONG = "q8Zr-wrong@"
PATIENCE_S = 30.0
# On a machine that does other things, too; the daemon's own limits are shorter.
SOON_S = 3.0


def open_camera(uri: str, options: SourceOptions = NO_OPTIONS) -> FrameSource:
    return open_opencv(parse_source_uri(uri), options)


def opened_again(read: Callable[[], _T]) -> _T:
    """What `read` returns, which opens a camera: again where it fails, as a reader does. On a busy
    machine the camera's encoder may be late."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return read()
        except SourceError:
            if time.monotonic() > end:
                raise


def first_frames(count: int, *uris: str) -> list[list[Frame]]:
    """The first frames of each camera, all open at once."""
    with ExitStack() as stack:
        sources = [stack.enter_context(closing(open_camera(uri))) for uri in uris]
        return [list(islice(frames_of(source), count)) for source in sources]


def frames_of(source: FrameSource, for_s: float = PATIENCE_S) -> Iterator[Frame]:
    end = time.monotonic() + for_s
    while time.monotonic() < end:
        frame = source.read()
        assert frame is not None
        yield frame


@pytest.mark.parametrize("codec", ["h264", "h265"])
def test_a_camera_is_seen_as_it_is_now(live_cameras: LiveCameras, codec: str) -> None:
    camera = live_cameras.rtsp(stamp=True, codec=codec)
    # The encoder begins anew with each viewer; the first time it is late, while it is loaded.
    opened_again(lambda: first_frames(15, camera.uri()))
    [frames] = opened_again(lambda: first_frames(30, camera.uri()))
    assert [frame.id for frame in frames] == list(range(30))
    assert {frame.clock for frame in frames} == {"rtp"}
    assert frames[0].image.pixel_format is PixelFormat.BGR
    assert frames[0].image.planes[0].shape == (360, 640, 3)
    captured = [frame.capture_mono_ns for frame in frames]
    assert captured == sorted(captured)
    # What was sent before is skipped: the first frame is about as old as the others.
    ages = []
    for frame in frames:
        shown = read_time(frame.image.luma())
        if shown is not None:
            ages.append((frame.capture_mono_ns - shown) / 1e6)
    assert len(ages) > 20
    assert abs(ages[0] - float(np.median(ages))) < 250


def test_a_camera_that_hangs_up_is_not_taken_for_something_else(live_cameras: LiveCameras) -> None:
    camera = live_cameras.rtsp()
    proxy = live_cameras.proxy(camera.port)
    camera.kill()
    with pytest.raises(SourceError, match="closes the connection without a response"):
        open_camera(camera.uri(proxy.port))


def test_udp_is_read_with_some_packets_lost_beside_a_camera_over_tcp(
    live_cameras: LiveCameras,
) -> None:
    camera = live_cameras.rtsp(key_frame_s=0.5)
    relay = live_cameras.relay(camera.port)
    over_udp = f"{camera.uri(relay.port)}?transport=udp"
    found = opened_again(lambda: first_frames(20, over_udp, camera.uri()))
    assert [len(frames) for frames in found] == [20, 20]
    assert relay.passed > 20
    assert relay.lost > 0
    assert "rtsp_transport;tcp" in os.environ["OPENCV_FFMPEG_CAPTURE_OPTIONS"]


def test_an_mjpeg_camera_is_read_and_lost_and_refuses_a_wrong_password(
    live_cameras: LiveCameras,
) -> None:
    camera = live_cameras.mjpeg(user="driver", password=AWKWARD)
    source = open_camera(camera.uri())
    frame = source.read()
    assert frame is not None
    assert frame.clock == "arrival"
    assert frame.image.pixel_format is PixelFormat.BGR
    camera.kill()
    with pytest.raises(SourceError, match="closed the stream") as caught:
        list(frames_of(source))
    assert caught.value.reason == "lost"
    source.close()
    camera.start()
    with pytest.raises(SourceError, match="refuses the password") as caught:
        open_camera(camera.uri(password=WRONG))
    assert caught.value.reason == "unauthorized"


def test_pictures_too_large_for_the_memory_are_refused() -> None:
    (huge,) = jpegs(8192, 4608, pictures=1)
    with (
        MjpegCamera(lambda: huge, fps=5) as camera,
        pytest.raises(SourceError, match="8192 x 4608, more than 32 megapixels; set a lower"),
    ):
        open_camera(camera.uri())


def test_a_stream_whose_decoder_would_keep_a_gigabyte_of_pictures_is_refused(
    live_cameras: LiveCameras, tmp_path: Path
) -> None:
    black = Clip(tmp_path / "black", 5120, 3328)
    with black.path.open("wb") as file:
        file.truncate(black.width * black.height * 3 // 2)
    camera = live_cameras.rtsp(black, fps=2.0)

    def refused() -> str:
        with pytest.raises(SourceError) as caught:
            open_camera(camera.uri())
        return str(caught.value)

    # On a busy machine the camera's encoder may be late.
    wait_until(
        lambda: "5120 x 3328, more than 16 megapixels; set a lower" in refused(),
        PATIENCE_S,
        otherwise=refused,
    )


def test_jpegs_that_are_cut_off_are_counted_and_not_shown(
    live_cameras: LiveCameras, capfd: pytest.CaptureFixture[str]
) -> None:
    camera = live_cameras.mjpeg(fps=30)
    source = open_camera(camera.uri())
    whole = source.read()
    assert whole is not None
    camera.damage = "truncated"
    with pytest.raises(SourceError, match=r"all of them damaged .its end is missing"):
        list(frames_of(source))
    assert source.corrupt >= 10
    source.close()
    # libjpeg would say so there, for each image.
    assert "JPEG" not in capfd.readouterr().err


def test_jpegs_are_decoded_no_larger_than_the_model_needs_them(live_cameras: LiveCameras) -> None:
    useful = UsefulSize()
    useful.size = (160, 90)
    for camera in (live_cameras.mjpeg(), live_cameras.rtsp(codec="jpeg")):
        source = open_camera(camera.uri(), SourceOptions(useful=useful))
        frame = source.read()
        source.close()
        assert frame is not None
        assert frame.size == (640, 360)
        assert (frame.image.width, frame.image.height) == (160, 90)


def test_a_redirect_is_followed_and_one_to_a_silent_server_does_not_hold_the_reader(
    live_cameras: LiveCameras,
) -> None:
    camera = live_cameras.mjpeg()
    silent = live_cameras.silent_port()
    with served(f"HTTP/1.0 302 Found\r\nLocation: {camera.uri()}\r\n\r\n".encode()) as uri:
        open_camera(uri).close()
    there = f"http://127.0.0.1:{silent}/x"
    begun = time.monotonic()
    with (
        served(f"HTTP/1.0 302 Found\r\nLocation: {there}\r\n\r\n".encode()) as uri,
        pytest.raises(SourceError, match=f"{silent} accepts the connection and sends nothing"),
    ):
        open_camera(uri)
    assert time.monotonic() - begun < 4 + SOON_S


def test_an_image_of_gigabytes_costs_little_memory(live_cameras: LiveCameras) -> None:
    del live_cameras
    head = b"HTTP/1.0 200 OK\r\nContent-Type: multipart/x-mixed-replace; boundary=b\r\n\r\n--b\r\n"
    for part in (b"Content-Length: 3000000000\r\n\r\n", b"\r\n"):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with (
            served(head + part, then=bytes(2**20)) as uri,
            pytest.raises(SourceError, match="an image has more than 32 MiB"),
        ):
            open_camera(uri)
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown_kib < 200 * 1024


@contextmanager
def served(response: bytes, then: bytes = b"") -> Iterator[str]:
    """Send `response` to each client, and `then` for as long as it reads."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    with suppress(ConnectionError), listener.accept()[0] as client:
                        client.recv(4096)
                        client.sendall(response)
                        while then:
                            client.sendall(then)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/camera"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_changed_size_of_jpegs_is_that_of_the_next_frame(live_cameras: LiveCameras) -> None:
    camera = live_cameras.rtsp(codec="jpeg")
    source = open_camera(camera.uri())
    assert next(frames_of(source)).size == (640, 360)
    camera.show(live_cameras.clip(320, 240))
    assert any(frame.size == (320, 240) for frame in frames_of(source))
    source.close()


def test_the_command_line_probes_a_camera_and_keeps_its_password(
    live_cameras: LiveCameras, tmp_path: Path
) -> None:
    camera = live_cameras.rtsp(user="driver", password=AWKWARD, fps=6)
    login = tmp_path / "login"
    login.write_text(f"driver:{AWKWARD}")
    picture = tmp_path / "seen.png"
    uri = f"rtsp://127.0.0.1:{camera.port}/camera"

    def probe(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_verb("cameras", "probe", uri, *arguments)

    done = probe("--seconds", "2", "--credentials", str(login), "--picture", str(picture))
    assert done.returncode == 0, done.stderr
    facts = dict(line.split(None, 1) for line in done.stdout.splitlines())
    assert facts["source"].endswith(f"{uri}")
    assert facts["size"] == "640 x 360"
    assert 4 < float(facts["fps"]) < 8
    assert picture.read_bytes().startswith(b"\x89PNG")
    refused = probe()
    assert refused.returncode == 69
    assert "wants a user name and a password" in refused.stderr
    assert AWKWARD not in done.stdout + done.stderr + refused.stderr
