"""A reference count: the last user of a shared resource closes it."""

from __future__ import annotations

import threading


class RefCount:
    """Counts the users of a resource; its maker is the first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 1

    def more(self) -> bool:
        """Add a user; False where the last user has ended and the resource must not be used."""
        with self._lock:
            if self._count == 0:
                return False
            self._count += 1
            return True

    def end(self) -> bool:
        """Remove a user, once for each; True where that was the last one."""
        with self._lock:
            if self._count == 0:
                return False
            self._count -= 1
            return self._count == 0
