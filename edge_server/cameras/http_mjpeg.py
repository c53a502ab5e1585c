"""A camera that sends JPEGs over HTTP, read without a video library: OpenCV decodes them.

Unlike FFmpeg it decodes no more pixels than the model needs, notices a damaged JPEG and a new size,
and skips what is no longer new.
"""

from __future__ import annotations

import fcntl
import http.client
import io
import re
import ssl
import sys
import termios
import time
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from edge_server.cameras.jpeg import LONGEST_JPEG_BYTES, JpegDecoder
from edge_server.cameras.live_source import LiveSource, Picture
from edge_server.cameras.network import (
    PORTS,
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

if TYPE_CHECKING:
    import socket

    from edge_server.cameras.source_uri import Credentials, SourceOptions, SourceUri

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
        self._begin = 0  # of the body; 0 where its head has not come
        self._length: int | None = None

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self._data += data

    def pop(self) -> bytes | None:
        """Return the body of the next part; None until the stream has brought it.

        Raises:
            MultipartError: a part, or what comes before it, is longer than a JPEG may be.
        """
        data = self._data
        if not self._begin and not self._find_body():
            return None
        if self._length is not None:
            end = self._begin + self._length
        else:
            end = data.find(self._delimiter, max(self._begin, self._scanned))
            self._scanned = max(0, len(data) - len(self._delimiter))
        part_bytes = (len(data) if end < 0 else end) - self._begin
        if part_bytes > LONGEST_JPEG_BYTES:
            raise MultipartError(f"an image has more than {LONGEST_JPEG_BYTES >> 20} MiB")
        if not 0 <= end <= len(data):
            return None
        body = bytes(memoryview(data)[self._begin : end])
        del data[:end]
        self._scanned, self._begin = 0, 0
        return body

    def _find_body(self) -> bool:
        data = self._data
        at = data.find(self._delimiter, self._scanned)
        if at < 0:
            # What comes between two parts is of no use.
            useless = max(0, len(data) - len(self._delimiter))
            del data[:useless]
            self._scanned = 0
            self._useless += useless
            if self._useless > LONGEST_JPEG_BYTES:
                raise MultipartError(f"no image begins within {LONGEST_JPEG_BYTES >> 20} MiB")
            return False
        end = _HEAD_END.search(data, at)
        if end is None:
            self._scanned = at
            if len(data) - at > _LONGEST_HEAD_BYTES:
                raise MultipartError("the head of an image never ends")
            return False
        length = _LENGTH.search(data, at, end.end())
        self._length = None if length is None else int(length[1])
        self._begin = self._scanned = end.end()
        self._useless = 0
        return True


class Wire(io.RawIOBase):
    """A connection as http.client reads it: whatever it reads ends by `until`, however slowly the
    bytes come, and however fast. Closing it leaves `sock` open, which belongs to the caller."""

    def __init__(self, sock: socket.socket, until: float) -> None:
        self.sock = sock
        self._is_late = False
        self.read_until(until)

    def read_until(self, until: float) -> None:
        """Let reads from now on end by `until`, `time.monotonic()`."""
        self.until = until
        self._was_last = False

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def sendall(self, data: Any) -> None:
        self.sock.sendall(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._is_late:
            raise OSError("a part of what came before is lost")
        left_s = self.until - time.monotonic()
        # What is here already is read once, although the caller comes late. http.client itself
        # reads heads and trailers for as long as they come.
        was_last, self._was_last = self._was_last, left_s <= 0
        self.sock.settimeout(max(left_s, 1e-3))
        try:
            read = None if was_last else self.sock.recv_into(buffer)
        except TimeoutError:
            read = None
        self._is_late = read is None
        if read is None:
            raise TimeoutError
        return read

    def close(self) -> None:
        pass


_READ_BYTES = 2**18
_MOST_REDIRECTS = 3
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# With the look for the reason, opening takes less than a camera's first frame may.
_OPEN_S = 4.0
# An older image is skipped where the next one is already here; for so long at a time.
_LONGEST_SKIP_S = 0.2
# The frame of a chunk is shorter: where more has come, there is a part of an image.
_CHUNK_FRAME_BYTES = 64


def open_http(uri: SourceUri, options: SourceOptions) -> LiveSource:
    """Open a camera and read its first frame.

    Raises:
        SourceError: the camera delivers no frame; the text names the cause and the next step.
    """
    until = time.monotonic() + _OPEN_S
    response, wire = open_response(uri, uri.credentials or options.credentials, until)
    decoder = JpegDecoder(uri.label, options.useful)
    try:
        parser = MultipartParser(_boundary(response))
    except MultipartError as error:
        wire.sock.close()
        raise uri.fault(str(error), "no_decoder") from error
    return LiveSource(MjpegStream(response, wire, parser, decoder), uri, "arrival")


def open_response(
    uri: SourceUri, credentials: Credentials | None, until: float
) -> tuple[http.client.HTTPResponse, Wire]:
    """Return the response that has the camera's stream, and its connection; follow redirects.

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
            sock = connect(at, until)
            if at is uri:
                here = _leads_here(sock)
            elif _leads_here(sock) and not here:
                # What listens here trusts this device more than it trusts a camera.
                sock.close()
                raise _no_stream(uri, "redirects to this device itself")
            wire = Wire(sock, until)
            response = _get(wire, at, authorized)
        except OSError as error:
            raise connection_fault(at, error) from error
        except http.client.HTTPException:
            raise fault_of_response(at, credentials, Response("", 0, "", "")) from None
        if response.status == 200 and _boundary(response):
            return response, wire
        sock.close()
        place = response.getheader("Location")
        if response.status in _REDIRECTS and place:
            at, credentials = _redirected(uri, at, place, credentials)
            authorized = ""
            continue
        if response.status == 401 and credentials is not None and not authorized:
            challenges = response.headers.get_all("WWW-Authenticate", [])
            authorized = authorization(challenges, credentials, "GET", target_of(at))
            if authorized:
                continue
        raise _refusal(uri, credentials, response)
    raise _no_stream(uri, "redirects again and again")


def _get(wire: Wire, uri: SourceUri, authorized: str) -> http.client.HTTPResponse:
    """Request `uri` over an open connection, and return the response.

    Raises:
        OSError: no response came.
        http.client.HTTPException: what came is no response of HTTP.
    """
    # The port too: without it, one is looked for in an IPv6 address.
    connection = http.client.HTTPConnection(uri.host, uri.port or PORTS[uri.scheme])
    connection.sock = wire
    headers = {"Host": place_of(uri).encode(), "User-Agent": b"edge-server"}
    if authorized:
        headers["Authorization"] = authorized.encode()
    try:
        wire.sock.settimeout(max(wire.until - time.monotonic(), 1e-3))
        connection.request("GET", target_of(uri), headers=headers)
        return connection.getresponse()
    except BaseException as error:
        wire.sock.close()
        if isinstance(error, TimeoutError):
            raise SilentError from error
        raise


def _boundary(response: http.client.HTTPResponse) -> bytes:
    """Return the boundary of the parts of a multipart response; empty for any other."""
    boundary = response.headers.get_param("boundary")
    if response.headers.get_content_maintype() != "multipart" or not isinstance(boundary, str):
        return b""
    return boundary.encode("latin-1", "replace")


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
        raise _no_stream(uri, "redirects to an address that is not http://")
    same = (to.host, to.scheme) in {(at.host, at.scheme), (at.host, "https")}
    return to, credentials if same else None


def _leads_here(sock: socket.socket) -> bool:
    """Return whether the other end of the connection is on this device."""
    peer = sock.getpeername()[0]
    return peer == sock.getsockname()[0] or ip_address(peer.partition("%")[0]).is_loopback


def _no_stream(uri: SourceUri, what: str) -> SourceError:
    return uri.fault(
        f"the camera {what}; look up the path of its MJPEG stream in its manual", "not_found"
    )


def _refusal(
    uri: SourceUri, credentials: Credentials | None, response: http.client.HTTPResponse
) -> SourceError:
    kind = response.getheader("Content-Type", "").partition(";")[0].strip()
    if response.status == 200 and kind.startswith(("video/", "image/", "multipart/")):
        return uri.fault(
            f"this is {kind!r:.60}, no stream of JPEGs (multipart/x-mixed-replace); "
            "look up the path of its MJPEG stream in its manual, or use its rtsp:// stream",
            "no_decoder",
        )
    head = f"HTTP/1.1 {response.status} {response.reason}\r\n{response.headers}"
    return fault_of_response(uri, credentials, Response("HTTP", response.status, head, ""))


class MjpegStream:
    """Cuts the body of a response into JPEGs, and decodes the newest; a CameraStream."""

    seen = damaged = 0
    period_s = 0.0

    def __init__(
        self,
        response: http.client.HTTPResponse,
        wire: Wire,
        parser: MultipartParser,
        decoder: JpegDecoder,
    ) -> None:
        self._response = response
        self._wire = wire
        self._sock = wire.sock
        self._parser = parser
        self._decoder = decoder
        self._jpeg = b""

    def grab(self, timeout_s: float) -> bool:
        try:
            jpeg = self._next(time.monotonic() + timeout_s)
            skip_until = time.monotonic() + _LONGEST_SKIP_S
            while jpeg:
                self._jpeg = jpeg
                jpeg = self._next(skip_until, wait=False)
                if not jpeg:
                    return True
        except MultipartError as error:
            text = f"{error}; set a lower resolution in the camera, or restart it"
            raise SourceError(text, reason="corrupt") from error
        except (OSError, http.client.HTTPException) as error:
            what = getattr(error, "strerror", None) or error
            raise SourceError(
                f"the connection broke: {what}; it is opened again", reason="lost"
            ) from error
        return False

    def retrieve(self) -> Picture:
        image, size = self._decoder.decode(self._jpeg)
        return Picture(image, size=size, jpeg=self._jpeg)

    def close(self) -> None:
        self._response.close()
        self._sock.close()

    def _next(self, until: float, *, wait: bool = True) -> bytes | None:
        """Return the next image; None where it does not come until then, or is not here yet."""
        while (jpeg := self._parser.pop()) is None:
            if time.monotonic() >= until or not (wait or self._is_here()):
                return None
            self._wire.read_until(until)
            try:
                data = self._response.read1(_READ_BYTES)
            except TimeoutError:
                return None
            if not data:
                raise SourceError(
                    "the camera closed the stream; it is opened again",
                    reason="lost",
                )
            self._parser.feed(data)
        return jpeg

    def _is_here(self) -> bool:
        """Return whether more of an image has come, and not the frame of a chunk alone."""
        if isinstance(self._sock, ssl.SSLSocket):
            # What the socket itself has may be a part of a record, for which a read would wait.
            here_bytes = self._sock.pending()
        else:
            count = fcntl.ioctl(self._sock, termios.FIONREAD, bytes(4))
            here_bytes = int.from_bytes(count, sys.byteorder)
        return here_bytes > _CHUNK_FRAME_BYTES
