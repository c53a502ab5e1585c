"""Why a network camera cannot be opened: its name, its port, its protocol, login and path."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import socket
import ssl
import string
import time
from base64 import b64encode
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from edge_server.process.text import masked, masked_by_place, shortened
from edge_server.process.threads import start_future

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from edge_server.cameras.source_uri import Credentials, SourceUri
    from edge_server.errors import SourceError

_OPEN = Path("/proc/self/fd")
# In struct tcp_info of linux/tcp.h.
_BYTES_RECEIVED = slice(128, 136)


class CameraSockets:
    """The TCP connections of this process to one camera that begin after this object is made.

    Another camera at the same address counts as the same one, if it is opened later.

    Args:
        hosts: the camera's IP addresses.
    """

    def __init__(self, hosts: Collection[str]) -> None:
        self._hosts = hosts
        self._before = {name for _, name in _sockets()} if hosts else set()

    def connected(self) -> bool:
        return any(True for _ in self._connections())

    def received_bytes(self) -> int:
        """Return how much the connection with the most has received."""
        infos = (
            each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)[_BYTES_RECEIVED]
            for each in self._connections()
        )
        return max((int.from_bytes(info, "little") for info in infos), default=0)

    def shut_down(self) -> None:
        """End the connections: whoever reads them finds their end."""
        for each in self._connections():
            each.shutdown(socket.SHUT_RDWR)

    def _connections(self) -> Iterator[socket.socket]:
        for number, name in _sockets() if self._hosts else ():
            if name in self._before:
                continue
            try:
                connection = socket.socket(fileno=os.dup(number))
            except OSError:  # closed since
                continue
            with connection:
                try:
                    if (
                        connection.type == socket.SOCK_STREAM
                        and connection.family in (socket.AF_INET, socket.AF_INET6)
                        and connection.getpeername()[0] in self._hosts
                    ):
                        yield connection
                except OSError:  # not connected
                    continue


def _sockets() -> Iterator[tuple[int, str]]:
    """Yield the descriptor and the kernel's name of every socket of this process."""
    for entry in _OPEN.iterdir():
        try:
            name = str(entry.readlink())
        except OSError:  # closed since
            continue
        if name.startswith("socket:"):
            yield int(entry.name), name


PORTS = {"rtsp": 554, "rtsps": 322, "http": 80, "https": 443}
# With what FFmpeg takes to open, these stay below the limit of a camera's first frame.
_NAME_S = 2.0
_PROBE_S = 3.0
_LONGEST = 65536
# A key begins at the begin of a word only: the search for one in a long text without `=` would
# take seconds, in which no other thread runs.
_FIELD = re.compile(r'\b(\w+)="?([^",]*)"?')
# Longer texts of a camera are cut: errors go to the log, to MQTT and to a terminal.
_LONGEST_QUOTE = 200


class Response(NamedTuple):
    """The head of a response, and the body that came with it; protocol is `RTSP` or `HTTP`, or ""
    where it is neither."""

    protocol: str
    status: int
    head: str
    body: str

    def headers(self, name: str) -> list[str]:
        return re.findall(rf"(?im)^{name}:[ \t]*(.*?)\r?$", self.head)


def addresses_of(uri: SourceUri, timeout_s: float = _NAME_S) -> frozenset[str]:
    """Return the IP addresses of the host of `uri`, which a reader would look up without a limit;
    raise SourceError where there are none in time."""
    try:
        return frozenset(address[0] for *_, address in _addresses(uri, timeout_s))
    except OSError as error:
        raise connection_fault(uri, error) from error


def find_fault(uri: SourceUri, credentials: Credentials | None) -> SourceError:
    """Return, within `_PROBE_S`, why a reader could not open a network camera, and what to do."""
    until = time.monotonic() + _PROBE_S
    try:
        response = _exchange(uri, until)
        if response.status == 401 and credentials is not None:
            method = "DESCRIBE" if uri.scheme.startswith("rtsp") else "GET"
            challenges = response.headers("WWW-Authenticate")
            header = authorization(challenges, credentials, method, target_of(uri))
            if header:
                response = _exchange(uri, until, f"Authorization: {header}\r\n")
    except OSError as error:
        return connection_fault(uri, error)
    return fault_of_response(uri, credentials, response)


def _quoted(text: str) -> str:
    """Return what an error shows of a text that a camera sent, without control characters."""
    text = shortened(masked(text), _LONGEST_QUOTE)
    return "".join(each if each.isprintable() else "?" for each in text)


def place_of(uri: SourceUri) -> str:
    host = f"[{uri.host}]" if ":" in uri.host else uri.host
    return f"{host}:{uri.port or PORTS[uri.scheme]}"


