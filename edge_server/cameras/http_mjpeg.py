"""A camera that sends JPEGs over HTTP, read without a video library: OpenCV decodes them.

Unlike FFmpeg it decodes no more pixels than the model needs, notices a damaged JPEG and a new size,
skips what is no longer new, and is bounded in time and memory whatever the server sends.
"""

from __future__ import annotations

import http.client
import io
import select
import time
from email.message import Message
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urljoin

from edge_server.cameras.frame import Frame
from edge_server.cameras.jpeg import JpegDecoder
from edge_server.cameras.multipart import MultipartError, MultipartParser
from edge_server.cameras.network_probe import (
    Response,
    SilentError,
    authorization,
    connect,
    connection_fault,
    fault_of_response,
    place_of,
    target_of,
)
from edge_server.cameras.source_uri import parse_source_uri
from edge_server.errors import SourceError
from edge_server.pixels import Image

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from edge_server.cameras.source import SourceOptions
    from edge_server.cameras.source_uri import Credentials, SourceUri

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
_CHUNK_BYTES = 2**18
# An older image is skipped where the next one is already here; for so many at a time.
_MOST_SKIPPED = 30
_MOST_REDIRECTS = 3
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MOST_DAMAGED = 10


class Stream(Protocol):
    """The body of a response."""

    def receive(self, timeout_s: float) -> bytes:
        """Return the next bytes; b"" at the end of the stream.

        Raises:
            TimeoutError: none came in time.
            OSError: the connection broke.
        """
        ...

    def ready(self) -> bool:
        """Return whether more bytes are here already."""
        ...

    def close(self) -> None: ...


def open_http(uri: SourceUri, options: SourceOptions) -> HttpMjpegSource:
    """Open a camera and read its first frame.

    Raises:
        SourceError: the camera delivers no frame; the text names the cause and the next step.
    """
    until = time.monotonic() + _OPEN_S
    credentials = uri.credentials or options.credentials
    stream, boundary = _open(uri, credentials, until)
    try:
        parser = MultipartParser(boundary)
        return HttpMjpegSource(stream, parser, uri.label, JpegDecoder(uri.label, options.useful))
    except MultipartError as error:
        stream.close()
        raise SourceError(f"{uri.label}: {error}", reason="no_decoder") from error


def _open(uri: SourceUri, credentials: Credentials | None, until: float) -> tuple[Stream, bytes]:
    """Return the body of the camera's stream, and its boundary; follow redirects."""
    authorized, at = "", uri
    for _ in range(2 * _MOST_REDIRECTS):
        try:
            stream = _HttpStream(connect(at, until), at, authorized, until)
        except OSError as error:
            raise connection_fault(at, error) from error
        except http.client.HTTPException:
            raise fault_of_response(at, credentials, Response("", 0, "", "")) from None
        response = stream.response
        kind = Message()
        kind["Content-Type"] = response.getheader("Content-Type", "")
        boundary = kind.get_param("boundary")
        if response.status == 200 and kind.get_content_maintype() == "multipart":
            if isinstance(boundary, str):
                return stream, boundary.encode("latin-1", "replace")
            boundary = None
        stream.close()
        place = response.getheader("Location")
        if response.status in _REDIRECTS and place:
            at, credentials = _redirected(uri, at, place, credentials)
            authorized = ""
            continue
        if response.status == 401 and credentials is not None and not authorized:
            challenges = response.headers.get_all("WWW-Authenticate", [])
            header = authorization(challenges, credentials, "GET", target_of(at))
            if header:
                authorized = f"Authorization: {header}\r\n"
                continue
        raise _refusal(uri, credentials, response)
    raise SourceError(
        f"{uri.label}: the camera redirects again and again; look up the path of its MJPEG stream",
        reason="not_found",
    )


