"""The body of a camera's response over HTTP: logins, redirects and chunks."""

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

if TYPE_CHECKING:
    import socket

    from edge_server.cameras.source_uri import Credentials, SourceUri

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
