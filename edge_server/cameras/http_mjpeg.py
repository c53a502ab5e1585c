"""A camera that sends JPEGs over HTTP, read without a video library: OpenCV decodes them.

Unlike FFmpeg it decodes no more pixels than the model needs, notices a damaged JPEG and a new size,
skips what is no longer new, and is bounded in time and memory whatever the server sends.
"""

from __future__ import annotations

import http.client
import io
import re
import select
import time
from email.message import Message
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urljoin, urlsplit

from edge_server.cameras.frame import Frame
from edge_server.cameras.jpeg import MOST_DAMAGED, JpegDecoder
from edge_server.cameras.network import (
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

    from edge_server.cameras.source_uri import Credentials, SourceOptions, SourceUri

# JPEGs of 8K are smaller; a camera that never ends a part costs no more memory than this.
LONGEST_PART_BYTES = 2**25
_LONGEST_HEAD_BYTES = 8192
_LENGTH = re.compile(rb"(?im)^content-length[ \t]*:[ \t]*(\d{1,12})[ \t]*\r?$")
_HEAD_END = re.compile(rb"\r?\n\r?\n")


class MultipartError(ValueError):
    """The stream has no parts, or one that is too long; the text says which."""


class MultipartParser:
    """Cuts a stream into its parts; holds at most one part and what was fed last.

    Args:
        boundary: of the Content-Type. Cameras write it with and without its two leading hyphens.

    Raises:
        MultipartError: the boundary is empty.
    """

    def __init__(self, boundary: bytes) -> None:
        name = boundary.strip().strip(b'"').lstrip(b"-")
        if not name:
            raise MultipartError("its boundary is empty")
        self._delimiter = b"--" + name
        self._data = bytearray()
        self._scanned = 0
        self._useless = 0  # bytes since the last part
        self._begin: int | None = None  # of the body
        self._length: int | None = None

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self._data += data

    def pop(self) -> bytes | None:
        """Return the body of the next part; None until the stream has brought it.

        Raises:
            MultipartError: a part, or what comes before it, is longer than
                `LONGEST_PART_BYTES`, or its head never ends.
        """
        if self._begin is None and not self._find_body():
            return None
        assert self._begin is not None  # noqa: S101  # for the type checker: it was found
        if self._length is not None:
            end = self._begin + self._length
            if len(self._data) < end:
                return None
        else:
            end = self._data.find(self._delimiter, max(self._begin, self._scanned))
            if end < 0:
                self._scanned = max(0, len(self._data) - len(self._delimiter))
                self._limit(len(self._data) - self._begin)
                return None
        body = bytes(memoryview(self._data)[self._begin : end])
        del self._data[:end]
        self._scanned, self._begin, self._length = 0, None, None
        return body

    def _find_body(self) -> bool:
        at = self._data.find(self._delimiter, self._scanned)
        if at < 0:
            # What comes between two parts is of no use.
            useless = max(0, len(self._data) - len(self._delimiter))
            del self._data[:useless]
            self._scanned = 0
            self._useless += useless
            if self._useless > LONGEST_PART_BYTES:
                raise MultipartError(f"no image begins within {LONGEST_PART_BYTES >> 20} MiB")
            return False
        end = _HEAD_END.search(self._data, at)
        if end is None:
            self._scanned = at
            if len(self._data) - at > _LONGEST_HEAD_BYTES:
                raise MultipartError("the head of an image never ends")
            return False
        length = _LENGTH.search(self._data, at, end.end())
        self._length = None if length is None else int(length[1])
        self._limit(self._length or 0)
        self._begin = self._scanned = end.end()
        self._useless = 0
        return True

    def _limit(self, part_bytes: int) -> None:
        if part_bytes > LONGEST_PART_BYTES:
            raise MultipartError(f"an image has more than {LONGEST_PART_BYTES >> 20} MiB")


_CHUNK_BYTES = 2**18
_MOST_REDIRECTS = 3
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# A record of TLS may not be complete yet.
_READY_S = 0.05
_SIZE = re.compile(rb"[0-9A-Fa-f]{1,8}")
_LONGEST_LINE_BYTES = 4096


class ByteStream(Protocol):
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


def open_stream(
    uri: SourceUri, credentials: Credentials | None, until: float
) -> tuple[ByteStream, bytes]:
    """Return the body of the camera's stream, and its boundary; follow redirects.

    Args:
        uri: of the camera.
        credentials: for it; no other host gets them.
        until: `time.monotonic()` by which the response has to be there.

    Raises:
        SourceError: there is no such stream; the text names the cause and the next step.
    """
    authorized, at, here = "", uri, False
    for _ in range(2 * _MOST_REDIRECTS):
        try:
            connection = connect(at, until)
            if at is uri:
                here = _leads_here(connection)
            elif _leads_here(connection) and not here:
                # What listens here trusts this device more than it trusts a camera.
                connection.close()
                raise _no_stream(uri, "redirects to this device itself")
            stream = _HttpStream(connection, at, authorized, until)
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
    raise _no_stream(uri, "redirects again and again")


def _redirected(
    uri: SourceUri, at: SourceUri, place: str, credentials: Credentials | None
) -> tuple[SourceUri, Credentials | None]:
    """Return where `place` leads to; another host gets no password."""
    try:
        place = urljoin(at.address(), place)
        # It is shown to people: without control characters. A password would be a secret of ours.
        known = place.isprintable() and "@" not in urlsplit(place).netloc
        to = parse_source_uri(place) if known else None
    except (SourceError, ValueError):
        to = None
    if to is None or to.scheme not in {"http", "https"} or not to.host:
        raise _no_stream(uri, "redirects to what is no http:// address")
    same = (to.host, to.scheme) in {(at.host, at.scheme), (at.host, "https")}
    return to, credentials if same else None


def _leads_here(connection: socket.socket) -> bool:
    """Return whether the other end of `connection` is on this device."""
    peer = connection.getpeername()[0]
    return peer == connection.getsockname()[0] or ip_address(peer.partition("%")[0]).is_loopback


def _no_stream(uri: SourceUri, what: str) -> SourceError:
    return SourceError(
        f"{uri.label}: the camera {what}; look up the path of its MJPEG stream in its manual",
        reason="not_found",
    )


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


class Chunks:
    """Takes the framing off a chunked body (RFC 9112, 7.1).

    Attributes:
        ended: the last chunk has come.
    """

    def __init__(self) -> None:
        self.ended = False
        self._line = bytearray()
        self._left = 0  # of the present chunk, bytes

    def feed(self, data: bytes) -> bytes:
        """Return the part of the body that is in the next bytes.

        Raises:
            ConnectionResetError: these are no chunks.
        """
        body, at = bytearray(), 0
        while at < len(data) and not self.ended:
            if self._left:
                piece = data[at : at + self._left]
                body += piece
                at += len(piece)
                self._left -= len(piece)
                continue
            end = data.find(b"\n", at) + 1
            self._line += data[at : end or None]
            at = end or len(data)
            if len(self._line) > _LONGEST_LINE_BYTES:
                raise ConnectionResetError("its chunks have no length")
            if end:
                self._begin(bytes(self._line).partition(b";")[0].strip())
                self._line.clear()
        return bytes(body)

    def _begin(self, size: bytes) -> None:
        """Begin a chunk; the line is empty where it ends the chunk before."""
        if not size:
            return
        if _SIZE.fullmatch(size) is None:
            raise ConnectionResetError("its chunks have no length")
        self._left = int(size, 16)
        self.ended = not self._left


class _HttpStream:
    """One GET and the body of its response; a ByteStream.

    Raises:
        OSError: no response came.
        http.client.HTTPException: what came is no response of HTTP.
    """

    def __init__(
        self, connection: socket.socket, uri: SourceUri, authorized: str, until: float
    ) -> None:
        self._socket = connection
        self._timed = _TimedSocket(connection, until)
        # HTTP/1.0: a body is not chunked; servers of some cameras do so all the same.
        request = f"GET {target_of(uri)} HTTP/1.0\r\nHost: {place_of(uri)}\r\n{authorized}"
        try:
            connection.settimeout(max(until - time.monotonic(), 1e-3))
            connection.sendall(f"{request}User-Agent: edge-server\r\n\r\n".encode())
            file: Any = self._timed  # of a socket, a response needs nothing but `makefile`
            self.response = http.client.HTTPResponse(file, method="GET")
            self.response.begin()
            self._file: Any = self.response.fp
            self._chunks = Chunks() if self.response.chunked else None
            self._body = b""
        except BaseException as error:
            connection.close()
            if isinstance(error, TimeoutError):
                raise SilentError from error
            raise

    def receive(self, timeout_s: float) -> bytes:
        self._timed.until = time.monotonic() + timeout_s
        if self._chunks is None:
            return self.response.read1(_CHUNK_BYTES)
        while not self._body and not self._chunks.ended and self._receive_chunked():
            pass
        body, self._body = self._body, b""
        return body

    def ready(self) -> bool:
        # What has come of a chunked body may be nothing but the begin or end of a chunk.
        is_there = self._is_readable()
        if self._chunks is None or self._body or self._chunks.ended or not is_there:
            return bool(self._body) or is_there
        self._timed.until = time.monotonic() + _READY_S
        try:
            return not self._receive_chunked() or bool(self._body) or self._chunks.ended
        except TimeoutError:
            return False

    def _is_readable(self) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def _receive_chunked(self) -> bool:
        """Take in what has come of a chunked body, or comes next; return False at its end."""
        assert self._chunks is not None  # noqa: S101  # for the type checker
        # A response would wait for the next chunk behind the end of one.
        data: bytes = self._file.read1(_CHUNK_BYTES)
        self._body = self._chunks.feed(data)
        return bool(data)

    def close(self) -> None:
        self.response.close()
        self._socket.close()


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
