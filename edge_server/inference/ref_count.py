"""Things that are closed by the last of those who use them."""

from __future__ import annotations

import threading


class RefCount:
    """How many use a thing. Whoever makes it is the first; every method may be called from any
    thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 1

    def more(self) -> bool:
        """One more uses it; False where the last one has gone already, and it is not to be used."""
        with self._lock:
            if self._count == 0:
                return False
            self._count += 1
            return True

    def end(self) -> bool:
        """To be called once for each that uses it; whether that was the last one."""
        with self._lock:
            if self._count == 0:
                return False
            self._count -= 1
            return self._count == 0