class SilentError(TimeoutError):
    """The connection stands, and no response came."""


class _NameServiceError(TimeoutError):
    """The name service did not respond."""


# Of errors of the system, the first that fits.
_CONNECTION_FAULTS = (
    (
        socket.gaierror,
        "the host name {host!r} is not known ({strerror}); check its spelling, or write the "
        "camera's IP address",
    ),
    (
        _NameServiceError,
        "the name service does not respond to {host!r}; check the network, or write the camera's "
        "IP address",
    ),
    (ssl.SSLError, "no TLS at {place} ({reason}); check the port, or write {plain}://"),
    (SilentError, "{place} accepts the connection and sends nothing; restart the camera"),
    (
        ConnectionRefusedError,
        "{place} refuses the connection; check the port, and that the camera has {wanted} "
        "switched on",
    ),
    (
        ConnectionError,
        "{place} closes the connection without a response; the camera may be starting",
    ),
    (
        TimeoutError,
        "{place} is not reachable; check the address, the camera's power and the network",
    ),
    (OSError, "{place}: {strerror}; check the camera and the network"),
)


def connection_fault(uri: SourceUri, error: OSError) -> SourceError:
    """Return the error of a camera with which no connection or no conversation came about."""
    if error.errno in {errno.EHOSTUNREACH, errno.ENETUNREACH}:
        error = TimeoutError()
    text = next(text for kind, text in _CONNECTION_FAULTS if isinstance(error, kind))
    return uri.fault(
        text.format(
            host=uri.host,
            place=place_of(uri),
            plain=uri.scheme.removesuffix("s"),
            wanted=uri.scheme.upper(),
            strerror=error.strerror or error,
            reason=getattr(error, "reason", ""),
        ),
    )


def fault_of_response(
    uri: SourceUri, credentials: Credentials | None, response: Response
) -> SourceError:
    """Return what `response` says about a camera that could not be opened."""
    place, status = place_of(uri), response.status
    wanted = "RTSP" if uri.scheme.startswith("rtsp") else "HTTP"
    if response.protocol != wanted:
        other = f"{response.protocol}, not {wanted}" if response.protocol else f"not in {wanted}"
        return uri.fault(f"{place} responds, but {other}; check scheme and port")
    if status == 200:
        return _of_stream(uri, response)
    if status == 404:
        path = masked_by_place(uri.path or "/")
        text = f"the camera has no stream {path!r}; look its path up in its manual"
        return uri.fault(text, "not_found")
    if status in {401, 403}:
        text = "the camera refuses access to this stream"
        if credentials:
            text = (
                f"the camera refuses the password of user {credentials.user!r}; check both, and "
                "that this user may view the stream"
            )
        elif status == 401:
            text = (
                "the camera wants a user name and a password; write "
                f"{uri.scheme}://USER:PASSWORD@{place}/..., or name a file with them"
            )
        return uri.fault(text, "unauthorized")
    places = response.headers("Location")
    if 300 <= status < 400 and places:
        text = f"the camera redirects to {_quoted(places[0])}; write that address if it is right"
        return uri.fault(text, "not_found")
    line = _quoted(response.head.partition("\r\n")[0])
    return uri.fault(f"the camera responds {line!r}; restart it, or look at its web page")


def _of_stream(uri: SourceUri, response: Response) -> SourceError:
    """Return the error of a camera that gives its stream to us and not to the reader."""
    if response.protocol == "RTSP":
        codecs = re.findall(r"(?m)^a=rtpmap:\d+ ([\w-]+)", response.body)
        what = f"offers {_quoted(', '.join(codecs))}" if codecs else "describes its stream"
        if codecs and not {"H264", "H265", "JPEG", "MP4V-ES"} & {each.upper() for each in codecs}:
            text = f"the camera {what}; set its video to H.264, H.265 or MJPEG"
            return uri.fault(text, "no_decoder")
        return uri.fault(
            f"the camera {what}, but no image came in time; it may serve no more viewers: close "
            "others, or restart it",
        )
    kinds = response.headers("Content-Type")
    kind = _quoted(kinds[0].partition(";")[0]) if kinds else "nothing known"
    if kind.startswith(("multipart/", "image/", "video/")):
        return uri.fault(f"the camera sends {kind}, but no image came in time; restart it")
    text = f"this is {kind}, no video; look up the path of the camera's MJPEG stream in its manual"
    return uri.fault(text, "not_found")


def target_of(uri: SourceUri) -> str:
    """Return what a request names: the address, or of HTTP path and query, percent-encoded."""
    if uri.scheme.startswith("rtsp"):
        return uri.address("transport")
    return quote(uri.target or "/", safe=string.punctuation)


