"""Hostile clients of HTTP: malformed requests, and sockets that hold on."""

from __future__ import annotations

import gzip
import http.client
import json
import random
import socket
import sys
import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest
import tritonclient.grpc as triton_grpc
from integration.test_http_triton import READY, Server, call, start, tensor
from support.waiting import TIMEOUT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

# All that a client may get for what it wrote; 501 also where it names a method that is none.
_THREADS = 32
CODES = {200, 400, 401, 403, 404, 405, 413, 429, 500, 501, 503}
_PATHS = (
    *("/v2/models/add/infer", "/v2/models/add/generate", "/v2/models/count/generate_stream"),
    *("/v2/models/add/versions/1/infer", "/v2/repository/index", "/v2/trace/setting"),
    *("/v2/logging", "/v2/systemsharedmemory/region/r/register", "/v2", "/page/token", "/"),
    *(
        "/v2/models/%00/infer",
        "/v2/models/add/versions/99999999999999999999/infer",
        "*",
        "//",
        "/%",
    ),
)
_GOOD = json.dumps({**tensor(), "outputs": [{"name": "SUM"}], "parameters": {"p": 1}}).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("hostile")
    grpc = {"port": 0, "socket": str(folder / "grpc.sock")}
    # So that half a request takes the tests no longer.
    daemon = start(folder / "models", grpc=grpc, http={"message_timeout_ms": 200})
    yield Server(daemon, f"127.0.0.1:{daemon.http_port}")
    daemon.stop()


def _mutated(chance: random.Random, data: bytes) -> bytes:
    made = bytearray(data)
    for _ in range(chance.randrange(4)):
        place = chance.randrange(len(made) + 1)
        what = chance.randrange(4)
        if what == 0:
            del made[place : place + chance.randrange(1, 20)]
        elif what == 1:
            made[place:place] = chance.randbytes(chance.randrange(1, 8))
        elif what == 2:
            made[place:place] = chance.choice(
                (b"[", b"]", b"{", b'"', b"null", b"-1", b"1e999", b"NaN", b"\\ud800", b"\0", b"[[")
            )
        else:
            other = chance.randrange(len(made) + 1)
            made[place:place] = made[other : other + 30]
    return bytes(made)


def _request(chance: random.Random) -> bytes:
    """Return one request: some are right, most have one or more mistakes."""
    body = _mutated(chance, chance.choice((_GOOD, _GOOD, b"{}", b"", b"\x00" * 8)))
    length = chance.choice((str(len(body)),) * 6 + (str(len(body) + 3), "-1", "x", "9" * 20, "0"))
    lines = [
        b"%s %s HTTP/%s"
        % (
            chance.choice((b"POST",) * 5 + (b"GET", b"PUT", b"HEAD", b"OPTIONS", b"G\xe9T")),
            chance.choice(_PATHS).encode(),
            chance.choice((b"1.1",) * 6 + (b"1.0", b"2.0", b"9")),
        ),
        b"Content-Length: " + length.encode(),
    ]
    if chance.random() < 0.3:
        lines.append(
            chance.choice(
                (
                    b"Inference-Header-Content-Length: " + str(chance.randrange(400)).encode(),
                    b"Content-Encoding: gzip",
                    b"Accept-Encoding: gzip;q=x, deflate;q=2",
                    b"Transfer-Encoding: chunked",
                    b"Connection: Upgrade\r\nUpgrade: websocket",
                    b"Expect: 100-continue",
                    b": empty",
                    b"A" * 300 + b": b",
                    b"Host: \xff",
                )
            )
        )
    if chance.random() < 0.1:
        body = gzip.compress(body)
    request = b"\r\n".join(lines) + b"\r\n\r\n" + body
    return _mutated(chance, request) if chance.random() < 0.4 else request


def _codes_of(port: int, requests: list[bytes]) -> set[int]:
    """Send each request on a connection of its own; return the codes of the answers."""
    codes = set()
    for request in requests:
        with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
            received = b""
            try:
                connection.sendall(request)
                while b"\r\n\r\n" not in received and (part := connection.recv(65536)):
                    received += part.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
            except ConnectionError:
                pass
        if received:
            assert received.startswith(b"HTTP/1.1 "), (request, received)
            codes.add(int(received[9:12]))
    return codes


def _wait_until_served(server: Server, *request: Any) -> None:
    """A busy machine may need longer than the time in which a request is to be sent."""

    def is_served() -> bool:
        with suppress(OSError, http.client.HTTPException):
            return call(server.url, *request).status == 200
        return False

    wait_until(is_served)


def _fuzz(server: Server, count: int) -> None:
    chance = random.Random(16)  # noqa: S311 - the same requests in every run
    requests = [_request(chance) for _ in range(count)]
    found: list[set[int]] = []
    port = server.daemon.http_port
    threads = [
        threading.Thread(target=lambda part=part: found.append(_codes_of(port, part)))
        for part in (requests[place::_THREADS] for place in range(_THREADS))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == _THREADS, "a thread met an answer that is none"
    codes = set().union(*found)
    assert {200, 400, 404, 405, 500} <= codes <= CODES, codes
    _wait_until_served(server, "GET", READY)
    assert server.daemon._http.worker.failure is None


def test_malformed_requests_get_listed_codes_and_end_nothing(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    _fuzz(server, 2000)
    assert [r.getMessage() for r in caplog.records if r.levelname in ("ERROR", "CRITICAL")] == []


@pytest.mark.long
def test_a_hundred_thousand_malformed_requests_end_nothing(server: Server) -> None:
    _fuzz(server, 100_000)


@pytest.mark.usefixtures("server")
def test_a_thread_that_parses_lets_others_run_within_a_millisecond() -> None:
    assert sys.getswitchinterval() < 0.001


def test_five_hundred_sockets_that_hold_on_stop_neither_grpc_nor_the_unix_socket(
    server: Server,
) -> None:
    head = b"POST /v2/models/add/infer HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n"
    with ExitStack() as held:
        sockets = [
            held.enter_context(
                socket.create_connection(("127.0.0.1", server.daemon.http_port), TIMEOUT_S)
            )
            for _ in range(500)
        ]
        for place, each in enumerate(sockets):
            try:
                each.sendall((b"", head[:20], head, head + bytes(70_000))[place % 4])
            except ConnectionError:
                continue  # one that came later took its place
        over_socket = held.enter_context(
            triton_grpc.InferenceServerClient(f"unix://{server.daemon._grpc._socket.path}")
        )
        over_tcp = held.enter_context(
            triton_grpc.InferenceServerClient(f"127.0.0.1:{server.daemon.grpc_port}")
        )
        for client in (over_socket, over_tcp):
            assert client.is_server_ready(client_timeout=5.0)
        # A client that sends its request at once is served, whoever holds the other connections.
        _wait_until_served(server, "GET", READY)
        _wait_until_served(server, "POST", "/v2/models/add/infer", tensor())
    wait_until(
        lambda: server.daemon._http.open_connections <= 1, TIMEOUT_S, otherwise="connections stayed"
    )
