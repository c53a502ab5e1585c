"""The OpenCV reader of live cameras: RTSP through FFmpeg, V4L2 devices; MJPEG by `http_mjpeg`.

It needs nothing but OpenCV's wheel. What it cannot do, GStreamer can (`readers.py` has the list):
frames are BGR, converted with BT.601 where the stream names no colours (OpenCV before 5: always,
which is wrong by up to 23 of 255 for BT.709); images of H.264 and H.265 that change their size in
the middle are scaled to their first size by OpenCV, which does not report it. JPEGs come as the
camera sent them, and `JpegDecoder` decodes them.
"""

from __future__ import annotations

import logging
import time
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import quote

import cv2

from edge_server.cameras.frame import Frame, PictureTooLarge, TimestampMapper, check_size
from edge_server.cameras.gstreamer_pipelines import V4L2_FORMATS, best_mode
from edge_server.cameras.http_mjpeg import open_http
from edge_server.cameras.jpeg import JpegDecoder
from edge_server.cameras.network import CameraSockets, addresses_of, find_fault
from edge_server.cameras.opencv_settings import ffmpeg_options, settle_opencv
from edge_server.cameras.v4l2 import FOURCC_NAMES, check_free, fourcc_of, read_device
from edge_server.errors import SourceError
from edge_server.pixels import Image
from edge_server.process.logs import log_once

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from edge_server.cameras.frame import FrameSource
    from edge_server.cameras.gstreamer_pipelines import VideoMode
    from edge_server.cameras.source_uri import Credentials, SourceOptions, SourceUri

# What a camera has sent before it is read comes in a burst, which is skipped for so long at most.
_BACKLOG_S = 3.0
# An image that cannot be decoded costs one attempt, a closed connection all of them.
_ATTEMPTS = 3


class Capture(Protocol):
    """The part of cv2.VideoCapture that reads."""

    def grab(self) -> bool: ...

    def retrieve(self) -> tuple[bool, NDArray[Any]]: ...

    def get(self, prop: int) -> float: ...

    def release(self) -> None: ...


