"""GStreamer's reader with the real GStreamer and real cameras on loopback.

`scripts/test` runs them in an environment of the system's own Python, which PyGObject belongs to.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import pytest
from support.live_cameras.time_code import read_time
from support.waiting import wait_until

from edge_server.cameras.camera import Camera
from edge_server.cameras.colour import bgr_of
from edge_server.cameras.gstreamer import gstreamer_missing, open_gstreamer, report
from edge_server.cameras.gstreamer_frames import load_gstreamer
from edge_server.cameras.gstreamer_pipelines import SINK, CameraPipeline
from edge_server.cameras.gstreamer_player import GstreamerStream
from edge_server.cameras.jpeg import LONGEST_JPEG_BYTES
from edge_server.cameras.source import open_source
from edge_server.cameras.source_uri import NO_OPTIONS, SourceOptions, parse_source_uri
from edge_server.cameras.status import CameraState
from edge_server.errors import SourceError
from edge_server.pixels import Colour, ColourMatrix, ColourRange, PixelFormat

if TYPE_CHECKING:
    from support.live_cameras.started import LiveCameras

    from edge_server.cameras.frame import Frame
    from edge_server.cameras.live_source import LiveSource

pytestmark = [
    pytest.mark.gstreamer,
    pytest.mark.skipif(bool(gstreamer_missing()), reason=gstreamer_missing()),
]
PATIENCE_S = 30.0
LOGIN = {"user": "edge", "password": "p@ss:w/rd"}
IN_URI = "edge:p%40ss%3Aw%2Frd@"
# A failure is noticed after half a second; the rest is for a machine under load.
NOTICED_S = 3.0


def opened(uri: str, options: SourceOptions = NO_OPTIONS) -> LiveSource:
    return open_gstreamer(parse_source_uri(uri), options)


def frames_of(uri: str, number: int) -> list[Frame]:
    """The first frames of a camera; opened again where the encoder of a camera beside much else
    falls silent, as a daemon does."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            source = opened(uri)
            try:
                frames = [source.read() for _ in range(number)]
            finally:
                source.close()
        except SourceError as error:
            if error.reason not in {"stalled", "unavailable"} or time.monotonic() > end:
                raise
        else:
            assert all(frames)
            return [frame for frame in frames if frame is not None]


def own(caps: str, source: str = "videotestsrc is-live=true") -> str:
    return f"gst:{source} ! video/x-raw,{caps}"


def failure(source: LiveSource) -> tuple[SourceError, float]:
    """The error that ends the reading, and after how many seconds."""
    begin = time.monotonic()
    try:
        while time.monotonic() - begin < PATIENCE_S:
            source.read()
    except SourceError as error:
        return error, time.monotonic() - begin
    finally:
        source.close()
    raise AssertionError("the camera did not fail")


def refusal(uri: str, options: SourceOptions = NO_OPTIONS) -> SourceError:
    try:
        opened(uri, options).close()
    except SourceError as error:
        return error
    raise AssertionError("the camera was opened")


