"""Several listeners on one thread; what each serves is imported when the first client connects."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from support.waiting import TIMEOUT_S, wait_until

from edge_server.api.http import connection as connections
from edge_server.api.http.call import HttpCall
from edge_server.api.http.server import HttpListener, HttpServer
from edge_server.errors import Unavailable
from edge_server.settings import Http, Tls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

    from starlette.requests import Request
    from starlette.routing import BaseRoute


async def _echo(request: Request) -> Response:
    return JSONResponse(len(await request.body()))


_MUCH_BYTES = 64 << 20


async def _much(_: Request) -> Response:
    return Response(bytes(_MUCH_BYTES))


async def _fail(_: Request) -> Response:
    raise ZeroDivisionError("unforeseen")


_SLOW: list[HttpCall] = []  # those that are being answered


async def _slow(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        call = HttpCall.of(request.scope)
        _SLOW.append(call)
        while not call.cancelled:
            yield b"part"
            await asyncio.sleep(0.01)
        _SLOW.remove(call)

    return StreamingResponse(parts())


# What the next request of `/hang` waits for, on the loop's thread.
_HANGS: list[threading.Event] = []


async def _hang(_: Request) -> Response:
    _HANGS.pop().wait(TIMEOUT_S)
    return Response()


async def _talk(socket: WebSocket) -> None:
    """Send what nobody reads until the client is gone; `/talk?once` refuses it instead."""
    await socket.accept()
    if socket.query_params:
        await socket.close(4401)
        return
    with suppress(WebSocketDisconnect):
        while True:
            await socket.send_bytes(bytes(100_000))


async def _listen(socket: WebSocket) -> None:
    await socket.accept()
    with suppress(WebSocketDisconnect):
        await socket.receive_bytes()


def _routes() -> Sequence[BaseRoute]:
    return [
        Route("/length", _echo, methods=["POST"]),
        Route("/much", _much),
        Route("/fault", _fail),
        Route("/slow", _slow),
        Route("/hang", _hang),
        WebSocketRoute("/talk", _talk),
        WebSocketRoute("/listen", _listen),
    ]


@pytest.fixture
def serve() -> Iterator[Callable[..., HttpServer]]:
    made: list[HttpServer] = []

    def start(tls: Tls | None = None, **limits: object) -> HttpServer:
        made_limits = Http(**limits)
        listener = HttpListener("http", "127.0.0.1", 0, _routes, tls or Tls(), made_limits)
        server = HttpServer([listener])
        made.append(server)
        server.start()
        return server

    yield start
    for server in made:
        server.stop(TIMEOUT_S)
        assert not server.worker.alive
        assert server.worker.failure is None


def _connect(server: HttpServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port_of("http")), TIMEOUT_S)


def _send_until_cut_off(connection: socket.socket, parts: Iterable[bytes]) -> None:
    """Fails if the connection stays open, or anything is answered."""
    try:
        for part in parts:
            connection.sendall(part)
            with suppress(TimeoutError):
                assert connection.recv(1) == b""
                return
        connection.settimeout(TIMEOUT_S)
        assert connection.recv(1) == b""
    except ConnectionError:
        return


def _call(server: HttpServer, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port_of("http"), timeout=TIMEOUT_S)
    connection.request(method, path, body)
    response = connection.getresponse()
    read = response.read()
    connection.close()
    return response.status, read


def test_errors_are_json_and_a_fault_of_a_handler_ends_nothing(
    serve: Callable[..., HttpServer], caplog: pytest.LogCaptureFixture
) -> None:
    server = serve()
    assert _call(server, "POST", "/length", b"abc") == (200, b"3")
    assert _call(server, "GET", "/nothing") == (404, b'{"error":"Not Found"}')
    assert _call(server, "GET", "/length") == (405, b'{"error":"Method Not Allowed"}')
    assert _call(server, "GET", "/fault")[0] == 500
    assert _call(server, "POST", "/length", b"abc") == (200, b"3")
    assert "http: /fault failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET /length HTTP/1.1\r\n",
        b"POST /length HTTP/1.1\r\nContent-Length: 9\r\n\r\nhalf",
        b"POST /length HTTP/1.1\r\nContent-Length: 2\r\n\r\nokPOST /length HTTP/1.1\r\n",
    ],
    ids=["silent", "half a header", "half a body", "half a second request"],
)
def test_a_client_that_does_not_send_is_cut_off(
    serve: Callable[..., HttpServer], begun: bytes
) -> None:
    server = serve(message_timeout_ms=300, idle_timeout_ms=1000)
    with _connect(server) as connection:
        connection.sendall(begun)
        while connection.recv(4096):
            pass


def test_a_slow_client_is_cut_off_although_it_sends(serve: Callable[..., HttpServer]) -> None:
    server = serve(message_timeout_ms=300)
    with _connect(server) as connection:
        connection.settimeout(0.02)
        _send_until_cut_off(connection, itertools.chain([b"GET /"], itertools.repeat(b"a")))


@pytest.mark.parametrize(
    "header",
    # Of the third, names and values alone would fit.
    [b"A: " + b"x" * (1 << 20), b"A: b\r\n" * 10_000, b"A:\r\n" * 14_000 + b"\r\n", b""],
    ids=["a long value", "many", "many empty ones", "a long first line"],
)
def test_a_header_is_bounded(serve: Callable[..., HttpServer], header: bytes) -> None:
    server = serve()
    path = b"/length" if header else b"/" + b"x" * (1 << 20)
    with _connect(server) as connection:
        _send_until_cut_off(connection, [b"GET " + path + b" HTTP/1.1\r\n" + header])


@pytest.mark.parametrize(
    "after",
    [b"1;", b"0\r\na: ", b"0\r\na"],
    ids=["of a chunk", "value of a trailer", "name of a trailer"],
)
def test_what_a_chunked_body_has_beside_it_is_bounded(
    serve: Callable[..., HttpServer], after: bytes
) -> None:
    server = serve(message_timeout_ms=600_000)
    with _connect(server) as connection:
        head = b"POST /length HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"
        connection.settimeout(0.1)
        connection.sendall(head + after)
        _send_until_cut_off(connection, [b"x" * 1000] * 100)
    with _connect(server) as connection:
        connection.sendall(head + b"1\r\nx\r\n" * 100_000 + b"0\r\na: b\r\n\r\n")
        answer = connection.recv(65536)
        while not answer.endswith(b"100001"):
            part = connection.recv(65536)
            assert part, answer
            answer += part


def test_one_more_connection_ends_the_one_that_has_been_silent_longest(
    serve: Callable[..., HttpServer],
) -> None:
    server = serve(max_connections=4, message_timeout_ms=round(1000 * TIMEOUT_S))
    silent = [_connect(server) for _ in range(4)]
    assert _call(server, "POST", "/length", b"abc") == (200, b"3")
    assert silent[0].recv(1) == b""
    silent[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        silent[1].recv(1)
    for each in silent:
        each.close()


def test_a_client_that_does_not_read_is_cut_off(serve: Callable[..., HttpServer]) -> None:
    server = serve(message_timeout_ms=300)
    with _connect(server) as connection:
        connection.sendall(b"GET /much HTTP/1.1\r\n\r\n")
        assert connection.recv(1) == b"H"
        _wait_until_none_is_open(server)
        received = 1
        while part := connection.recv(1 << 20):
            received += len(part)
        assert received < _MUCH_BYTES


_UPGRADE = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


@pytest.mark.parametrize(
    "head",
    [
        b"POST /\xff HTTP/1.1\r\n",
        b"POST /length HTTP/1.1\r\n" + _UPGRADE,
        b"GET /slow HTTP/1.1\r\n\r\nPOST /length HTTP/1.1\r\n",
    ],
    ids=["no path", "a WebSocket with a body", "behind a request that runs"],
)
def test_a_body_whose_request_never_runs_is_counted_no_more(
    serve: Callable[..., HttpServer], head: bytes
) -> None:
    size = 64 * 1024
    server = serve(max_body_bytes=size, max_pending_bytes=1024 * 1024)
    for _ in range(20):
        with _connect(server) as connection:
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % size)
            connection.settimeout(0.05)
            with suppress(TimeoutError, ConnectionError):
                connection.recv(4096)
    _wait_until_none_is_open(server)
    assert _call(server, "POST", "/length", b"a" * size) == (200, b"%d" % size)


@pytest.mark.parametrize("path", [b"/length", b"/slow"], ids=["has not begun", "runs"])
def test_an_upgrade_beside_a_request_is_not_served(
    serve: Callable[..., HttpServer], path: bytes
) -> None:
    """Its answer would come before that of the request."""
    server = serve()
    upgrade = b"GET /listen HTTP/1.1\r\n" + _UPGRADE + b"\r\n"
    with _connect(server) as connection:
        connection.sendall(b"GET " + path + b" HTTP/1.1\r\n\r\n" + upgrade)
        answered = b""
        with suppress(ConnectionError):
            while data := connection.recv(4096):
                answered += data
    assert b"101 Switching Protocols" not in answered
    wait_until(lambda: not (server.open_connections or _SLOW), TIMEOUT_S)
    with _connect(server) as connection:
        connection.sendall(upgrade)
        assert connection.recv(4096).startswith(b"HTTP/1.1 101 ")


def test_every_request_of_a_connection_learns_that_its_client_is_gone(
    serve: Callable[..., HttpServer], caplog: pytest.LogCaptureFixture
) -> None:
    server = serve()
    with _connect(server) as connection:
        connection.sendall(b"GET /slow HTTP/1.1\r\n\r\nGET /slow HTTP/1.1\r\n\r\n")
        assert connection.recv(1) == b"H"
    wait_until(
        lambda: not (server.open_connections or _SLOW),
        TIMEOUT_S,
        otherwise="a request goes on for nobody",
    )
    assert "failed" not in caplog.text


def _open(server: HttpServer, path: bytes) -> socket.socket:
    """Return a WebSocket whose client takes little."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(TIMEOUT_S)
    connection.connect(("127.0.0.1", server.port_of("http")))
    connection.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + _UPGRADE + b"\r\n")
    assert connection.recv(12) == b"HTTP/1.1 101"
    return connection


