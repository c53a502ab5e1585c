"""A camera that sends JPEGs over HTTP, read without a video library: OpenCV decodes them.

Unlike FFmpeg it decodes no more pixels than the model needs, notices a damaged JPEG and a new size,
skips what is no longer new, and is bounded in time and memory whatever the server sends.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from edge_server.cameras.frame import Frame
from edge_server.cameras.http_stream import open_stream
from edge_server.cameras.jpeg import MOST_DAMAGED, JpegDecoder
from edge_server.cameras.multipart import MultipartError, MultipartParser
from edge_server.errors import SourceError
from edge_server.pixels import Image

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.cameras.http_stream import ByteStream
    from edge_server.cameras.source_uri import SourceOptions, SourceUri

_OPEN_S = 4.0
_FIRST_FRAME_S = 4.0
# A camera is stalled after this, or after so many periods of its rate, whichever is longer; its
# frames would come in a burst afterwards and look fresh.
_GAP_S = 0.5
_GAP_PERIODS = 3
# Before its rate is known; less than a camera's reader may hang.
_FIRST_GAP_S = 1.8
_KNOWN_AFTER = 3
_PERIOD_FRAMES = 10
# An older image is skipped where the next one is already here; for so many at a time.
_MOST_SKIPPED = 30
_LONGEST_SKIP_S = 0.2
# Damaged images alone are a fault after this, or after so many periods, whichever is longer: with
# the wait for one more it is less than a reader may hang.
_DAMAGED_S = 1.0
_DAMAGED_PERIODS = 2


def open_http(uri: SourceUri, options: SourceOptions) -> HttpMjpegSource:
    """Open a camera and read its first frame.

    Raises:
        SourceError: the camera delivers no frame; the text names the cause and the next step.
    """
    until = time.monotonic() + _OPEN_S
    credentials = uri.credentials or options.credentials
    stream, boundary = open_stream(uri, credentials, until)
    try:
        parser = MultipartParser(boundary)
        return HttpMjpegSource(stream, parser, uri.label, JpegDecoder(uri.label, options.useful))
    except MultipartError as error:
        stream.close()
        raise SourceError(f"{uri.label}: {error}", reason="no_decoder") from error


class HttpMjpegSource:
    """Reads an opened stream of JPEGs; a FrameSource.

    The first frame is read by the constructor, so that a camera that gives none raises there.

    Attributes:
        corrupt: number of images that were damaged, and not delivered.
        skipped: number of images that were not decoded, as a newer one was there.

    Args:
        stream: closed by `close`, and by the constructor where it raises.
        parser: of its parts.
        label: names the camera in errors.
        decoder: of its JPEGs.
        monotonic_ns: CLOCK_MONOTONIC.
        epoch_ns: Unix time.

    Raises:
        SourceError: no frame came.
    """

    def __init__(
        self,
        stream: ByteStream,
        parser: MultipartParser,
        label: str,
        decoder: JpegDecoder,
        *,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        epoch_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.corrupt = 0
        self.skipped = 0
        self._stream = stream
        self._parser = parser
        self._label = label
        self._decoder = decoder
        self._monotonic_ns = monotonic_ns
        self._epoch_ns = epoch_ns
        self._count = 0
        self._images = 0
        self._period_s = 0.0
        self._last_ns = monotonic_ns()
        self._closed = False
        try:
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
            self._stream.close()

    def _next(self) -> Frame:
        since_ns = self._monotonic_ns()
        damaged = 0
        while damaged < MOST_DAMAGED:
            jpeg = self._newest()
            now_ns = self._monotonic_ns()
            decoded = self._decoder.decode(jpeg)
            if decoded is None:
                self.corrupt += 1
                damaged += 1
                if (self._monotonic_ns() - since_ns) / 1e9 > self._damaged_limit_s():
                    break
                continue
            pixels, size = decoded
            image = Image.of_bgr(pixels)
            self._count += 1
            whole = size == (image.width, image.height)
            return Frame(
                self._count - 1,
                image,
                now_ns,
                self._epoch_ns() - (self._monotonic_ns() - now_ns),
                picture_size=None if whole else size,
                jpeg=jpeg,
            )
        raise SourceError(
            f"{self._label}: the last {damaged} images are all damaged ({self._decoder.damage}); "
            "check cable and network, and the camera's bit rate",
            reason="corrupt",
        )

    def _newest(self) -> bytes:
        """Return the newest image that has come, and wait for one where none has."""
        jpeg = self._image()
        assert jpeg is not None  # noqa: S101  # for the type checker: it waits or raises
        until_ns = self._monotonic_ns() + int(_LONGEST_SKIP_S * 1e9)
        for _ in range(_MOST_SKIPPED):
            newer = self._image(until_ns)
            if newer is None:
                break
            jpeg = newer
            self.skipped += 1
        return jpeg

    def _image(self, here_until_ns: int | None = None) -> bytes | None:
        """Return the next image; None where it is not here yet, or not all of it before
        `here_until_ns`. Without that, wait for it."""
        if self._closed:
            raise SourceError(f"{self._label}: the camera is closed", reason="lost")
        try:
            while (jpeg := self._parser.pop()) is None:
                if here_until_ns is not None and (
                    self._monotonic_ns() > here_until_ns or not self._stream.ready()
                ):
                    return None
                data = self._stream.receive(self._left_s())
                if not data:
                    raise SourceError(
                        f"{self._label}: the camera closed the stream; it is opened again",
                        reason="lost",
                    )
                self._parser.feed(data)
        except MultipartError as error:
            raise SourceError(
                f"{self._label}: {error}; set a lower resolution in the camera, or restart it",
                reason="corrupt",
            ) from error
        except TimeoutError:
            raise self._silence() from None
        except OSError as error:
            raise SourceError(
                f"{self._label}: the connection broke: {error.strerror or error}; it is opened "
                "again",
                reason="lost",
            ) from error
        self._note_arrival()
        return jpeg

    def _damaged_limit_s(self) -> float:
        if not self._count:
            return _FIRST_FRAME_S
        return max(_DAMAGED_S, _DAMAGED_PERIODS * self._period_s)

    def _note_arrival(self) -> None:
        now_ns = self._monotonic_ns()
        if self._images:
            gap_s = (now_ns - self._last_ns) / 1e9
            self._period_s += (gap_s - self._period_s) / min(self._images, _PERIOD_FRAMES)
        self._images += 1
        self._last_ns = now_ns

    def _limit_s(self) -> float:
        if not self._images:
            return _FIRST_FRAME_S
        if self._images < _KNOWN_AFTER:
            return _FIRST_GAP_S
        return max(_GAP_S, _GAP_PERIODS * self._period_s)

    def _left_s(self) -> float:
        """Return how long the next image may still take.

        Raises:
            TimeoutError: no longer: a server that sends byte after byte gets no more time.
        """
        left_s = self._limit_s() - (self._monotonic_ns() - self._last_ns) / 1e9
        if left_s <= 0:
            raise TimeoutError
        return left_s

    def _silence(self) -> SourceError:
        if not self._images:
            return SourceError(
                f"{self._label}: no image within {_FIRST_FRAME_S:g} s, though the camera was "
                "opened; restart the camera",
                reason="unavailable",
            )
        waited_s = (self._monotonic_ns() - self._last_ns) / 1e9
        return SourceError(
            f"{self._label}: no frame for {waited_s:.1f} s; the camera is opened again",
            reason="stalled",
        )
