"""What OpenCV reads from the environment of the process: the same for files and for cameras."""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2

from edge_server.cameras.frame import LARGEST_VIDEO_PX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_OPTIONS = "OPENCV_FFMPEG_CAPTURE_OPTIONS"

_FFMPEG_QUIET = "-8"  # AV_LOG_QUIET
_OPENCV_SILENT = 0  # LOG_LEVEL_SILENT
# TCP: over UDP, each lost packet gives grey or smeared images; OpenCV's own preference for TCP is
# lost with any option here.
# What cameras and videos come in. A playlist would have FFmpeg open further files, itself again
# too; FFmpeg also plays pictures, and any text as ANSI art.
_CONTAINERS = (
    "rtsp,mov,matroska,avi,mpegts,mpeg,mpegvideo,m4v,flv,ogg,asf,rm,mxf,nut,dv,wtv,dhav,gif,ivf,"
    "h264,hevc,av1,obu,vc1,mjpeg,mpjpeg,yuv4mpegpipe"
)
# A track of an MP4 file takes memory for the frames that it only claims. Files of action cameras
# have five tracks.
MOST_TRACKS = 8
_FFMPEG_OPTIONS = {
    "rtsp_transport": "tcp",
    "format_whitelist": _CONTAINERS,
    "max_streams": str(MOST_TRACKS),
}
# No frames to guess the rate of a camera from: opening takes 0.6 s, not 1.9 s. Without them that of
# an MPEG transport stream is twice what it is.
_OF_CAMERAS = {"fpsprobesize": "0"}
# The largest piece of memory that FFmpeg takes at once: a picture as OpenCV gives it. Descriptions,
# tables and sizes that a camera or a file only claims, up to 2 GB, are refused.
_FFMPEG_MOST_BYTES = 3 * LARGEST_VIDEO_PX + 2**20
# OpenCV reads the options before it opens anything.
_OPTIONS_READ_S = 1.0
# The V4L2 backend waits in whole seconds, 10 by default.
_V4L2_WAIT_S = "1"


class _Openings:
    """The streams that FFmpeg opens now; all of them get the options of the process."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = 0
        self.options = self.base = os.environ.get(_OPTIONS, "")

    def begin(self, options: str, timeout_s: float) -> bool:
        """Wait until no stream opens with other options; return whether that came in time."""
        with self.changed:
            if not self.changed.wait_for(
                lambda: not self.count or self.options == options, timeout_s
            ):
                return False
            self.count += 1
            if self.options != options:
                self.options = os.environ[_OPTIONS] = options
            return True

    def end(self) -> None:
        with self.changed:
            self.count -= 1
            if not self.count:
                self.options = os.environ[_OPTIONS] = self.base
            self.changed.notify_all()


@lru_cache(maxsize=1)
def _openings() -> _Openings:
    """There is one environment in a process, and one of these."""
    return _Openings()


@contextmanager
def ffmpeg_options(options: Mapping[str, str], timeout_s: float) -> Iterator[None]:
    """Let a camera's stream that is opened within this context have `options`, and nobody else's.

    Raises:
        TimeoutError: streams with other options take too long to open.
    """
    settle_opencv()
    openings = _openings()
    given = dict(pair.partition(";")[::2] for pair in openings.base.split("|") if pair)
    wanted = {**given, **_OF_CAMERAS, **given, **options}
    if not openings.begin("|".join(f"{key};{wanted[key]}" for key in wanted), timeout_s):
        raise TimeoutError
    try:
        yield
    finally:
        openings.end()


@contextmanager
def no_camera_opens(timeout_s: float) -> Iterator[None]:
    """Let a file that is opened within this context have none of the options of cameras, unless
    those that open now take longer than `timeout_s`."""
    settle_opencv()
    openings = _openings()
    if not openings.begin(openings.base, timeout_s):
        yield
        return
    once = threading.Lock()

    def end() -> None:
        if once.acquire(blocking=False):
            openings.end()

    # A disk that hangs must keep no camera from opening.
    timer = threading.Timer(_OPTIONS_READ_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        end()


def settle_opencv() -> None:
    """Set what every opened file and camera of this process has in common; once or again.

    FFmpeg and OpenCV write nothing to stderr then: their lines must not mix with the log, and may
    quote a URI with its password.
    """
    given = os.environ.get(_OPTIONS, "")
    options = _FFMPEG_OPTIONS | dict(pair.partition(";")[::2] for pair in given.split("|") if pair)
    wanted = {
        _OPTIONS: "|".join(f"{key};{options[key]}" for key in options),
        "OPENCV_FFMPEG_LOGLEVEL": _FFMPEG_QUIET,
        "OPENCV_VIDEOIO_V4L_SELECT_TIMEOUT": _V4L2_WAIT_S,
    }
    if any(os.environ.get(key) != value for key, value in wanted.items()):
        os.environ.update(wanted)
    _bound_ffmpeg()
    if hasattr(cv2, "setLogLevel"):  # before OpenCV 5
        cv2.setLogLevel(_OPENCV_SILENT)
    else:
        cv2.utils.logging.setLogLevel(_OPENCV_SILENT)


@lru_cache(maxsize=1)
def _bound_ffmpeg() -> None:
    """Set FFmpeg's own limit of an allocation; OpenCV has no option for it."""
    maps = Path("/proc/self/maps").read_text("utf-8", "replace")
    for path in {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "libavutil" in line}:
        ctypes.CDLL(path).av_max_alloc(ctypes.c_size_t(_FFMPEG_MOST_BYTES))


def opencv_report() -> dict[str, Any]:
    """Return OpenCV's version, and which of the backends are there that read cameras."""
    there = set(cv2.videoio_registry.getBackends())
    known = (("FFmpeg", cv2.CAP_FFMPEG), ("V4L2", cv2.CAP_V4L2))
    return {
        "version": cv2.__version__,
        "backends": [name for name, backend in known if backend in there],
    }
