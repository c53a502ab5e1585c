"""Wake: lets another thread end a wait for sockets."""

from __future__ import annotations

import contextlib
import select
import socket


class Wake:
    """A signal that is not counted: rings before a `clear` are one. Safe from any thread."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """The descriptor, readable after a ring."""
        return self._reader.fileno()

    def ring(self) -> None:
        """End the wait; never blocks, and does nothing after `close`."""
        with contextlib.suppress(OSError):  # the socket is full: an earlier ring is pending
            self._writer.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)

    def wait(self, seconds: float) -> None:
        """Return after a ring or after `seconds`, and clear the ring."""
        if select.select([self._reader], [], [], seconds)[0]:
            self.clear()

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
