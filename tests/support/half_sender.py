"""A client of HTTP/2 that sends as much of a gRPC request as the test wants, which gRPC's cannot.

Frames are as in RFC 9113, headers as HPACK's literals without indexing (RFC 7541, 6.2.2).
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import defaultdict
from contextlib import suppress

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW = 0, 1, 3, 4, 6, 8
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW_SIZE = 4
_FRAME_BYTES = 16384
_ZEROS = bytes(_FRAME_BYTES)


class HalfSender:
    """One connection, on which a call lacks the end of its message, or its response a reader.

    Args:
        timeout_s: for room in the server's windows.
        reads: the server may send responses.
    """

    def __init__(self, port: int, timeout_s: float, *, reads: bool = True) -> None:
        self._timeout_s = timeout_s
        self._socket = socket.create_connection(("127.0.0.1", port), timeout_s)
        self._socket.settimeout(None)
        self._beginning = threading.Lock()
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._initial = 65535
        self._room: defaultdict[int, int] = defaultdict(lambda: self._initial)
        self._room[0] = 65535
        self._next = 1
        self.ended: set[int] = set()
        self.closed = False
        settings = b"" if reads else struct.pack(">HI", _INITIAL_WINDOW_SIZE, 0)
        self._send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, settings))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def call(self, path: str, says_bytes: int) -> int:
        """Begin a call whose message has so many bytes, as it says; its number."""
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "localhost",
            "content-type": "application/grpc",
            "te": "trailers",
        }
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())
        # Streams begin in the order of their numbers.
        with self._beginning:
            with self._changed:
                number, self._next = self._next, self._next + 2
                self._room[number] = self._initial
            self._send(_frame(_HEADERS, _END_HEADERS, number, block))
        self._send_data(number, struct.pack(">BI", 0, says_bytes))
        return number

    def send_zeros(self, number: int, bytes_: int) -> bool:
        """So much of the message, as the server takes it; False where it has ended the call."""
        while bytes_ > 0:
            if not self._send_data(number, _ZEROS[:bytes_]):
                return False
            bytes_ -= _FRAME_BYTES
        return True

    def send(self, number: int, data: bytes) -> bool:
        """A short part of the message; False where the server has ended the call."""
        return self._send_data(number, data)

    def wait_for_end(self, number: int) -> bool:
        """Whether the server ends the call."""
        with self._changed:
            return self._changed.wait_for(
                lambda: number in self.ended or self.closed, self._timeout_s
            )

    def close(self) -> None:
        # The reader's file keeps the descriptor open beyond `close`.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._reader.join()

    def _send_data(self, number: int, data: bytes) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    number in self.ended
                    or self.closed
                    or min(self._room[0], self._room[number]) >= len(data)
                ),
                self._timeout_s,
            )
            if number in self.ended or self.closed:
                return False
            self._room[0] -= len(data)
            self._room[number] -= len(data)
        return self._send(_frame(_DATA, 0, number, data))

    def _send(self, data: bytes) -> bool:
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError:
            return False
        return True

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as file:
                while len(head := file.read(9)) == 9:
                    length = int.from_bytes(head[:3], "big")
                    kind, flags, number = struct.unpack(">BBI", head[3:])
                    self._take(kind, flags, number, file.read(length))
        except (OSError, ValueError):
            pass
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def _take(self, kind: int, flags: int, number: int, said: bytes) -> None:
        if kind == _PING and not flags & _ACK:
            self._send(_frame(_PING, _ACK, 0, said))
        if kind == _SETTINGS and not flags & _ACK:
            self._send(_frame(_SETTINGS, _ACK, 0))
        with self._changed:
            if kind == _SETTINGS:
                for place in range(0, len(said), 6):
                    name, value = struct.unpack(">HI", said[place : place + 6])
                    if name == _INITIAL_WINDOW_SIZE:
                        for stream in self._room.keys() - {0}:
                            self._room[stream] += value - self._initial
                        self._initial = value
            elif kind == _WINDOW:
                self._room[number] += int.from_bytes(said, "big")
            elif kind == _RESET or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
                self.ended.add(number)
            self._changed.notify_all()


def _frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, number) + payload


def _text(value: str) -> bytes:
    return bytes([len(value)]) + value.encode()
