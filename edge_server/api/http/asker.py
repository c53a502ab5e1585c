"""Asker: one connection to the metrics port, its request so far and its unsent response."""

from __future__ import annotations

import socket
from contextlib import suppress

_LONGEST_REQUEST_BYTES = 8192


class Asker:
    """Reads and writes as far as possible without blocking.

    Attributes:
        until: when the connection is dropped, by `time.monotonic()`.
        answered: the request is complete; `send` writes the response.

    Args:
        connection: owned by this object from now on.
    """

    def __init__(self, connection: socket.socket, until: float) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.until = until
        self.answered = False
        self._request = b""
        self._left = memoryview(b"")

    def hear(self) -> bytes | None:
        """Return the request, up to its empty line or the size limit; None while it is incomplete.

        Raises:
            OSError: the connection is broken.
        """
        piece = self.connection.recv(_LONGEST_REQUEST_BYTES - len(self._request))
        self._request += piece
        is_whole = b"\r\n\r\n" in self._request or len(self._request) >= _LONGEST_REQUEST_BYTES
        return self._request if is_whole or not piece else None

    def answer(self, text: bytes, until: float) -> None:
        """Set the response that `send` writes, until `until`."""
        self.answered, self.until = True, until
        self._left = memoryview(text)

    def send(self) -> bool:
        """Write; return whether the response is complete.

        Raises:
            OSError: the connection is broken.
        """
        with suppress(BlockingIOError):
            self._left = self._left[self.connection.send(self._left) :]
        if self._left:
            return False
        self.connection.shutdown(socket.SHUT_WR)
        return True

    def close(self) -> None:
        self.connection.close()