def _wait_until_none_is_open(server: HttpServer) -> None:
    wait_until(
        lambda: not server.open_connections,
        TIMEOUT_S,
        otherwise="the connection stayed open",
    )


def test_a_websocket_whose_client_does_not_read_is_cut_off(
    serve: Callable[..., HttpServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "READ_S", 0.3)
    server = serve()
    with _open(server, b"/talk"):
        _wait_until_none_is_open(server)


def test_pings_are_not_answered_faster_than_their_client_reads(
    serve: Callable[..., HttpServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "READ_S", 1.0)
    server = serve()
    pings = (b"\x89\xfd\0\0\0\0" + bytes(125)) * 1000
    sent = 0
    with _open(server, b"/listen") as connection, suppress(ConnectionError):
        while sent < 64 << 20:
            connection.sendall(pings)
            sent += len(pings)
    assert sent < 32 << 20  # what the kernel holds
    _wait_until_none_is_open(server)


def test_a_refused_websocket_makes_room_for_others(serve: Callable[..., HttpServer]) -> None:
    server = serve(max_connections=4)
    with ExitStack() as opened:
        for _ in range(4):
            opened.enter_context(_open(server, b"/talk?once"))
        assert _call(server, "POST", "/length", b"abc") == (200, b"3")


def test_a_refused_websocket_whose_client_sends_on_is_cut_off(
    serve: Callable[..., HttpServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "READ_S", 4 * TIMEOUT_S)
    server = serve()
    with _open(server, b"/talk?once") as connection:
        with suppress(ConnectionError):
            for _ in range(1000):
                connection.sendall(b"\x82\x80\0\0\0\0" * 1000)
        _wait_until_none_is_open(server)


def test_a_taken_port_is_named_with_the_remedy(serve: Callable[..., HttpServer]) -> None:
    taken = serve().port_of("http")
    listener = HttpListener("http", "127.0.0.1", taken, _routes)
    with pytest.raises(
        Unavailable, match=rf"127\.0\.0\.1:{taken}: .*--http-port.*--allow-http=fal"
    ):
        HttpServer([listener])


@pytest.fixture
def tls(authority: Any) -> Tls:
    certificate, key = map(str, authority.issue("server"))
    return Tls(enabled=True, certificate=certificate, key=key)


def test_a_client_that_begins_no_encryption_is_cut_off(
    serve: Callable[..., HttpServer], tls: Tls
) -> None:
    server = serve(tls, message_timeout_ms=300)
    with _connect(server) as silent, suppress(ConnectionError):
        assert silent.recv(1) == b""  # or a timeout


def test_clients_that_begin_no_encryption_are_bounded_in_number(
    serve: Callable[..., HttpServer], tls: Tls, authority: Any
) -> None:
    server = serve(tls, message_timeout_ms=round(1000 * TIMEOUT_S), max_connections=4)
    with ExitStack() as opened:
        silent = [opened.enter_context(_connect(server)) for _ in range(8)]
        for each in silent[:4]:
            with suppress(ConnectionError):
                assert each.recv(1) == b""  # or a timeout
        for each in silent[4:]:
            each.setblocking(False)
            with pytest.raises(BlockingIOError):
                each.recv(1)
        context = ssl.create_default_context(cafile=str(authority.ca))
        connection = http.client.HTTPSConnection(
            "127.0.0.1", server.port_of("http"), context=context, timeout=TIMEOUT_S
        )
        connection.request("POST", "/length", b"abc")
        assert connection.getresponse().read() == b"3"
        connection.close()


def test_an_encrypted_client_that_is_idle_does_not_hold_up_the_stop(
    serve: Callable[..., HttpServer], tls: Tls, authority: Any
) -> None:
    server = serve(tls, message_timeout_ms=5000)
    context = ssl.create_default_context(cafile=str(authority.ca))
    with _connect(server) as opened:
        # It reads its response, and not that the server closes.
        encrypted = context.wrap_socket(opened, server_hostname="127.0.0.1")
        encrypted.sendall(b"POST /length HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\n1")
        assert encrypted.recv(1)
        began = time.monotonic()
        server.stop(TIMEOUT_S)
        assert time.monotonic() - began < TIMEOUT_S / 2
        encrypted.close()
    assert not server.worker.alive


def test_certificates_that_are_renewed_are_what_new_connections_see(
    serve: Callable[..., HttpServer], authority: Any, stranger: Any
) -> None:
    certificate, key = authority.issue("server")
    ca = str(authority.ca)
    tls = Tls(mutual=True, certificate=str(certificate), key=str(key), client_ca=ca)
    server = serve(tls)

    def status(trusted: Any, *own: str) -> int:
        context = ssl.create_default_context(cafile=str(trusted.ca))
        if own:
            context.load_cert_chain(*own)
        port = server.port_of("http")
        connection = http.client.HTTPSConnection(
            "127.0.0.1", port, context=context, timeout=TIMEOUT_S
        )
        try:
            connection.request("POST", "/length", bytes(1 << 20))
            return connection.getresponse().status
        finally:
            connection.close()

    own = tuple(map(str, authority.issue("client")))
    assert status(authority, *own) == 200
    with pytest.raises(OSError, match=r"alert|EOF|reset|Broken|closed"):
        status(authority)
    for old, new in zip((certificate, key), stranger.issue("new"), strict=True):
        old.write_bytes(new.read_bytes())

    def is_let_in(*files: str) -> bool:
        with suppress(OSError):  # an SSLError is one
            return status(stranger, *files) == 200
        return False

    wait_until(lambda: is_let_in(*own), otherwise="the certificate was not renewed")
    # The authority of the clients is replaced, too: whom it signed is a stranger now.
    authority.ca.write_bytes(stranger.ca.read_bytes())
    successor = tuple(map(str, stranger.issue("successor")))
    wait_until(lambda: is_let_in(*successor), otherwise="the authority was not renewed")
    with pytest.raises(OSError, match=r"alert|EOF|reset|Broken|closed"):
        status(stranger, *own)


def test_a_server_without_listeners_does_nothing() -> None:
    server = HttpServer([])
    server.start()
    server.stop(TIMEOUT_S)
    assert server.port_of("http") == 0


def test_nothing_of_http_is_imported_before_a_client_connects() -> None:
    code = """
import sys, time
from edge_server.api.http.server import HttpListener, HttpServer
server = HttpServer([HttpListener("http", "127.0.0.1", 0, list)])
server.start()
assert not {"uvicorn", "starlette"} & set(sys.modules)
server.stop(9)
assert not {"uvicorn", "starlette"} & set(sys.modules)
assert not server.worker.alive
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=TIMEOUT_S)


def test_requests_that_are_not_answered_wait_in_their_connection(
    serve: Callable[..., HttpServer],
) -> None:
    server = serve()
    gets, sent = b"GET /slow HTTP/1.1\r\n\r\n" * 1000, 0
    with _connect(server) as greedy:
        greedy.settimeout(0.3)
        with suppress(TimeoutError):
            while sent < 64 << 20:
                sent += greedy.send(gets)
        assert sent < 32 << 20  # what the kernel holds
        assert _call(server, "POST", "/length", b"abc") == (200, b"3")
    with _connect(server) as patient:
        patient.sendall(b"POST /length HTTP/1.1\r\nContent-Length: 1\r\n\r\nx" * 300)
        answers = b""
        while answers.count(b"HTTP/1.1 200") < 300:
            part = patient.recv(65536)
            assert part, answers
            answers += part


def test_a_loop_that_hangs_ends_and_another_one_serves_the_same_port(
    serve: Callable[..., HttpServer],
) -> None:
    server = serve()
    assert _call(server, "POST", "/length", b"abc") == (200, b"3")
    hanging, port, let_go = server.worker, server.port_of("http"), threading.Event()
    with _connect(server) as held:
        _HANGS.append(let_go)
        held.sendall(b"GET /hang HTTP/1.1\r\n\r\n")
        wait_until(lambda: not _HANGS)
        server.reopen()
        assert server.worker is not hanging
        assert server.port_of("http") == port
        assert _call(server, "POST", "/length", b"abcd") == (200, b"4")
        let_go.set()
        # The loop that hung ends with its connections.
        wait_until(lambda: not hanging.alive)
        assert hanging.failure is None
        held.settimeout(TIMEOUT_S)
        with suppress(ConnectionError):
            while held.recv(4096):
                pass
    assert _call(server, "POST", "/length", b"abcde") == (200, b"5")


def test_a_loop_that_died_is_replaced(serve: Callable[..., HttpServer]) -> None:
    server = serve()
    died = server.worker
    died._tick = _die
    wait_until(lambda: died.failure is not None and not died.alive)
    server.reopen()
    assert _call(server, "POST", "/length", b"abc") == (200, b"3")


def _die(_: float) -> bool:
    raise ZeroDivisionError("unforeseen")
