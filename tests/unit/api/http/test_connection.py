"""HttpConnection: how much of a client one round of the loop parses. Real clients hold the rest of
its rules, in tests/integration/test_http_server.py."""

from __future__ import annotations

import asyncio
import resource
import socket
from typing import TYPE_CHECKING, Any

from support.waiting import TIMEOUT_S

from edge_server.api.http.connection import Connections, HttpConnection
from edge_server.settings import Http

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path


class Parser(asyncio.Protocol):
    """Stands where uvicorn's protocols do; takes `most` parts."""

    def __init__(self) -> None:
        self.parts: list[int] = []
        self.most = 10**9
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parts.append(len(data))
        if len(self.parts) >= self.most:
            self.transport.pause_reading()


def scene(play: Callable[[Parser, HttpConnection, socket.socket], Awaitable[None]]) -> None:
    async def run() -> None:
        limits = Http(max_header_bytes=1024 * 1024)
        parser, (accepted, client) = Parser(), socket.socketpair()
        others = Connections(accepted, lambda: None, None, limits)
        others.protocol = lambda _: parser
        with client:
            accepted.setblocking(False)
            connection = HttpConnection(others, accepted, None)
            await asyncio.wait_for(play(parser, connection, client), TIMEOUT_S)
            connection.abort()
            await until(lambda: accepted.fileno() < 0)

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_a_server_that_stops_without_descriptors_accepts_no_more(tmp_path: Path) -> None:
    async def run() -> None:
        bound, client = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        bound.bind(str(tmp_path / "http"))
        bound.listen()
        bound.setblocking(False)
        server = Connections(bound, lambda: None, None, Http())
        serving = asyncio.create_task(server.serve())
        await asyncio.sleep(0)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        with bound, client:
            client.connect(bound.getsockname())
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
            try:
                server._accept()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            retry = server._retry
            assert retry is not None
            assert not retry.cancelled()
            serving.cancel()
            await asyncio.wait([serving])
            assert retry.cancelled()
            assert not asyncio.get_running_loop().remove_reader(bound)

    asyncio.run(run())


def test_small_requests_are_parsed_a_kilobyte_in_each_round() -> None:
    async def play(parser: Parser, _: HttpConnection, client: socket.socket) -> None:
        client.sendall(bytes(50_000))
        await until(lambda: sum(parser.parts) == 50_000)
        assert max(parser.parts) == 1024

    scene(play)


def test_what_the_parser_does_not_take_stays_in_the_connection() -> None:
    async def play(parser: Parser, connection: HttpConnection, client: socket.socket) -> None:
        parser.most = 3
        client.sendall(bytes(50_000))
        await until(lambda: len(parser.parts) == 3)
        await asyncio.sleep(0.05)
        assert len(parser.parts) == 3
        parser.most = 10**9
        connection.resume_reading()
        await until(lambda: sum(parser.parts) == 50_000)

    scene(play)


def test_a_body_is_parsed_as_it_comes() -> None:
    async def play(parser: Parser, connection: HttpConnection, client: socket.socket) -> None:
        client.sendall(b"header")
        await until(lambda: parser.parts == [6])
        connection.begin(body_bytes=1_000_000)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(client, bytes(1_000_000))
        await until(lambda: sum(parser.parts) == 1_000_006)
        assert max(parser.parts) > 16 * 1024

    scene(play)


def test_while_a_request_runs_those_behind_it_stay_in_the_connection() -> None:
    async def play(parser: Parser, connection: HttpConnection, client: socket.socket) -> None:
        client.sendall(bytes(50_000))
        while not parser.parts:
            await asyncio.sleep(0)
        connection.begin(body_bytes=0)
        parsed = list(parser.parts)
        await asyncio.sleep(0.05)
        assert parser.parts == parsed
        connection.end()
        await until(lambda: sum(parser.parts) == 50_000)

    scene(play)


def test_what_comes_behind_the_end_of_a_body_is_parsed_in_small_parts() -> None:
    async def play(parser: Parser, connection: HttpConnection, client: socket.socket) -> None:
        client.sendall(b"header")
        await until(lambda: parser.parts == [6])
        connection.begin(body_bytes=20_000)
        client.sendall(bytes(20_000 + 100_000))
        await until(lambda: sum(parser.parts) == 120_006)
        assert max(parser.parts) == 20_000
        assert sorted(parser.parts)[-2] <= 1024

    scene(play)


def test_a_connection_that_is_lost_while_it_is_served_waits_for_no_request() -> None:
    async def play(parser: Parser, connection: HttpConnection, client: socket.socket) -> None:
        client.sendall(b"header")
        await until(lambda: parser.parts == [6])
        connection.begin(body_bytes=20_000)
        client.sendall(bytes(10))
        await until(lambda: sum(parser.parts) == 16)
        client.close()
        await until(lambda: connection not in connection._others.open)
        connection.end()
        assert connection not in connection._others.waiting

    scene(play)
