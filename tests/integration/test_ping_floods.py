"""A flood of pings costs what its pings cost: gRPC answers them, and closes nothing. A client that
keeps gRPC's limits from counting is closed."""

from __future__ import annotations

import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import grpc

from edge_server.api.grpc.server import channel_options
from edge_server.settings import Grpc

TIMEOUT_S = 60.0
PINGS = 5000
_SETTINGS, _PING, _GOAWAY, _ACK = 4, 6, 7, 1


def _frame(kind: int, flags: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, 0) + payload


def test_a_client_that_never_acknowledges_the_settings_is_closed() -> None:
    """The limits of headers and streams hold from that acknowledgement on."""
    settings = Grpc(handshake_timeout_ms=2000)
    server = grpc.server(ThreadPoolExecutor(1), options=channel_options(settings, unix=False))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, b"")
    try:
        with (
            socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as fair,
            socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as silent,
        ):
            fair.sendall(hello + _frame(_SETTINGS, _ACK, b""))
            silent.sendall(hello)
            while silent.recv(4096):
                pass
            fair.sendall(_frame(_PING, 0, bytes(8)))
            with fair.makefile("rb") as file:
                while (head := file.read(9))[3] != _PING:
                    file.read(int.from_bytes(head[:3], "big"))
    finally:
        server.stop(None).wait()


def test_each_ping_of_a_flood_is_answered_and_the_connection_stays() -> None:
    server = grpc.server(ThreadPoolExecutor(1), options=channel_options(Grpc(), unix=False))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    answered = 0
    try:
        with (
            socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection,
            connection.makefile("rb") as file,
        ):
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, b""))
            for expected in (PINGS, 2 * PINGS):
                connection.sendall(_frame(_PING, 0, bytes(8)) * PINGS)
                while answered < expected:
                    head = file.read(9)
                    assert len(head) == 9, "the server closed the connection"
                    assert head[3] != _GOAWAY
                    answered += head[3] == _PING and head[4] == _ACK
                    file.read(int.from_bytes(head[:3], "big"))
    finally:
        server.stop(None).wait()