class OpenCvSource:
    """Reads an opened camera; a FrameSource.

    What the camera sent before it was read is skipped, and the first frame is read, by the
    constructor, so that a camera that gives none raises there.

    Attributes:
        corrupt: number of images that could not be decoded.

    Args:
        capture: opened; released by `close`, and by the constructor where it raises.
        label: names the camera in errors.
        clock: what POS_MSEC means: `rtp` is the stream's pace, `sensor` the driver's
            CLOCK_MONOTONIC.
        gap_s: a read that takes longer raises: frames would come in a burst and look fresh.
        late_ns: uncertainty of the capture time.
        first_frame_s: how long the first frame may take, where that is longer.
        jpeg: decodes what `capture` retrieves; None where those are pixels.
        monotonic_ns: CLOCK_MONOTONIC.
        epoch_ns: Unix time.

    Raises:
        SourceError: no frame came.
    """

    def __init__(
        self,
        capture: Capture,
        label: str,
        clock: Literal["rtp", "sensor"],
        *,
        gap_s: float,
        late_ns: int = 0,
        first_frame_s: float = 0.0,
        jpeg: JpegDecoder | None = None,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        epoch_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.corrupt = 0
        self._capture = capture
        self._label = label
        self._stamps = TimestampMapper(clock)
        self._gap_s = gap_s
        self._late_ns = late_ns
        self._jpeg = jpeg
        self._monotonic_ns = monotonic_ns
        self._epoch_ns = epoch_ns
        self._count = 0
        self._size: tuple[int, int] | None = None
        self._closed = False
        self._first_until_ns = monotonic_ns() + int(first_frame_s * 1e9)
        try:
            if clock == "rtp":
                self._skip_backlog()
            self._first: Frame | None = self._next()
        except BaseException:
            self.close()
            raise

    def read(self) -> Frame | None:
        first, self._first = self._first, None
        return self._next() if first is None else first

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._capture.release()

    def _skip_backlog(self) -> None:
        """Grab until two frames follow each other at the camera's own pace."""
        begun_ns = last_ns = self._monotonic_ns()
        last_ms, paced = None, 0
        while paced < 2 and last_ns - begun_ns < _BACKLOG_S * 1e9:
            now_ns = self._grab()
            now_ms = self._capture.get(cv2.CAP_PROP_POS_MSEC)
            if last_ms is not None:
                at_pace = now_ns - last_ns > 0.5e6 * (now_ms - last_ms)
                paced = paced + 1 if at_pace else 0
            last_ns, last_ms = now_ns, now_ms

    def _next(self) -> Frame:
        for _ in range(_ATTEMPTS):
            now_ns = self._grab()
            stamp_ns = int(1e6 * self._capture.get(cv2.CAP_PROP_POS_MSEC))
            found, pixels = self._capture.retrieve()
            is_picture = pixels is not None and pixels.ndim == 3 and pixels.shape[2] == 3
            if found and (self._jpeg is None or is_picture):
                return self._frame(pixels, (pixels.shape[1], pixels.shape[0]), now_ns, stamp_ns)
            if found and self._jpeg is not None:
                data = pixels.tobytes()
                decoded = self._jpeg.decode(data)
                if decoded is not None:
                    return self._frame(*decoded, now_ns, stamp_ns, data)
            self.corrupt += 1
        raise SourceError(
            f"{self._label}: {_ATTEMPTS} images one after another cannot be decoded; check cable "
            "and network, and the camera's bit rate",
            reason="corrupt",
        )

    def _grab(self) -> int:
        """Grab the next frame; return its time of arrival.

        Raises:
            SourceError: none came in time.
        """
        if self._closed:
            raise SourceError(f"{self._label}: the camera is closed")
        attempts = _ATTEMPTS
        while attempts:
            begun_ns = self._monotonic_ns()
            found = self._capture.grab()
            now_ns = self._monotonic_ns()
            waited_s = (now_ns - begun_ns) / 1e9
            if waited_s >= 0.9 * self._gap_s and now_ns < self._first_until_ns:
                # The next key frame, which a decoder needs first, may be seconds away.
                if found:
                    return now_ns
                continue
            # After a timeout FFmpeg first gives frames that its decoder still holds.
            if waited_s >= 0.9 * self._gap_s:
                raise SourceError(
                    f"{self._label}: no frame for {waited_s:.1f} s; the camera is opened again",
                    reason="stalled",
                )
            if found:
                self._first_until_ns = 0
                return now_ns
            self.corrupt += 1
            attempts -= 1
        raise SourceError(
            f"{self._label}: the camera closed the stream, or sends images that cannot be decoded; "
            "it is opened again",
            reason="lost",
        )

    def _frame(
        self,
        pixels: NDArray[Any],
        size: tuple[int, int],
        now_ns: int,
        stamp_ns: int,
        jpeg: bytes | None = None,
    ) -> Frame:
        if self._size is not None and size != self._size:
            raise SourceError(
                "{}: the image changed from {} x {} to {} x {}; the camera is opened again".format(
                    self._label, *self._size, *size
                ),
                reason="changed",
            )
        self._size = size
        capture = self._stamps.map(now_ns, stamp_ns)
        self._count += 1
        image = Image.of_bgr(pixels)
        return Frame(
            self._count - 1,
            image,
            capture.mono_ns,
            self._epoch_ns() - (now_ns - capture.mono_ns),
            capture.clock,
            self._late_ns if capture.clock == "sensor" else 0,
            picture_size=None if size == (image.width, image.height) else size,
            jpeg=jpeg,
        )


log = logging.getLogger(__name__)

_OPEN_MS = 4000
# A camera is stalled after this, or after so many periods of its rate, whichever is longer.
_READ_MS = 500
_GAP_PERIODS = 3
# A rate comes from the camera, and may be any number. A camera of one frame a second is still read,
# and opening takes no longer than a camera's readers may hang.
_LONGEST_READ_MS = 1800
# What V4L2 and FFmpeg call JPEG.
_JPEG_FOURCCS = frozenset({"MJPG", "JPEG", "mjpg", "jpeg"})
# Cameras send a key frame every one to four seconds.
_KEY_FRAME_S = 4.0
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
        raise SourceError(
            f"{uri.label}: cameras with other options are being opened; it is tried again",
            reason="unavailable",
        ) from None
    # FFmpeg may have followed a redirect to another host.
    if not (capture.isOpened() and sockets.connected()):
        capture.release()
        raise find_fault(uri, credentials)
    width, height = (
        int(capture.get(each)) for each in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT)
    )
    try:
        # A later image is scaled to this size, by a decoder that unpacks one at a time.
        check_size(width, height)
    except PictureTooLarge as error:
        capture.release()
        raise SourceError(f"{uri.label}: {error}", reason="unavailable") from None
    is_jpeg = _codec(capture) in _JPEG_FOURCCS and capture.set(cv2.CAP_PROP_FORMAT, -1)
    decode = decoder if is_jpeg else None
    try:
        return OpenCvSource(
            capture,
            uri.label,
            "rtp",
            gap_s=read_ms / 1e3,
            first_frame_s=_KEY_FRAME_S,
            jpeg=decode,
        )
    except SourceError as error:
        # A camera that serves no more viewers, or a stream that cannot be decoded.
        if error.reason in {"lost", "stalled"}:
            raise find_fault(uri, credentials) from error
        raise


