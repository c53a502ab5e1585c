"""The OpenCV reader of live cameras: RTSP through FFmpeg, V4L2 devices; MJPEG by `http_mjpeg`.

It needs nothing but OpenCV's wheel. What it cannot do, GStreamer can (`gstreamer.py` has the list):
frames are BGR, converted with BT.601 where the stream names no colours (OpenCV before 5: always,
which is wrong by up to 23 of 255 for BT.709); images of H.264 and H.265 that change their size in
the middle are scaled to their first size by OpenCV, which does not report it. JPEGs come as the
camera sent them, and `JpegDecoder` decodes them.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import cv2

from edge_server.cameras.frame import (
    LARGEST_PX,
    LARGEST_VIDEO_PX,
    PERIODS,
    PictureTooLarge,
    check_size,
)
from edge_server.cameras.http_mjpeg import open_http
from edge_server.cameras.jpeg import JpegDecoder
from edge_server.cameras.live_source import LiveSource, Picture
from edge_server.cameras.network import CameraSockets, addresses_of, find_fault
from edge_server.cameras.opencv_settings import ffmpeg_options, settle_opencv
from edge_server.cameras.v4l2 import FOURCC_NAMES, check_free, device_mode, fourcc_of
from edge_server.errors import SourceError
from edge_server.pixels import Image

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.cameras.frame import FrameSource
    from edge_server.cameras.source_uri import Credentials, SourceOptions, SourceUri

# What a camera has sent before it is read comes in a burst, which is skipped for so long at most.
_BACKLOG_S = 3.0
# An image that cannot be decoded costs one attempt, a closed connection all of them.
_ATTEMPTS = 3


class OpenCvStream:
    """An opened capture; a CameraStream.

    Args:
        capture: a cv2.VideoCapture.
        read_s: a read that takes longer has timed out.
        jpeg: decodes what `capture` retrieves; None where those are pixels.
    """

    seen = 0

    def __init__(
        self,
        capture: Any,
        read_s: float,
        *,
        jpeg: JpegDecoder | None = None,
        period_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.damaged = 0
        self.period_s = period_s
        self._capture = capture
        self._read_s = read_s
        self._jpeg = jpeg
        self._clock = clock

    def skip_backlog(self) -> None:
        """Grab until two frames follow each other at the camera's own pace."""
        begun = last = self._clock()
        last_ms, paced = None, 0
        while paced < 2 and last - begun < _BACKLOG_S and self._capture.grab():
            now, now_ms = self._clock(), self._capture.get(cv2.CAP_PROP_POS_MSEC)
            if last_ms is not None:
                paced = paced + 1 if now - last > 0.5e-3 * (now_ms - last_ms) else 0
            last, last_ms = now, now_ms

    def grab(self, timeout_s: float) -> bool:
        del timeout_s  # the capture has one
        for _ in range(_ATTEMPTS):
            begun = self._clock()
            if self._capture.grab():
                return True
            if self._clock() - begun >= 0.9 * self._read_s:
                return False
            self.damaged += 1
        raise SourceError(
            "the camera closed the stream, or sends images that cannot be decoded; it is opened "
            "again",
            reason="lost",
        )

    def retrieve(self) -> Picture:
        stamp_ns = int(1e6 * self._capture.get(cv2.CAP_PROP_POS_MSEC))
        found, pixels = self._capture.retrieve()
        if not found:
            raise ValueError("it cannot be decoded")
        if self._jpeg is None or (pixels.ndim == 3 and pixels.shape[2] == 3):
            return Picture(Image.of_bgr(pixels), stamp_ns)
        data = pixels.tobytes()
        image, size = self._jpeg.decode(data)
        return Picture(image, stamp_ns, size=size, jpeg=data)

    def close(self) -> None:
        self._capture.release()


log = logging.getLogger(__name__)

_OPEN_MS = 4000
# A camera is stalled after this, or after three periods of its rate, whichever is longer.
_READ_MS = 500
# A rate comes from the camera, and may be any number. A camera of one frame a second is still read,
# and opening takes no longer than a camera's readers may hang.
_LONGEST_READ_MS = 1800
# What V4L2 and FFmpeg call JPEG.
_JPEG_FOURCCS = frozenset({"MJPG", "JPEG", "mjpg", "jpeg"})
# FFmpeg's options are those of a process: for so long a camera waits for others with other ones.
_TURN_S = 1.0


def open_opencv(uri: SourceUri, options: SourceOptions) -> FrameSource:
    """Open a live camera and read its first frame.

    Raises:
        SourceError: the camera delivers no frame; the text names the cause and the next step.
    """
    settle_opencv()
    if uri.scheme == "v4l2":
        return _open_device(uri, JpegDecoder(uri.label, options.useful))
    if uri.scheme.startswith("http"):
        return open_http(uri, options)
    decoder = JpegDecoder(uri.label, options.useful)
    return _open_rtsp(uri, uri.credentials or options.credentials, decoder)


