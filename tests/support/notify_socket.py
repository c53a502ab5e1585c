"""systemd's end of NOTIFY_SOCKET."""

from __future__ import annotations

import queue
import socket
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class NotifySocket:
    """Read all the time, as systemd does: after ten messages that are not, a sender waits.

    `said` has each message, in the order in which they came.
    """

    def __init__(self, folder: Path) -> None:
        """Listens at `folder/notify`."""
        address = folder / "notify"
        address.unlink(missing_ok=True)  # of one that was started before
        self.address = str(address)
        self.said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, assignment: str, timeout_s: float) -> bool:
        """Whether that is said within the time, after what was waited for before."""
        try:
            while assignment not in self.said.get(timeout=timeout_s):
                pass
        except queue.Empty:
            return False
        return True

    def close(self) -> None:
        """Return once all that was sent is in `said`."""
        if self._reader.is_alive():
            self._socket.shutdown(socket.SHUT_RD)
            self._reader.join()
            self._socket.close()

    def _read(self) -> None:
        while said := self._socket.recv(4096):
            self.said.put(said.decode())
