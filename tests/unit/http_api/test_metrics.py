"""The metrics port answers one question, and nobody can hold it."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from edge_server.errors import Unavailable
from edge_server.http_api.lane_latency import LaneLatency
from edge_server.http_api.metrics import MetricsServer
from edge_server.http_api.sources import Sources
from edge_server.settings import Metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 10.0


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = MetricsServer(Metrics(port=0), Sources("1", list, [], LaneLatency()))
    server.start()
    yield server
    server.stop(PATIENCE_S)
    assert server.worker.failure is None


def ask(server: MetricsServer, path: str = "/metrics", method: str = "GET") -> str:
    request = Request(f"http://127.0.0.1:{server.port}{path}", method=method)
    with urlopen(request, timeout=PATIENCE_S) as answer:  # noqa: S310
        text: str = answer.read().decode()
        return text


def talk(server: MetricsServer, said: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as connection:
        connection.sendall(said)
        answer = b""
        while piece := connection.recv(4096):
            answer += piece
        return answer


def test_metrics_are_told(server: MetricsServer) -> None:
    assert "edge_build_info" in ask(server)
    assert "edge_build_info" in ask(server, "/metrics?name=edge_build_info")


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/", "GET", 404),
        ("/metrics/", "GET", 404),
        ("/metrics", "POST", 405),
        ("/metrics", "DELETE", 405),
    ],
)
def test_nothing_else_is(server: MetricsServer, path: str, method: str, status: int) -> None:
    with pytest.raises(HTTPError) as caught:
        ask(server, path, method)
    with caught.value:
        assert caught.value.code == status
        assert status != 404 or b"at /metrics" in caught.value.read()


@pytest.mark.parametrize(
    "said", [b"hello\r\n\r\n", b"\r\n\r\n", b"GET /metrics\r\n\r\n", b"\xff" * 9000]
)
def test_what_is_no_request_is_told_so(server: MetricsServer, said: bytes) -> None:
    assert talk(server, said).startswith(b"HTTP/1.1 400 Bad Request\r\n")


def test_who_says_nothing_is_left_and_the_next_is_answered(server: MetricsServer) -> None:
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
    silent[1].sendall(b"GET /metrics HTTP/1.1\r\n")
    assert "edge_build_info" in ask(server)
    for connection in silent:
        connection.close()


def test_a_fault_in_the_numbers_is_told_and_the_next_is_answered() -> None:
    answers = iter([ZeroDivisionError("nobody thought of it"), [], []])

    def models() -> list[object]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    # Registering a collector asks it once.
    sources = Sources("1", models, [], LaneLatency())  # type: ignore[arg-type]
    server = MetricsServer(Metrics(port=0), sources)
    server.start()
    try:
        with pytest.raises(HTTPError) as caught:
            ask(server)
        caught.value.close()
        assert caught.value.code == 500
    finally:
        server.stop(PATIENCE_S)
    assert server.worker.failure is None


def test_a_taken_port_is_named_with_the_remedy(server: MetricsServer) -> None:
    with pytest.raises(Unavailable, match=rf"127\.0\.0\.1:{server.port}: .*--metrics-port"):
        MetricsServer(Metrics(port=server.port), Sources("1", list, [], LaneLatency()))


def test_stopping_waits_for_nobody(server: MetricsServer) -> None:
    server.stop(PATIENCE_S)
    assert not server.worker.alive
