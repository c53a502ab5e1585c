"""The metrics port answers one question, and nobody can hold it."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from edge_server.api.http.asker import Asker
from edge_server.api.http.lane_latency import LaneLatency
from edge_server.api.http.metrics import MOST_ASKERS, MetricsServer
from edge_server.api.http.sources import Sources
from edge_server.errors import Unavailable
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


def test_many_who_say_nothing_do_not_keep_another_waiting(server: MetricsServer) -> None:
    end = threading.Event()

    def come_again() -> None:
        held: list[socket.socket] = []
        while not end.is_set():
            held.append(socket.create_connection(("127.0.0.1", server.port), PATIENCE_S))
            if len(held) > 2 * MOST_ASKERS:
                held.pop(0).close()
        for each in held:
            each.close()

    silent = threading.Thread(target=come_again)
    silent.start()
    try:
        for _ in range(5):
            assert "edge_build_info" in ask(server)
        assert len(server._askers) <= MOST_ASKERS
    finally:
        end.set()
        silent.join()


def test_the_silent_are_left_when_their_time_is_over(server: MetricsServer) -> None:
    held = [socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) for _ in range(8)]
    for each in held:
        assert each.recv(1) == b""
        each.close()
    assert not server._askers


def test_who_does_not_take_the_answer_keeps_nobody_waiting(server: MetricsServer) -> None:
    slow = [socket.socket() for _ in range(MOST_ASKERS // 2)]
    for each in slow:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        each.connect(("127.0.0.1", server.port))
        each.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    assert "edge_build_info" in ask(server)
    for each in slow:
        each.close()


def test_a_request_may_come_in_pieces_and_an_answer_go_in_pieces() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        asker = Asker(theirs, 0.0)
        ours.sendall(b"GET /metrics HT")
        assert asker.hear() is None
        ours.sendall(b"TP/1.1\r\n\r\n")
        assert asker.hear() == b"GET /metrics HTTP/1.1\r\n\r\n"
        text = b"x" * 10_000_000
        asker.answer(text, 1.0)
        got = b""
        while not asker.send():
            got += ours.recv(1 << 20)
        asker.close()
        while piece := ours.recv(1 << 20):
            got += piece
        assert got == text


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