def _open_rtsp(
    uri: SourceUri, credentials: Credentials | None, decoder: JpegDecoder
) -> FrameSource:
    sockets = CameraSockets(addresses_of(uri))
    login = ""
    if credentials is not None:
        login = f"{quote(credentials.user, safe='')}:{quote(credentials.password, safe='')}"
    address = uri.address("transport", login=login)
    try:
        capture, read_ms = _open_stream(address, uri.query.get("transport") == "udp")
    except TimeoutError:
        raise uri.fault("cameras with other options are being opened; it is tried again") from None
    # FFmpeg may have followed a redirect to another host.
    if not (capture.isOpened() and sockets.connected()):
        capture.release()
        raise find_fault(uri, credentials)
    width, height = (
        int(capture.get(each)) for each in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT)
    )
    is_jpeg = _codec(capture) in _JPEG_FOURCCS and capture.set(cv2.CAP_PROP_FORMAT, -1)
    try:
        # A later image is scaled to this size. What its decoder takes for it, FFmpeg's limit of an
        # allocation bounds.
        check_size(width, height, LARGEST_PX if is_jpeg else LARGEST_VIDEO_PX)
    except PictureTooLarge as error:
        capture.release()
        raise uri.fault(str(error)) from None
    jpeg, read_s = decoder if is_jpeg else None, read_ms / 1e3
    stream = OpenCvStream(capture, read_s, jpeg=jpeg, period_s=read_s / PERIODS)
    stream.skip_backlog()
    try:
        return LiveSource(stream, uri, "rtp")
    except SourceError as error:
        # A camera that serves no more viewers, or a stream that cannot be decoded.
        if error.reason in {"lost", "unavailable"}:
            raise find_fault(uri, credentials) from error
        raise


def read_limit_ms(fps: float) -> int:
    """Return after how many milliseconds without a frame a camera that says `fps` is stalled."""
    if not 0 < fps < 1e3 * PERIODS / _READ_MS:
        return _READ_MS
    return int(min(1e3 * PERIODS / fps, _LONGEST_READ_MS))


def _ffmpeg(address: str, read_ms: int, open_ms: int = _OPEN_MS) -> Any:
    options = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, open_ms, cv2.CAP_PROP_READ_TIMEOUT_MSEC, read_ms]
    if hasattr(cv2, "CAP_PROP_N_THREADS"):  # since OpenCV 4.6
        # With more threads FFmpeg holds frames back, and a timeout counts for each of them.
        options += [cv2.CAP_PROP_N_THREADS, 1]
    return cv2.VideoCapture(address, cv2.CAP_FFMPEG, options)


def _open_stream(address: str, udp: bool) -> tuple[Any, int]:
    """Return the opened stream, and after how many milliseconds without a frame it is stalled.

    Raises:
        TimeoutError: the streams of other cameras take too long to open.
    """
    begun = time.monotonic()
    transport = {"rtsp_transport": "udp"} if udp else {}
    # Where the camera's description has the size, no frames are needed to find it out.
    with ffmpeg_options({**transport, "probesize": "32"}, _TURN_S):
        capture, read_ms = _ffmpeg(address, _READ_MS), _READ_MS
        longer_ms = read_limit_ms(capture.get(cv2.CAP_PROP_FPS))
        if longer_ms > read_ms:
            # The limit cannot be changed later.
            capture.release()
            read_ms = longer_ms
            capture = _ffmpeg(address, read_ms, _left_ms(begun))
    if capture.isOpened() and not capture.get(cv2.CAP_PROP_FRAME_WIDTH):
        capture.release()
        with ffmpeg_options(transport, _TURN_S):
            capture = _ffmpeg(address, read_ms, _left_ms(begun))
    return capture, read_ms


def _left_ms(begun: float) -> int:
    return max(_OPEN_MS - int(1e3 * (time.monotonic() - begun)), _READ_MS)


def _codec(capture: Any) -> str:
    return (
        int(capture.get(cv2.CAP_PROP_FOURCC)).to_bytes(4, "little", signed=False).decode("latin-1")
    )


def _open_device(uri: SourceUri, decoder: JpegDecoder) -> FrameSource:
    if "flip" in uri.query:
        raise uri.fault(
            "OpenCV's reader does not flip; remove flip, or install what GStreamer's "
            "reader needs (edge-server doctor)"
        )
    mode = device_mode(uri)
    check_free(uri.path, mode)
    capture: Any = cv2.VideoCapture(uri.path, cv2.CAP_V4L2)
    # The format first: the sizes and rates depend on it.
    capture.set(cv2.CAP_PROP_FOURCC, cv2.VideoWriter.fourcc(*fourcc_of(mode)))
    capture.set(cv2.CAP_PROP_FRAME_WIDTH, mode.size[0])
    capture.set(cv2.CAP_PROP_FRAME_HEIGHT, mode.size[1])
    capture.set(cv2.CAP_PROP_FPS, float(mode.fps))
    if not capture.isOpened():
        capture.release()
        check_free(uri.path, mode)
        raise uri.fault("OpenCV cannot open the camera; unplug it and plug it in again")
    given = _codec(capture)
    if FOURCC_NAMES.get(given) != mode.format:
        log.warning("%s: the camera gives %s, not %s", uri.label, given, fourcc_of(mode))
    is_jpeg = given in _JPEG_FOURCCS and capture.set(cv2.CAP_PROP_CONVERT_RGB, 0)
    jpeg, period_s = decoder if is_jpeg else None, 1 / float(mode.fps)
    stream = OpenCvStream(capture, 1.0, jpeg=jpeg, period_s=period_s)
    try:
        return LiveSource(stream, uri, "sensor", late_periods=1)
    except SourceError:
        # Another program may have taken the device in between.
        check_free(uri.path, mode)
        raise
