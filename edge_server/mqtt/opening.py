"""Reaching a broker on a thread of its own: name servers and handshakes may take minutes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_server.mqtt.connection import Connection
    from edge_server.mqtt.wake import Wake


class Opening:
    """One attempt, begun with its construction; nobody has to wait for it.

    The system's resolver asks one name server after another, and nothing can interrupt it.

    Args:
        connection: to be opened, by no other thread as long as this is not over.
        wake: is rung when it is over.

    Attributes:
        error: why it failed, once it is over; None where the connection is open.
    """

    def __init__(self, connection: Connection, wake: Wake) -> None:
        self.connection = connection
        self.error: Exception | None = None
        self._wake = wake
        self._lock = threading.Lock()
        self._over = False
        self._left = False
        threading.Thread(target=self._run, name="mqtt-open", daemon=True).start()

    @property
    def over(self) -> bool:
        return self._over

    def leave(self) -> None:
        """Nobody wants the connection any more; it is closed, at once or when it is there."""
        with self._lock:
            self._left = True
            over = self._over
        if over:
            self.connection.close()

    def _run(self) -> None:
        try:
            self.connection.open()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told and tried again
            self.error = error
        with self._lock:
            self._over = True
            left = self._left
        if left:
            self.connection.close()
        else:
            self._wake.ring()
