"""A bell that another thread rings to end a wait for sockets."""

from __future__ import annotations

import contextlib
import select
import socket


class Wake:
    """Rings are not counted: many before a `clear` are one. Safe from any thread."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """Readable while the bell rings."""
        return self._reader.fileno()

    def ring(self) -> None:
        """End the wait; never blocks, and after `close` does nothing."""
        with contextlib.suppress(OSError):  # full: it rings already
            self._writer.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)

    def wait(self, seconds: float) -> None:
        """Until the bell rings, or `seconds` have passed; clears it."""
        if select.select([self._reader], [], [], seconds)[0]:
            self.clear()

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
