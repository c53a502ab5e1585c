"""The whole daemon with live cameras: lanes on a real broker, faults by name, and lanes again.

Each test runs with each reader that this Python has: OpenCV's from its wheel, GStreamer's where the
distribution's bindings are.
"""

from __future__ import annotations

import json
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import cv2
import numpy as np
import pytest
from support.mosquitto import Mosquitto, Subscriber
from support.waiting import wait_until

from edge_server.cameras.gstreamer import gstreamer_missing
from edge_server.cameras.source import open_source
from edge_server.cameras.source_uri import Credentials, SourceOptions
from edge_server.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.daemon_process import Process
    from support.live_cameras.started import LiveCameras

    from edge_server.cameras.frame import FrameSource

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "models"
RECONNECTS = ROOT / "tests/support/live_cameras/reconnects.py"
PATIENCE_S = 30.0
RIGHT, WRONG = "p:@/ %4", "guess-0815@"
AWKWARD = "q8Zr@:/#%?[]&+ é"
# A failure is noticed after half a second; the rest is for a machine under load.
NOTICED_S = 3.0
OK = ("FRAME_STATUS_OK", "FRAME_STATUS_STALE")


@pytest.fixture(params=["opencv", pytest.param("gstreamer", marks=pytest.mark.gstreamer)])
def reader(request: pytest.FixtureRequest) -> str:
    if request.param == "gstreamer" and (missing := gstreamer_missing()):
        pytest.skip(missing)
    return request.param


# What is above the readers: OpenCV's shows it in a long run.
above_readers = pytest.mark.parametrize(
    "reader",
    [
        pytest.param("opencv", marks=pytest.mark.long),
        pytest.param("gstreamer", marks=pytest.mark.gstreamer),
    ],
    indirect=True,
)


class Appliance:
    """A daemon with cameras, and what its broker says.

    Args:
        cameras: URI of each camera, by name.
    """

    def __init__(
        self,
        folder: Path,
        broker: Mosquitto,
        start: Callable[..., Process],
        reader: str,
        cameras: dict[str, str],
    ) -> None:
        config = folder / "config.toml"
        lines = [
            f'[device]\nid = "tested"\n[repository]\npaths = ["{MODELS}"]',
            f'[mqtt]\nhost = "127.0.0.1"\nport = {broker.port}',
            *(
                f'[cameras.{name}]\nuri = "{uri}"\nreader = "{reader}"'
                for name, uri in cameras.items()
            ),
        ]
        config.write_text("\n".join(lines) + "\n")
        self.subscriber = Subscriber(broker.port, "edge/v1/tested/#")
        self.process = start("--config", str(config))

    def wait_for_lanes(self, camera: str = "front", **image: int) -> dict[str, Any]:
        """Wait for the lanes of a frame that is captured from now on, perhaps of a certain size."""
        now_ns = time.monotonic_ns()
        return self._wait(
            f"cameras/{camera}/lanes",
            lambda m: (
                m["status"] in OK
                and len(m["lanes"]) >= 2
                and int(m["time"]["capture_mono_ns"]) > now_ns
                and image.items() <= m["image"].items()
            ),
        )

    def drive(self, frames: int = 45, camera: str = "front") -> None:
        """Wait until so many more frames were captured, without a fault in between."""
        first = self.wait_for_lanes(camera)["frame_id"]
        self._wait(
            f"cameras/{camera}/lanes",
            lambda m: m["status"] in OK and m["frame_id"] > first + frames,
        )

    def wait_for_state(self, *states: str, reason: str = "", camera: str = "front") -> None:
        """Wait until the newest state is one of these, perhaps for this reason."""
        topic = f"edge/v1/tested/cameras/{camera}/status"
        self._wait(f"cameras/{camera}/status", lambda _: True)
        self.subscriber.wait_for_last(
            topic, lambda m: m["state"] in states and m["reason"] in (reason, reason or m["reason"])
        )

    def wait_for_invalid(self, *words: str, camera: str = "front", frames: float = inf) -> bool:
        """Wait for lanes that are INVALID and say why with one of these words, from now on; return
        whether they came before so many more frames."""
        topic = f"cameras/{camera}/lanes"
        before = self.subscriber.messages.get(f"edge/v1/tested/{topic}", [])
        since, last = len(before), inf if frames == inf else before[-1]["frame_id"] + frames

        def says_why(m: dict[str, Any]) -> bool:
            return (
                m["status"] == "FRAME_STATUS_INVALID"
                and not m["lanes"]
                and any(reason.partition(":")[0] in words for reason in m["reasons"])
            )

        over = self._wait(topic, lambda m: says_why(m) or m["frame_id"] > last, since)
        return says_why(over)

    def _wait(
        self, topic: str, fits: Callable[[dict[str, Any]], bool], since: int = 0
    ) -> dict[str, Any]:
        return self.subscriber.wait(f"edge/v1/tested/{topic}", fits, since)

    def close(self) -> None:
        """The daemon that was started is still the one that runs, and stops when it is asked to."""
        try:
            assert self.process.popen.poll() is None, self.process.log.read_text()
            assert self.process.terminate() == 0
        finally:
            self.subscriber.close()