def _exchange(uri: SourceUri, until: float, authorized: str = "") -> Response:
    if uri.scheme.startswith("rtsp"):
        request = f"DESCRIBE {target_of(uri)} RTSP/1.0\r\nCSeq: 1\r\nAccept: application/sdp\r\n"
    else:
        request = f"GET {target_of(uri)} HTTP/1.1\r\nHost: {place_of(uri)}\r\nConnection: close\r\n"
    data = b""
    with connect(uri, until) as connection:
        connection.sendall(f"{request}{authorized}User-Agent: edge-server\r\n\r\n".encode())
        try:
            while not _is_whole(data):
                connection.settimeout(_left(until))
                if not (piece := connection.recv(4096)):
                    break
                data += piece
        except TimeoutError:
            if not data:
                raise SilentError from None
    if not data:
        raise ConnectionResetError
    return parse_response(data)


def _is_whole(data: bytes) -> bool:
    """Return whether `data` has the head of a response, and of RTSP its body, too."""
    head, end, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?im)^content-length:\s*(\d{1,9})", head)
    wanted = int(length[1]) if length and head.startswith(b"RTSP") else 0
    return len(data) >= _LONGEST or (bool(end) and len(body) >= wanted)


def connect(uri: SourceUri, until: float) -> socket.socket:
    addresses = _addresses(uri, _left(until))
    for at, (family, kind, protocol, _, address) in enumerate(addresses, 1):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(_left(until) / (len(addresses) - at + 1))
            connection.connect(address)
            if uri.scheme not in {"rtsps", "https"}:
                return connection
            # Like FFmpeg, which does not look at certificates: cameras sign their own.
            context = ssl.create_default_context()
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            return context.wrap_socket(connection, server_hostname=uri.host)
        except OSError:
            connection.close()
            if at == len(addresses):
                raise
    raise socket.gaierror(socket.EAI_NONAME, "no address")


def _addresses(uri: SourceUri, timeout_s: float) -> list[Any]:
    """Return what getaddrinfo finds, or raise OSError; it has no limit, so it gets a thread."""

    def look() -> list[Any]:
        port = uri.port or PORTS[uri.scheme]
        return socket.getaddrinfo(uri.host, port, type=socket.SOCK_STREAM)

    found = start_future(f"look up {uri.host}", look)
    try:
        return look() if found is None else found.result(timeout_s)
    except FutureTimeoutError:
        raise _NameServiceError from None
    except UnicodeError:  # a label of the name is empty or too long
        raise socket.gaierror(socket.EAI_NONAME, "it is no host name") from None


def _left(until: float) -> float:
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def parse_response(data: bytes) -> Response:
    """Return the response in `data`; whatever it is, it does not raise."""
    head, _, body = data.decode("latin-1").partition("\r\n\r\n")
    line = re.match(r"(RTSP|HTTP)/\d\.\d (\d{3})\b", head)
    if line is None:
        return Response("", 0, head, body)
    return Response(line[1], int(line[2]), head, body)


def authorization(challenges: list[str], credentials: Credentials, method: str, target: str) -> str:
    """Return the Authorization header for one of `challenges` (RFC 7616, 7617); "" for none known.

    Digest without `qop`, which every camera takes, is preferred to Basic.
    """
    user, password = credentials.user, credentials.password
    for challenge in challenges:
        scheme, _, rest = challenge.partition(" ")
        fields = {key.lower(): value for key, value in _FIELD.findall(rest)}
        algorithm = fields.get("algorithm", "MD5").upper()
        if scheme.lower() != "digest" or algorithm not in {"MD5", "SHA-256"}:
            continue
        realm, nonce = fields.get("realm", ""), fields.get("nonce", "")
        secret = _digest(algorithm, f"{user}:{realm}:{password}")
        request = _digest(algorithm, f"{method}:{target}")
        proof = _digest(algorithm, f"{secret}:{nonce}:{request}")
        opaque = f', opaque="{fields["opaque"]}"' if "opaque" in fields else ""
        return (
            f'Digest username="{user}", realm="{realm}", nonce="{nonce}", uri="{target}", '
            f'response="{proof}"{opaque}' + (f", algorithm={algorithm}" * ("algorithm" in fields))
        )
    if any(challenge.lower().startswith("basic") for challenge in challenges):
        return "Basic " + b64encode(f"{user}:{password}".encode()).decode()
    return ""


def _digest(algorithm: str, text: str) -> str:
    name = algorithm.replace("-", "").lower()
    return hashlib.new(name, text.encode(), usedforsecurity=False).hexdigest()
