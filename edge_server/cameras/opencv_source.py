"""A live camera read by OpenCV: deadlines, faults, capture times; see `OpenCvSource`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal, Protocol

import cv2

from edge_server.cameras.frame import Frame
from edge_server.cameras.gstreamer_timestamps import TimestampMapper
from edge_server.errors import SourceError
from edge_server.pixels import Image

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from edge_server.cameras.jpeg import JpegDecoder

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