def read_limit_ms(fps: float) -> int:
    """Return after how many milliseconds without a frame a camera that says `fps` is stalled."""
    if not 0 < fps < 1e3 * _GAP_PERIODS / _READ_MS:
        return _READ_MS
    return int(min(1e3 * _GAP_PERIODS / fps, _LONGEST_READ_MS))


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
        raise SourceError(
            f"{uri.label}: OpenCV's reader does not flip; remove flip, or install what GStreamer's "
            "reader needs (edge-server doctor)",
            reason="unavailable",
        )
    device = read_device(uri.path)
    if device is None or not device.modes:
        raw = f"; it offers {', '.join(device.other_formats)}" if device else ""
        raise SourceError(
            f"{uri.label}: gives no images that can be read{raw}; edge-server cameras list shows "
            "the devices that do, and a CSI sensor is csi://0",
            reason="no_decoder",
        )
    mode = wanted_mode(uri, device.modes)
    log_once(log, f"{uri.label}: {device.name} takes {mode}, of {len(device.modes)} modes")
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
        raise SourceError(
            f"{uri.label}: OpenCV cannot open the camera; unplug it and plug it in again",
            reason="unavailable",
        )
    given = _codec(capture)
    if FOURCC_NAMES.get(given) != mode.format:
        log.warning("%s: the camera gives %s, not %s", uri.label, given, fourcc_of(mode))
    is_jpeg = given in _JPEG_FOURCCS and capture.set(cv2.CAP_PROP_CONVERT_RGB, 0)
    late_ns = int(1e9 / float(mode.fps))
    jpeg = decoder if is_jpeg else None
    try:
        return OpenCvSource(capture, uri.label, "sensor", gap_s=1.0, late_ns=late_ns, jpeg=jpeg)
    except SourceError:
        # Another program may have taken the device in between.
        check_free(uri.path, mode)
        raise


def wanted_mode(uri: SourceUri, modes: tuple[VideoMode, ...]) -> VideoMode:
    """Return the best of a device's modes that the URI allows.

    Raises:
        SourceError: the device has no such mode; the text lists what it has.
    """
    fps = uri.fps()
    try:
        return best_mode(
            modes,
            uri.whole("width", 0, 0, 16384),
            uri.whole("height", 0, 0, 16384),
            Fraction(0) if fps is None else Fraction(fps).limit_denominator(1001),
            V4L2_FORMATS.get(uri.query.get("format", ""), ""),
        )
    except SourceError as error:
        raise SourceError(f"{uri.label}: {error}", reason=error.reason) from error