@pytest.fixture
def appliance(
    tmp_path: Path, mosquitto: Mosquitto, start: Callable[..., Process], reader: str
) -> Iterator[Callable[[dict[str, str]], Appliance]]:
    made: list[Appliance] = []

    def make(cameras: dict[str, str]) -> Appliance:
        made.append(Appliance(tmp_path, mosquitto, start, reader, cameras))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_every_network_camera_gives_lanes(
    appliance: Callable[[dict[str, str]], Appliance], live_cameras: LiveCameras
) -> None:
    h264 = live_cameras.rtsp(codec="h264", fps=10, user="driver", password=RIGHT, digest=True)
    h265 = live_cameras.rtsp(codec="h265", fps=10)
    http = live_cameras.mjpeg(fps=10, user="driver", password=RIGHT)
    running = appliance(
        {
            "front": h264.uri(),
            "rear": h265.uri(),
            "right": http.uri(),
        }
    )
    for name in ("front", "rear", "right"):
        message = running.wait_for_lanes(name)
        assert message["image"] == {"width": 640, "height": 360}
        running.wait_for_state("ok", camera=name)
    assert RIGHT not in running.process.log.read_text()


@pytest.mark.parametrize(
    "reader", [pytest.param("gstreamer", marks=pytest.mark.gstreamer)], indirect=True
)
def test_a_gstreamer_that_loads_slowly_is_a_state_and_no_fault(
    appliance: Callable[..., Appliance], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GStreamer's real search for plugins, of which it has no list; a simulation makes it slow:
    PyGObject waits until the test lets it go."""
    let_go = tmp_path / "let go"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time, gi\n"
        "require = gi.require_version\n"
        "def slowly(*arguments):\n"
        f"    while not os.path.exists({str(let_go)!r}):\n"
        "        time.sleep(0.1)\n"
        "    require(*arguments)\n"
        "gi.require_version = slowly\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("GST_REGISTRY", str(tmp_path / "cache" / "gstreamer.bin"))
    snow = "gst:videotestsrc is-live=true pattern=snow ! video/x-raw,width=640,height=360"
    it = appliance({"front": snow})  # the daemon is ready
    it.subscriber.wait(
        "edge/v1/tested/cameras/front/status", lambda m: m["reason"] == "loading_gstreamer"
    )
    let_go.touch()
    it.wait_for_state("ok", "degraded")
    assert "camera front: lost" not in it.process.log.read_text()
    assert (tmp_path / "cache" / "gstreamer.bin").exists()


def test_a_killed_camera_is_lost_and_found_again(
    appliance: Callable[[dict[str, str]], Appliance], live_cameras: LiveCameras
) -> None:
    camera = live_cameras.rtsp()
    running = appliance({"front": camera.uri()})
    for count in (1, 2):
        running.wait_for_lanes()
        camera.kill()
        running.wait_for_invalid("lost", "unavailable")
        running.wait_for_state("lost")
        camera.start()
        running.wait_for_lanes()
        running.wait_for_state("ok")
        assert running.process.metric('edge_camera_reconnects_total{camera="front"}') == count


def test_a_camera_that_falls_silent_is_opened_again_and_its_backlog_is_no_news(
    appliance: Callable[[dict[str, str]], Appliance], live_cameras: LiveCameras
) -> None:
    camera = live_cameras.rtsp()
    proxy = live_cameras.proxy(camera.port)
    running = appliance({"front": camera.uri(proxy.port)})
    running.wait_for_lanes()
    proxy.stall()
    running.wait_for_invalid("stalled", "lost", "unavailable")
    running.wait_for_state("stalled", "lost")
    wait_until(lambda: proxy.accepted >= 2, PATIENCE_S)
    proxy.flow()
    running.wait_for_lanes()
    running.wait_for_state("ok")


@above_readers
def test_a_frozen_and_a_dark_picture_give_no_lanes(
    appliance: Callable[[dict[str, str]], Appliance], live_cameras: LiveCameras
) -> None:
    camera = live_cameras.rtsp()
    running = appliance({"front": camera.uri()})
    for command, states, words in (
        ("freeze", ("frozen",), ("frozen",)),
        ("black", ("degraded",), ("black",)),
    ):
        running.drive()
        camera.command(command)
        # A picture is frozen where it stops amid a drive. A machine under load loses the frames
        # that show the drive, and after them nothing tells it from a vehicle that stands.
        while not running.wait_for_invalid(*words, frames=60):
            camera.command("play")
            running.drive()
            camera.command(command)
        running.wait_for_state(*states)
        camera.command("play")
    running.wait_for_lanes()
    running.wait_for_state("ok")
    assert running.process.metric('edge_camera_reconnects_total{camera="front"}') == 0


def test_a_camera_that_changes_its_size_gives_lanes_again(
    appliance: Callable[[dict[str, str]], Appliance], live_cameras: LiveCameras, reader: str
) -> None:
    camera = live_cameras.rtsp()
    running = appliance({"front": camera.uri()})
    running.wait_for_lanes(width=640, height=360)
    camera.show(live_cameras.clip(480, 272))
    # OpenCV scales the new images to the size of the first, and does not say so.
    size = {"width": 480, "height": 272} if reader == "gstreamer" else {}
    running.wait_for_lanes(**size)
    running.wait_for_state("ok")


# Of GStreamer's reader alone test_gstreamer shows it.
@pytest.mark.parametrize(
    "reader",
    ["opencv", pytest.param("gstreamer", marks=[pytest.mark.gstreamer, pytest.mark.long])],
    indirect=True,
)
def test_lanes_go_on_where_a_network_loses_packets(
    appliance: Callable[[dict[str, str]], Appliance], live_cameras: LiveCameras
) -> None:
    camera = live_cameras.rtsp(key_frame_s=0.5)
    relay = live_cameras.relay(camera.port, loss=0.05)
    running = appliance({"front": f"{camera.uri(relay.port)}?transport=udp"})
    for _ in range(20):
        running.wait_for_lanes()
    assert relay.lost > 5


@above_readers
def test_a_wrong_password_is_named_and_not_shown(
    appliance: Callable[[dict[str, str]], Appliance], live_cameras: LiveCameras
) -> None:
    camera = live_cameras.rtsp(user="driver", password=RIGHT)
    running = appliance({"front": camera.uri(password=WRONG)})
    running.wait_for_invalid("unauthorized")
    running.wait_for_state("lost", reason="unauthorized")
    assert WRONG not in running.process.log.read_text()
    assert all(WRONG not in str(message) for _, message in running.subscriber.in_order)


@above_readers
def test_hosts_that_do_not_respond_are_unavailable(
    appliance: Callable[[dict[str, str]], Appliance], live_cameras: LiveCameras
) -> None:
    camera = live_cameras.rtsp()
    silent, dropping = live_cameras.silent_port(), live_cameras.dropping_port()
    uris = {
        "silent": camera.uri(silent),
        "dropping": camera.uri(dropping),
        "nobody": camera.uri(),
    }
    camera.kill()
    running = appliance(uris)
    for name in uris:
        running.wait_for_state("lost", reason="unavailable", camera=name)


@above_readers
def test_jpegs_over_http_stall_break_and_return(
    appliance: Callable[[dict[str, str]], Appliance], live_cameras: LiveCameras, reader: str
) -> None:
    camera = live_cameras.mjpeg()
    running = appliance({"front": camera.uri()})
    running.wait_for_lanes()
    camera.stall()
    running.wait_for_state("stalled", "lost")
    camera.flow()
    running.wait_for_lanes()
    for damage in ("no_jpeg", "truncated"):
        camera.damage = damage
        running.wait_for_invalid("corrupt", "stalled", "lost", "unavailable", "stuck", "no_frames")
        camera.damage = ""
        running.wait_for_lanes()
    camera.kill()
    running.wait_for_state("lost")
    camera.start()
    running.wait_for_lanes()
    running.wait_for_state("ok")


@above_readers
def test_a_jpeg_that_is_too_much_work_costs_its_camera_alone(
    appliance: Callable[[dict[str, str]], Appliance], live_cameras: LiveCameras
) -> None:
    camera = live_cameras.mjpeg()
    running = appliance({"front": camera.uri(), "rear": live_cameras.mjpeg().uri()})
    running.wait_for_lanes()
    running.wait_for_lanes("rear")
    # 200 kB, and 1.6 billion px to decode.
    plain = np.full((4368, 7680, 3), 90, np.uint8)
    jpeg = cv2.imencode(".jpg", plain, (cv2.IMWRITE_JPEG_PROGRESSIVE, 1))[1].tobytes()
    camera.instead = jpeg[:-2] + 39 * jpeg[jpeg.rindex(b"\xff\xda") : -2] + b"\xff\xd9"
    running.wait_for_invalid("corrupt")
    running.drive(30, "rear")
    camera.instead = b""
    running.wait_for_lanes()
    running.wait_for_state("ok")


# The reader alone


def opened(reader: str, uri: str, credentials: Credentials | None = None) -> FrameSource:
    options = SourceOptions(credentials, reader=reader)
    return open_source(uri, options=options)


def failure(source: FrameSource) -> SourceError:
    """The error that ends the reading, within the time in which it is to be noticed."""
    begin = time.monotonic()
    try:
        while time.monotonic() - begin < PATIENCE_S:
            source.read()
    except SourceError as error:
        assert time.monotonic() - begin < NOTICED_S
        return error
    finally:
        source.close()
    raise AssertionError("the camera did not fail")


@pytest.mark.parametrize("digest", [False, True])
def test_any_password_opens_and_a_wrong_one_is_called_one_and_not_shown(
    live_cameras: LiveCameras,
    reader: str,
    digest: bool,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level("DEBUG")
    camera = live_cameras.rtsp(user="driver", password=AWKWARD, digest=digest)
    bare = f"rtsp://127.0.0.1:{camera.port}/camera"
    opened(reader, camera.uri()).close()
    opened(reader, bare, Credentials("driver", AWKWARD)).close()
    for uri in (camera.uri(password=WRONG), bare):
        with pytest.raises(SourceError, match="password") as caught:
            opened(reader, uri)
        assert caught.value.reason == "unauthorized"
        assert WRONG not in str(caught.value)
    # FFmpeg and OpenCV write to the descriptor itself.
    written = "".join(capfd.readouterr()) + caplog.text
    for secret in (WRONG, AWKWARD):
        assert secret not in written
        assert quote(secret, safe="") not in written


def test_a_wrong_path_port_or_name_is_named(live_cameras: LiveCameras, reader: str) -> None:
    camera, web = live_cameras.rtsp(), live_cameras.mjpeg()
    for uri, text, reason in (
        (f"rtsp://127.0.0.1:{camera.port}/front", "check the path|look its path", "not_found"),
        (f"rtsp://127.0.0.1:{web.port}/x", "check scheme and port", "unavailable"),
        (f"rtsps://127.0.0.1:{camera.port}/x", "no TLS at .* or write rtsp://", "unavailable"),
        ("rtsp://127.0.0.1:1/x", "127.0.0.1:1 refuses the connection; check", "unavailable"),
        ("rtsp://kamera.invalid/x", "'kamera.invalid' is not known .*check its s", "unavailable"),
        ("http://kamera.invalid/x", "'kamera.invalid' is not known .*check its s", "unavailable"),
        ("rtsp://kam..era/x", "'kam..era' is not known .*check its spelling", "unavailable"),
    ):
        with pytest.raises(SourceError, match=text) as caught:
            opened(reader, uri)
        assert caught.value.reason == reason, uri


def test_a_silent_and_an_unreachable_host_do_not_hold_the_reader(
    live_cameras: LiveCameras, reader: str
) -> None:
    for port, text in (
        (live_cameras.silent_port(), "accepts the connection and sends nothing"),
        (live_cameras.dropping_port(), "is not reachable; check the address"),
    ):
        begun = time.monotonic()
        with pytest.raises(SourceError, match=text):
            opened(reader, f"rtsp://127.0.0.1:{port}/x")
        assert time.monotonic() - begun < 4 + 2 * NOTICED_S


def test_a_killed_camera_is_lost_at_once(live_cameras: LiveCameras, reader: str) -> None:
    for camera in (live_cameras.rtsp(), live_cameras.mjpeg()):
        source = opened(reader, camera.uri())
        camera.kill()
        assert failure(source).reason == "lost"


# To a reader a camera that stops and one that sends no more are one; a long run shows it.
@pytest.mark.parametrize(
    "way",
    [
        *(pytest.param(way, marks=pytest.mark.long) for way in ("silence", "hang", "silence udp")),
        *("proxy", "mjpeg", "hang udp"),
    ],
)
def test_a_silent_camera_is_stalled_long_before_a_library_notices(
    live_cameras: LiveCameras, reader: str, way: str
) -> None:
    if way == "mjpeg":
        jpegs = live_cameras.mjpeg()
        source = opened(reader, jpegs.uri())
        jpegs.stall()
        assert failure(source).reason == "stalled"
        return
    camera = live_cameras.rtsp()
    proxy = live_cameras.proxy(camera.port)
    query = "?transport=udp" if way.endswith("udp") else ""
    source = opened(reader, camera.uri(proxy.port if way == "proxy" else None) + query)
    source.read()
    if way == "proxy":
        proxy.stall()
    elif way.startswith("hang"):
        camera.hang()
    else:
        camera.command("silence")
    assert failure(source).reason == "stalled"


def test_a_message_of_rtsp_without_end_takes_little_memory(reader: str) -> None:
    header = b"RTSP/1.0 200 OK\r\nCSeq: 1\r\n"
    length = b"Content-Type: application/sdp\r\nContent-Length: 2000000000\r\n\r\nv=0\r\n"
    for head, more in ((header, b"X: " + b"x" * 60_000 + b"\r\n"), (header + length, length)):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with served(head, 100 * more) as port, pytest.raises(SourceError):
            opened(reader, f"rtsp://127.0.0.1:{port}/x")
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown_kib < 600 * 1024


def playing(packets: bytes, path: str = "t") -> bytes:
    """What a camera of H.264 says from its first response to its first packets."""
    sdp = f"v=0\r\nm=video 0 RTP/AVP 96\r\na=rtpmap:96 H264/90000\r\na=control:{path}\r\n"
    headers = (
        "Public: DESCRIBE, SETUP, PLAY\r\n\r\n",
        f"Content-Type: application/sdp\r\nContent-Length: {len(sdp)}\r\n\r\n{sdp}",
        "Session: 1\r\nTransport: RTP/AVP/TCP;unicast;interleaved=0-1\r\n\r\n",
        "Session: 1\r\n\r\n",
    )
    said = "".join(f"RTSP/1.0 200 OK\r\nCSeq: {n}\r\n{each}" for n, each in enumerate(headers, 1))
    return said.encode() + packets


def packet(number: int, sender: int, payload: bytes) -> bytes:
    header = struct.pack(">BBHII", 0x80, 96, number, 0, sender)
    return b"$\0" + struct.pack(">H", len(header + payload)) + header + payload


def test_an_image_of_rtsp_without_end_takes_little_memory(reader: str) -> None:
    """It comes in fragments (FU-A of RFC 6184), none of which is the last one."""
    begin = packet(0, 7, b"\x7c\x85" + bytes(600))
    more = b"".join(packet(n % 2**16, 7, b"\x7c\x05" + bytes(600)) for n in range(1, 2**16 + 1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with served(playing(begin), more) as port, pytest.raises(SourceError):
        opened(reader, f"rtsp://127.0.0.1:{port}/x")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024


of_gstreamer = pytest.mark.parametrize(
    "reader", [pytest.param("gstreamer", marks=pytest.mark.gstreamer)], indirect=True
)


@of_gstreamer
def test_a_camera_of_many_senders_is_refused(reader: str) -> None:
    """GStreamer starts a thread for each SSRC, and crashes in one of them."""
    packets = [packet(n, sender, b"\x65") for sender in range(1000, 1300) for n in range(4)]
    with (
        served(playing(b"".join(packets)), b"") as port,
        pytest.raises(SourceError, match="sends as more than 8 senders") as raised,
    ):
        opened(reader, f"rtsp://127.0.0.1:{port}/x")
    assert raised.value.reason == "corrupt"


@of_gstreamer
def test_a_camera_that_redirects_to_itself_is_left(live_cameras: LiveCameras, reader: str) -> None:
    camera = live_cameras.redirecting_port("")
    camera.location = f"rtsp://127.0.0.1:{camera.port}/y"
    with pytest.raises(SourceError, match="redirects again and again") as raised:
        opened(reader, f"rtsp://127.0.0.1:{camera.port}/x")
    assert raised.value.reason == "not_found"


def test_a_camera_that_redirects_to_another_host_is_not_read(
    live_cameras: LiveCameras, reader: str
) -> None:
    camera = live_cameras.rtsp().uri()
    same = live_cameras.redirecting_port(camera)
    opened(reader, f"rtsp://127.0.0.1:{same.port}/x").close()
    other = live_cameras.redirecting_port(camera, "127.0.0.2")
    with pytest.raises(SourceError, match="the camera redirects to") as raised:
        opened(reader, f"rtsp://127.0.0.2:{other.port}/x")
    assert raised.value.reason == "not_found"


# What a camera can send at most: gigabit Ethernet.
NETWORK_BYTES_S = 125_000_000


@contextmanager
def served(head: bytes, then: bytes) -> Iterator[int]:
    """Answer each client with `head`, and `then` for as long as it reads; return the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer(client: socket.socket) -> None:
            with suppress(OSError), client:
                client.recv(4096)
                client.sendall(head)
                while True:
                    client.sendall(then)
                    time.sleep(len(then) / NETWORK_BYTES_S)

        def serve() -> None:
            with suppress(OSError):
                while True:
                    client = listener.accept()[0]
                    threading.Thread(target=answer, args=(client,), daemon=True).start()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.long
@pytest.mark.serial
def test_250_losses_leave_no_memory_descriptor_or_thread(
    live_cameras: LiveCameras, reader: str
) -> None:
    source = live_cameras.rtsp(key_frame_s=0.2)
    proxy = live_cameras.proxy(source.port)
    command = [sys.executable, str(RECONNECTS), reader, source.uri(proxy.port), "250"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            last = ""
            for last in process.stdout:
                if last == "frame\n":
                    proxy.cut()
        finally:
            process.kill()
    used = json.loads(last)
    kib, descriptors, threads = (after - before for before, after in zip(*used, strict=True))
    # Of 200 losses: one image that is kept each time would be 69 MB, a pipeline 20 MB.
    assert kib < 16384, used
    assert descriptors <= 2, used
    assert threads <= 2, used