class _Allocated(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def memory_bytes() -> int:
    """The memory in use, of C and Python; not what an allocator keeps, which load increases."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Allocated
    allocated = mallinfo()
    # Python's smaller blocks have 16 to 512 bytes, in memory that malloc does not know.
    return int(allocated.uordblks + allocated.hblkhd) + 512 * sys.getallocatedblocks()


def entries(folder: str) -> int:
    """The number of open files (`fd`) or threads (`task`) of this process."""
    return len(list(Path("/proc/self", folder).iterdir()))


# Pixels


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("NV12", PixelFormat.NV12),
        ("I420", PixelFormat.I420),
        ("YUY2", PixelFormat.YUY2),
        ("BGR", PixelFormat.BGR),
        ("GRAY8", PixelFormat.GREY),
    ],
)
def test_each_format_is_delivered_as_it_is(name: str, form: PixelFormat) -> None:
    # Its rows have gaps: GStreamer pads them to four bytes.
    caps = f"format={name},width=642,height=362,framerate=30/1,colorimetry=bt601"
    (frame,) = frames_of(own(caps, "videotestsrc is-live=true pattern=smpte75"), 1)
    image = frame.image
    assert (image.pixel_format, image.width, image.height) == (form, 642, 362)
    # The first bars of 75 %: white, yellow.
    white, yellow = bgr_of(image)[100, 40].astype(int), bgr_of(image)[100, 140].astype(int)
    assert np.abs(white - 191).max() <= 3
    if form is not PixelFormat.GREY:
        assert np.abs(yellow - (0, 191, 191)).max() <= 5


def test_the_colours_are_those_of_the_caps_unless_overridden() -> None:
    caps = "format=NV12,width=64,height=64,framerate=30/1,colorimetry=(string)1:3:5:1"
    (frame,) = frames_of(own(caps), 1)
    assert frame.image.colour == Colour(ColourMatrix.BT709, ColourRange.FULL)
    options = SourceOptions(matrix=ColourMatrix.BT601, range=ColourRange.LIMITED)
    source = opened(own(caps), options)
    frame = source.read()
    source.close()
    assert frame.image.colour == Colour(ColourMatrix.BT601, ColourRange.LIMITED)


@pytest.mark.parametrize("by_c", [False, True])
def test_an_image_stays_as_it_was_while_somebody_has_it(by_c: bool) -> None:
    """Also a view of one plane alone, after the camera was closed."""
    from edge_server.cameras import gstreamer_frames

    caps = "format=NV12,width=640,height=360,framerate=60/1"
    source = opened(own(caps, "videotestsrc is-live=true pattern=snow"))
    if by_c:
        source.stream._samples._map = gstreamer_frames._map_by_c  # type: ignore[attr-defined]  # this source has it
    source.read()
    frame = source.read()
    assert frame is not None
    view = frame.image.planes[1][10:20]
    assert not view.flags.writeable
    before = view.copy()
    del frame
    for _ in range(30):
        source.read()
    assert (view == before).all()
    source.close()
    assert (view == before).all()


def test_no_frame_is_copied_and_none_is_kept() -> None:
    caps = "format=NV12,width=1920,height=1080,framerate=60/1"
    source = opened(own(caps))
    for _ in range(30):
        source.read()
    before = memory_bytes()
    for _ in range(120):
        source.read()
    grown = memory_bytes() - before
    source.close()
    assert grown < 10 * 1920 * 1080  # of 120 frames, three megabytes each


def test_rotation_among_the_tags_is_obeyed() -> None:
    rotated = "videotestsrc is-live=true ! taginject tags=image-orientation=rotate-90"
    (frame,) = frames_of(own("format=NV12,width=640,height=360,framerate=30/1", rotated), 1)
    assert (frame.image.width, frame.image.height) == (360, 640)


# Real cameras


@pytest.mark.parametrize(
    ("codec", "query"),
    [("h264", ""), ("h264", "?transport=udp"), ("h265", ""), ("h265", "?transport=udp")],
)
def test_a_camera_is_decoded_with_its_own_time(
    live_cameras: LiveCameras, codec: str, query: str
) -> None:
    camera = live_cameras.rtsp(codec=codec, stamp=True)
    frames = frames_of(f"{camera.uri()}{query}", 30)
    assert {frame.clock for frame in frames[1:]} <= {"rtp", "ntp"}
    assert {frame.image.pixel_format for frame in frames} == {PixelFormat.I420}
    # The time in the pixels is that of the picture; encoding and decoding come after it. Their
    # least is taken for none, so that a capture time is late by it, and by no more.
    late_ms = [
        (frame.capture_mono_ns - shown) / 1e6
        for frame in frames[10:]
        if (shown := read_time(frame.image.luma())) is not None
    ]
    assert len(late_ms) >= 10
    assert -1 < np.median(late_ms) < 1000
    captures = [frame.capture_mono_ns for frame in frames]
    assert captures == sorted(captures)


def test_the_cameras_ntp_time_is_that_of_its_pictures(live_cameras: LiveCameras) -> None:
    if load_gstreamer().gst.version() < (1, 22):
        pytest.skip("GStreamer hands the NTP time on since 1.22")
    camera = live_cameras.rtsp(stamp=True, fps=30.0)
    source = opened(camera.uri())
    end = time.monotonic() + PATIENCE_S
    errors_ms: list[float] = []
    while len(errors_ms) < 30:
        assert time.monotonic() < end, "no NTP time came"
        frame = source.read()
        assert frame is not None
        shown = read_time(frame.image.luma())
        if frame.clock == "ntp" and shown is not None:
            errors_ms.append((frame.capture_mono_ns - shown) / 1e6)
    source.close()
    # The camera's clock is that of this machine.
    assert abs(np.median(errors_ms)) < 50


def test_the_camera_knows_its_colours(live_cameras: LiveCameras) -> None:
    camera = live_cameras.rtsp()
    (frame,) = frames_of(camera.uri(), 1)
    assert frame.image.colour == Colour(ColourMatrix.BT601, ColourRange.LIMITED)
    clip = np.fromfile(live_cameras.clip().path, np.uint8).reshape(-1, 540, 640)
    shown = bgr_of(frame.image).astype(int)
    originals = (cv2.cvtColor(each, cv2.COLOR_YUV2BGR_I420).astype(int) for each in clip)
    assert min(np.abs(shown - each).mean() for each in originals) < 6


def test_a_camera_that_changes_its_size_goes_on(live_cameras: LiveCameras) -> None:
    camera = live_cameras.rtsp()
    source = opened(camera.uri())
    source.read()
    camera.show(live_cameras.clip(320, 240))
    end = time.monotonic() + PATIENCE_S
    frame = source.read()
    while frame is not None and frame.image.width == 640 and time.monotonic() < end:
        frame = source.read()
    assert frame is not None
    assert (frame.image.width, frame.image.height) == (320, 240)
    source.close()


def test_lost_packets_cost_frames_and_not_the_camera(live_cameras: LiveCameras) -> None:
    camera = live_cameras.rtsp()
    relay = live_cameras.relay(camera.port, loss=0.03)
    source = opened(f"{camera.uri(relay.port)}?transport=udp")
    for _ in range(40):
        source.read()
    source.close()
    assert relay.lost


def test_jpegs_over_http(live_cameras: LiveCameras) -> None:
    camera = live_cameras.mjpeg(**LOGIN)
    uri = f"http://{IN_URI}127.0.0.1:{camera.port}/camera.mjpeg"
    source = opened(uri)
    frame = source.read()
    assert frame is not None
    assert (frame.image.width, frame.image.height) == (640, 360)
    assert frame.image.colour.range is ColourRange.FULL
    assert refusal(f"http://127.0.0.1:{camera.port}/camera.mjpeg").reason == "unauthorized"
    camera.damage = "truncated"
    error, _ = failure(source)
    assert error.reason == "corrupt"
    camera.damage = ""
    source = opened(uri)
    camera.kill()
    error, seconds = failure(source)
    assert (error.reason, seconds < NOTICED_S) == ("lost", True)
    assert "refuses the connection" in str(refusal(uri))


def test_an_image_over_http_is_kept_up_to_the_bound_of_the_other_reader(
    live_cameras: LiveCameras,
) -> None:
    camera = live_cameras.mjpeg()
    camera.instead = bytes(2 * LONGEST_JPEG_BYTES)
    error = refusal(camera.uri())
    assert (error.reason, "no image ends within 32 MiB" in str(error)) == ("corrupt", True)


@pytest.mark.parametrize("scheme", ["rtsp", "http"])
def test_a_redirect_sends_another_host_nothing(live_cameras: LiveCameras, scheme: str) -> None:
    other = live_cameras.redirecting_port("")
    place = f"{scheme}://127.0.0.1:{other.port}/other"
    camera = live_cameras.redirecting_port(place, "127.0.0.2")
    error = refusal(f"{scheme}://{IN_URI}127.0.0.2:{camera.port}/camera")
    assert f"the camera redirects to {place}; write that address" in str(error)
    assert camera.requests
    assert not other.requests


def test_a_description_of_many_streams_is_not_waited_for() -> None:
    """GStreamer would be busy for an hour with these, and could not be stopped."""
    line = 1000 * b"m=video 0 RTP/AVP 96\r\n"
    begin = (
        b"RTSP/1.0 200 OK\r\nCSeq: 1\r\n\r\n"
        b"RTSP/1.0 200 OK\r\nCSeq: 2\r\nContent-Type: application/sdp\r\n"
        b"Content-Length: %d\r\n\r\nv=0\r\n" % (5 + 500 * len(line))
    )
    over = threading.Event()

    def describe() -> None:
        camera = listener.accept()[0]
        with camera, contextlib.suppress(OSError):
            camera.sendall(begin)
            while not over.wait(0.006):  # 4 MB/s, so that a busy reader is in time
                camera.sendall(line)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=describe)
        thread.start()
        try:
            error = refusal(f"rtsp://127.0.0.1:{listener.getsockname()[1]}/camera")
        finally:
            over.set()
            thread.join()
    assert "describes its streams in more than 256 KiB" in str(error)


def test_200_reconnects_leave_nothing_behind(live_cameras: LiveCameras) -> None:
    camera = live_cameras.rtsp(fps=30.0, key_frame_s=0.1)
    # GStreamer's server may send nothing to a client that comes while its last one leaves.
    viewer = opened(camera.uri())

    def reconnect(times: int) -> tuple[int, int, int]:
        for _ in range(times):
            source = opened(camera.uri())
            source.read()
            source.close()
        gc.collect()
        return memory_bytes(), entries("fd"), entries("task")

    reconnect(20)
    memory, files, threads = reconnect(20)
    after = reconnect(160)
    viewer.close()
    assert after[0] - memory < 5 << 20
    assert after[1] <= files + 2
    assert after[2] <= threads + 4


def test_failed_openings_leave_nothing_behind() -> None:

    def fail(times: int) -> tuple[int, int]:
        for _ in range(times):
            refusal("rtsp://127.0.0.1:9/live")
        gc.collect()
        return memory_bytes(), entries("fd")

    fail(20)
    memory, files = fail(20)
    after = fail(100)
    assert after[0] - memory < 5 << 20
    assert after[1] <= files + 2


def test_a_daemons_camera_comes_back(live_cameras: LiveCameras) -> None:
    camera = live_cameras.rtsp()
    daemons = Camera("front", camera.uri(), options=SourceOptions(reader="gstreamer"))
    daemons.start()

    def wait(state: CameraState) -> None:
        end = time.monotonic() + PATIENCE_S
        while daemons.state is not state:
            assert time.monotonic() < end, daemons.status
            daemons.next_frame(0.1)

    try:
        wait(CameraState.LIVE)
        camera.kill()
        wait(CameraState.LOST)
        camera.start()
        wait(CameraState.LIVE)
        assert daemons.reconnects == 1
    finally:
        daemons.stop()


# Own pipelines and devices


def test_the_end_of_a_file_is_the_end_and_it_plays_at_its_rate() -> None:
    source = opened("gst:videotestsrc num-buffers=10 ! video/x-raw,framerate=20/1,format=NV12")
    begin = time.monotonic()
    frames = list(itertools.takewhile(bool, iter(source.read, None)))
    assert len(frames) == 10
    assert time.monotonic() - begin > 0.3
    source.close()


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("gst:nosuchelement", 'no element "nosuchelement"'),
        ("gst:videotestsrc ! nonsense=3", "does not take the pipeline"),
        ("gst:videotestsrc ! fakesink", "write it without a sink, so that this runs: gst-launch"),
        ("gst:fakesrc num-buffers=1", "gst:fakesrc"),
        ("gst:audiotestsrc is-live=true", "gst:audiotestsrc"),
        ("csi://0", "needs a Jetson"),
        ("/dev/video77", "/dev/video77: no such device; check the camera's plug"),
    ],
)
def test_what_cannot_be_opened_says_why(uri: str, words: str) -> None:
    assert words in str(refusal(uri))


# A video device: v4l2src is real, the kernel's side of its system calls is a stand-in.


@pytest.fixture(scope="module")
def v4l2_stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc here: the stand-in for a video device is compiled with it")
    source = Path(__file__).parents[1] / "support/live_cameras/v4l2_stand_in.c"
    library = tmp_path_factory.mktemp("v4l2") / "v4l2_stand_in.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def webcam(library: Path, query: str = "", **variables: str) -> list[dict[str, Any]]:
    """What a process reads of the stand-in: ten frames, or the error that it ends with."""
    program = f"""
import json
from edge_server.cameras.gstreamer import open_gstreamer
from edge_server.cameras.source_uri import NO_OPTIONS
from edge_server.cameras.source_uri import parse_source_uri
from edge_server.errors import SourceError
try:
    source = open_gstreamer(parse_source_uri("v4l2:///dev/video77{query}"), NO_OPTIONS)
    for _ in range(10):
        frame = source.read()
        image = frame.image
        print(json.dumps(dict(
            form=image.pixel_format.value, size=[image.width, image.height],
            luma=int(image.luma()[0, 0]), clock=frame.clock, mono_ns=frame.capture_mono_ns,
            uncertainty_ns=frame.uncertainty_ns,
        )))
    source.close()
except SourceError as error:
    print(json.dumps(dict(reason=error.reason, text=str(error))))
"""
    environment = {**os.environ, **variables, "LD_PRELOAD": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_webcam_gives_its_own_pixels_with_the_drivers_time(v4l2_stand_in: Path) -> None:
    frames = webcam(v4l2_stand_in, "?fps=15")
    assert len(frames) == 10
    assert {(each["form"], tuple(each["size"])) for each in frames} == {("yuy2", (640, 480))}
    assert {each["clock"] for each in frames} == {"sensor"}
    assert {each["uncertainty_ns"] for each in frames} == {1_000_000_000 // 15}
    lumas = [each["luma"] for each in frames]
    assert lumas == sorted(set(lumas))
    captures = [each["mono_ns"] for each in frames]
    assert captures == sorted(set(captures))


@pytest.mark.parametrize(
    ("query", "variable", "reason", "words"),
    [
        ("", "EDGE_V4L2_BUSY", "unavailable", "another program uses the device"),
        ("", "EDGE_V4L2_NO_BANDWIDTH", "unavailable", "no bandwidth left"),
        ("", "EDGE_V4L2_FRAMES", "lost", "it was unplugged"),
        ("?width=1280&height=720", "HARMLESS", "unavailable", "it has: YUY2 640 x 480, 30 fps"),
        ("?format=mjpeg", "HARMLESS", "unavailable", "the device has no JPEG; it has: YUY2"),
    ],
)
def test_a_webcam_that_gives_nothing_says_why(
    v4l2_stand_in: Path, query: str, variable: str, reason: str, words: str
) -> None:
    last = webcam(v4l2_stand_in, query, **{variable: "5"})[-1]
    assert last["reason"] == reason
    assert words in str(last["text"])


def test_a_pipeline_without_an_end_does_not_crash_python() -> None:
    """Nobody closes it: its threads must stop before the interpreter does."""
    program = (
        "from edge_server.cameras.source import open_source\n"
        "source = open_source('gst:videotestsrc is-live=true ! video/x-raw,format=NV12')\n"
        "frame = source.read()\n"
        "raise SystemExit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 3, done.stderr


def test_a_flag_is_set_where_the_version_of_an_element_has_it() -> None:
    text = f"videotestsrc is-live=true ! identity name=old ! identity name=new ! {SINK}"
    flags = {"old": "enable-max-performance", "new": "drop-allocation", "absent": "any"}
    uri = parse_source_uri("gst:it")
    stream = GstreamerStream(uri, CameraPipeline(text, where_known=flags))
    try:
        assert stream._pipeline.get_by_name("new").get_property("drop-allocation")
        wait_until(lambda: stream.grab(0.1))
    finally:
        stream.close()


def test_auto_takes_gstreamer_where_it_is_there() -> None:
    source = open_source(own("format=NV12,width=64,height=64,framerate=30/1"))
    assert type(source.stream).__name__ == "GstreamerStream"  # type: ignore[attr-defined]  # this source has it
    source.close()


def test_doctor_learns_what_is_missing() -> None:
    found = report()
    assert "GStreamer 1." in found["version"]
    assert "nvarguscamerasrc" in found["lacking"]["csi"]
    assert not {"rtsp", "http", "v4l2"} & set(found["lacking"])
    assert found["decoders"]["H.265"] == "avdec_h265"
