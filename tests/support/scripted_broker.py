"""A broker on a raw socket that answers as MQTT 5 has it, and sends what a test has it send."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from typing import TYPE_CHECKING

from support.waiting import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

_LOOK_S = 0.05


def packet(first: int, body: bytes) -> bytes:
    """Return a packet with its fixed header."""
    return header(first, len(body)) + body


def header(first: int, length: int) -> bytes:
    """Return the fixed header of a packet whose body has `length` bytes."""
    size = bytearray()
    while True:
        length, low = divmod(length, 128)
        size.append(low | 128 * bool(length))
        if not length:
            return bytes([first, *size])


def retained(topic: bytes, payload: bytes = b"{}") -> bytes:
    """Return a message of QoS 0 that the broker had before the subscription."""
    return packet(0x31, struct.pack("!H", len(topic)) + topic + b"\0" + payload)


class ScriptedBroker:
    """Lets one client in after another, and acknowledges what they send.

    Attributes:
        clients: number of clients that were let in.
        published: topic and payload of what they have published, in order.

    Args:
        properties: of the CONNACK.
        subscribed: called with the client's socket once for each client, on its first subscription,
            before that is acknowledged.
        tls: encrypts.
        answers_subscriptions: False leaves every one without an answer.
    """

    def __init__(
        self,
        *,
        properties: bytes = b"",
        subscribed: Callable[[socket.socket], None] = lambda _: None,
        tls: ssl.SSLContext | None = None,
        answers_subscriptions: bool = True,
    ) -> None:
        self.clients = 0
        self.published: list[tuple[str, bytes]] = []
        self._properties = properties
        self._subscribed = subscribed
        self._tls = tls
        self._answers_subscriptions = answers_subscriptions
        self._ends = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(_LOOK_S)
        self.port: int = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self._server.close()

    def topics(self) -> set[str]:
        return {topic for topic, _ in self.published}

    def _serve(self) -> None:
        while not self._ends.is_set():
            with contextlib.suppress(TimeoutError):
                client, _ = self._server.accept()
                with contextlib.suppress(ConnectionError, ssl.SSLEOFError):
                    if self._tls is not None:
                        client = self._tls.wrap_socket(client, server_side=True)
                    with client:
                        self._answer(client)

    def _answer(self, client: socket.socket) -> None:
        data, subscribed = b"", False
        while not self._ends.is_set():
            client.settimeout(_LOOK_S)
            with contextlib.suppress(TimeoutError):
                if not (received := client.recv(65536)):
                    return
                data += received
            client.settimeout(TIMEOUT_S)  # what is sent waits for its reader
            while (found := _first(data)) is not None:
                first, body, data = found
                if first == 0x10:
                    self.clients += 1
                    size = header(0, len(self._properties))[1:]
                    client.sendall(packet(0x20, b"\0\0" + size + self._properties))
                elif first == 0x82:
                    if not subscribed:
                        self._subscribed(client)
                    subscribed = True
                    if self._answers_subscriptions:
                        answer = body[:2] + b"\0" + bytes(_filters(body))
                        client.sendall(packet(0x90, answer))
                elif first & 0xF0 == 0x30:
                    self._take(client, first, body)
                elif first == 0xC0:
                    client.sendall(b"\xd0\0")

    def _take(self, client: socket.socket, first: int, body: bytes) -> None:
        (length,) = struct.unpack_from("!H", body)
        topic, rest = body[2 : 2 + length].decode(), body[2 + length :]
        mid, rest = (rest[:2], rest[2:]) if first & 6 else (b"", rest)
        size, used = _length(rest)
        self.published.append((topic, rest[used + size :]))
        if mid:
            client.sendall(packet(0x40, mid))


def _length(data: bytes) -> tuple[int, int]:
    """Return a variable byte integer and the number of its bytes."""
    value = 0
    for used, byte in enumerate(data):
        value |= (byte & 127) << 7 * used
        if byte < 128:
            return value, used + 1
    raise IndexError


def _first(data: bytes) -> tuple[int, bytes, bytes] | None:
    """Return the first packet's first byte and body, and what follows; None until it is whole."""
    try:
        size, used = _length(data[1:5])
    except IndexError:
        return None
    end = 1 + used + size
    return (data[0], data[1 + used : end], data[end:]) if len(data) >= end else None


def _filters(body: bytes) -> int:
    """Return the number of filters of a SUBSCRIBE."""
    size, used = _length(body[2:])
    rest, count = body[2 + used + size :], 0
    while rest:
        (length,) = struct.unpack_from("!H", rest)
        rest, count = rest[2 + length + 1 :], count + 1
    return count
