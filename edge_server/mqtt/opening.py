"""Opening: connects to a broker on its own thread, as resolvers and handshakes may take minutes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_server.mqtt.connection import Connection
    from edge_server.mqtt.wake import Wake


class Opening:
    """One connection attempt, started by the constructor; no caller waits for it.

    The system's resolver asks one name server after another, and cannot be interrupted.

    Args:
        connection: the connection to open; no other thread may use it until the attempt is over.
        wake: rings when the attempt is over.

    Attributes:
        error: the reason of a failure, once the attempt is over; None if the connection is open.
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
        """Abandon the attempt; its connection is closed at once, or as soon as it is open."""
        with self._lock:
            self._left = True
            over = self._over
        if over:
            self.connection.close()

    def _run(self) -> None:
        try:
            self.connection.open()
        except Exception as error:  # noqa: BLE001 - every error is logged, then retried
            self.error = error
        with self._lock:
            self._over = True
            left = self._left
        if left:
            self.connection.close()
        else:
            self._wake.ring()