def _redirected(
    uri: SourceUri, at: SourceUri, place: str, credentials: Credentials | None
) -> tuple[SourceUri, Credentials | None]:
    """Return where `place` leads to; another host gets no password."""
    try:
        to = parse_source_uri(urljoin(at.address(), place))
    except (SourceError, ValueError):
        to = None
    if to is None or to.scheme not in {"http", "https"} or not to.host:
        raise SourceError(
            f"{uri.label}: the camera redirects to what is no http:// address; look up the path of "
            "its MJPEG stream in its manual",
            reason="not_found",
        )
    same = (to.host, to.scheme) in {(at.host, at.scheme), (at.host, "https")}
    return to, to.credentials or (credentials if same else None)


def _refusal(
    uri: SourceUri, credentials: Credentials | None, response: http.client.HTTPResponse
) -> SourceError:
    kind = response.getheader("Content-Type", "").partition(";")[0].strip()
    if response.status == 200 and kind.startswith(("video/", "image/", "multipart/")):
        return SourceError(
            f"{uri.label}: this is {kind!r:.60}, no stream of JPEGs (multipart/x-mixed-replace); "
            "look up the path of its MJPEG stream in its manual, or use its rtsp:// stream",
            reason="no_decoder",
        )
    head = f"HTTP/1.1 {response.status} {response.reason}\r\n{response.headers}"
    return fault_of_response(uri, credentials, Response("HTTP", response.status, head, ""))


class _TimedSocket(io.RawIOBase):
    """Reads a socket until a moment, however slowly its bytes come."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self.until = until
        self._socket = connection

    def makefile(self, _mode: str) -> io.BufferedReader:
        """Return the file that `http.client` reads."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self.until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._socket.settimeout(left_s)
        return self._socket.recv_into(buffer)


class _HttpStream:
    """One GET and the body of its response; a Stream.

    Raises:
        OSError: no response came.
        http.client.HTTPException: what came is no response of HTTP.
    """

    def __init__(
        self, connection: socket.socket, uri: SourceUri, authorized: str, until: float
    ) -> None:
        self._socket = connection
        self._timed = _TimedSocket(connection, until)
        # HTTP/1.0: the body is not chunked.
        request = f"GET {target_of(uri)} HTTP/1.0\r\nHost: {place_of(uri)}\r\n{authorized}"
        try:
            connection.settimeout(max(until - time.monotonic(), 1e-3))
            connection.sendall(f"{request}User-Agent: edge-server\r\n\r\n".encode())
            file: Any = self._timed  # of a socket, a response needs nothing but `makefile`
            self.response = http.client.HTTPResponse(file, method="GET")
            self.response.begin()
        except BaseException as error:
            connection.close()
            if isinstance(error, TimeoutError):
                raise SilentError from error
            raise

    def receive(self, timeout_s: float) -> bytes:
        self._timed.until = time.monotonic() + timeout_s
        try:
            return self.response.read1(_CHUNK_BYTES)
        except http.client.HTTPException as error:
            raise ConnectionResetError(str(error)) from error

    def ready(self) -> bool:
        return bool(select.select([self._socket], [], [], 0)[0])

    def close(self) -> None:
        self.response.close()
        self._socket.close()


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
        stream: Stream,
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
        for _ in range(_MOST_DAMAGED):
            jpeg = self._newest()
            now_ns = self._monotonic_ns()
            decoded = self._decoder.decode(jpeg)
            if decoded is None:
                self.corrupt += 1
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
            f"{self._label}: {_MOST_DAMAGED} images one after another are damaged "
            f"({self._decoder.damage}); check cable and network, and the camera's bit rate",
            reason="corrupt",
        )

    def _newest(self) -> bytes:
        """Return the newest image that has come, and wait for one where none has."""
        jpeg = self._image(wait=True)
        assert jpeg is not None  # noqa: S101  # for the type checker: it waits or raises
        for _ in range(_MOST_SKIPPED):
            newer = self._image(wait=False)
            if newer is None:
                break
            jpeg = newer
            self.skipped += 1
        return jpeg

    def _image(self, *, wait: bool) -> bytes | None:
        """Return the next image; None where it is not here yet and `wait` is False."""
        if self._closed:
            raise SourceError(f"{self._label}: the camera is closed", reason="lost")
        try:
            while (jpeg := self._parser.pop()) is None:
                if not wait and not self._stream.ready():
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
