"""The metrics port serves one path, and it stops whatever its clients do."""

from __future__ import annotations

import gc
import socket
import threading
import time
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from support.waiting import TIMEOUT_S

from edge_server.api.http.metrics import metrics_alone
from edge_server.api.http.server import HttpListener, HttpServer
from edge_server.api.http.sources import Sources
from edge_server.errors import Unavailable
from edge_server.pipeline.lane_feed import LaneLatency
from edge_server.settings import Http

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMITS = Http(max_connections=32, message_timeout_ms=round(1000 * TIMEOUT_S))


def metrics_server(sources: Sources | None = None, port: int = 0) -> HttpServer:
    sources = sources or Sources("1", list, [], LaneLatency())
    return HttpServer(
        [HttpListener("metrics", "127.0.0.1", port, lambda: metrics_alone(sources), limits=LIMITS)]
    )


@pytest.fixture
def server() -> Iterator[HttpServer]:
    server = metrics_server()
    server.start()
    yield server
    server.stop(TIMEOUT_S)
    assert server.worker.failure is None


def get(server: HttpServer, path: str = "/metrics", method: str = "GET") -> str:
    request = Request(f"http://127.0.0.1:{server.port_of('metrics')}{path}", method=method)
    with urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310
        text: str = response.read().decode()
        return text


def exchange(server: HttpServer, *request: bytes) -> bytes:
    with socket.create_connection(
        ("127.0.0.1", server.port_of("metrics")), TIMEOUT_S
    ) as connection:
        for piece in request:
            connection.sendall(piece)
        response = b""
        while piece := connection.recv(4096):
            response += piece
        return response


def test_metrics_are_served(server: HttpServer) -> None:
    assert "edge_build_info" in get(server)
    assert "edge_build_info" in get(server, "/metrics?name=edge_build_info")


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/", "GET", 404),
        ("/metrics/", "GET", 404),
        ("/metrics", "POST", 405),
        ("/metrics", "DELETE", 405),
    ],
)
def test_nothing_else_is_served(server: HttpServer, path: str, method: str, status: int) -> None:
    with pytest.raises(HTTPError) as caught:
        get(server, path, method)
    with caught.value:
        assert caught.value.code == status
        assert status != 404 or b"at /metrics" in caught.value.read()


@pytest.mark.parametrize("request_bytes", [b"hello\r\n\r\n", b"\xff" * 9000])
def test_invalid_requests_are_refused(server: HttpServer, request_bytes: bytes) -> None:
    assert exchange(server, request_bytes).startswith(b"HTTP/1.1 400 Bad Request\r\n")


def test_a_request_may_come_in_pieces(server: HttpServer) -> None:
    with socket.create_connection(
        ("127.0.0.1", server.port_of("metrics")), TIMEOUT_S
    ) as connection:
        for piece in (b"GET /metrics HT", b"TP/1.1\r\nConnection: close\r\n\r", b"\n"):
            connection.sendall(piece)
            assert "edge_build_info" in get(server)  # by then the piece has been read
        response = b""
        while piece := connection.recv(100):
            response += piece
    head, _, body = response.partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}\r\n".encode() in head
    assert b"edge_build_info" in body


def test_a_fault_in_the_numbers_is_an_error_500() -> None:
    outcomes = iter([ZeroDivisionError("unforeseen"), [], []])

    def models() -> list[object]:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    # Registering a collector calls it once.
    sources = Sources("1", models, [], LaneLatency())
    server = metrics_server(sources)
    server.start()
    try:
        with pytest.raises(HTTPError) as caught:
            get(server)
        caught.value.close()
        assert caught.value.code == 500
    finally:
        server.stop(TIMEOUT_S)
    assert server.worker.failure is None


def test_a_taken_port_is_named_with_the_remedy(server: HttpServer) -> None:
    taken = server.port_of("metrics")
    remedy = rf"127\.0\.0\.1:{taken}: .*--metrics-port.*--allow-metrics=false"
    with pytest.raises(Unavailable, match=remedy):
        metrics_server(port=taken)


def test_stopping_waits_for_no_client(server: HttpServer) -> None:
    server.stop(TIMEOUT_S)
    assert not server.worker.alive


def test_a_stop_loses_no_connection_that_arrives_meanwhile() -> None:
    end = threading.Event()
    ports: list[int] = []

    def connect_again() -> None:
        while not end.is_set():
            # The kernel tries again after a second where nobody accepts; here it is at once.
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", ports[-1]), 0.05).close()

    def serve_and_stop() -> None:
        server = metrics_server()
        ports.append(server.port_of("metrics"))
        server.start()
        while not server.open_connections and server.worker.alive:
            time.sleep(0.001)  # until a connection has come
        server.stop(TIMEOUT_S)
        assert server.worker.failure is None

    gc.collect()  # what tests before this one have left
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ports.append(0)
        clients = [threading.Thread(target=connect_again) for _ in range(2)]
        for client in clients:
            client.start()
        try:
            for _ in range(10):
                serve_and_stop()
        finally:
            end.set()
            for client in clients:
                client.join()
        gc.collect()
    assert [str(each.message) for each in caught if each.category is ResourceWarning] == []


def test_a_stop_that_waits_for_nothing_leaves_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(50):
        server = metrics_server()
        server.start()
        server.stop(0.0)
        server.worker.stop(TIMEOUT_S)
        assert not server.worker.alive
        assert server.worker.failure is None
    assert [record for record in caplog.records if record.levelname != "INFO"] == []
