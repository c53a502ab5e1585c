"""One connection to the metrics port: what was asked so far, and what of the answer is left."""

from __future__ import annotations

import socket
from contextlib import suppress

_LONGEST_REQUEST_BYTES = 8192


class Asker:
    """Reads and writes as far as that goes without waiting.

    Attributes:
        until: when it is left, by `time.monotonic()`.
        answered: its request is complete; what it is sent is `send`'s.

    Args:
        connection: is the asker's from now on.
    """

    def __init__(self, connection: socket.socket, until: float) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.until = until
        self.answered = False
        self._request = b""
        self._left = memoryview(b"")

    def hear(self) -> bytes | None:
        """The request, up to its empty line or to what there is room for; None while more is due.

        Raises:
            OSError: the connection is broken.
        """
        piece = self.connection.recv(_LONGEST_REQUEST_BYTES - len(self._request))
        self._request += piece
        is_whole = b"\r\n\r\n" in self._request or len(self._request) >= _LONGEST_REQUEST_BYTES
        return self._request if is_whole or not piece else None

    def answer(self, text: bytes, until: float) -> None:
        """From now on `send` sends `text`, till `until`."""
        self.answered, self.until = True, until
        self._left = memoryview(text)

    def send(self) -> bool:
        """Whether all is sent.

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
