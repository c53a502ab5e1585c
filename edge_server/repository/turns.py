"""Who works on a model waits for whoever works on it already, and for nobody else."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from edge_server.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


class Turns:
    """Locks by name, several of them taken in one step, so that no two can wait for each other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: set[str] = set()
        self._over = False

    @contextmanager
    def hold(self, names: Collection[str]) -> Iterator[None]:
        """Wait until all of `names` are free; they are the caller's inside.

        Raises:
            Unavailable: `end` was called meanwhile.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._held.isdisjoint(names))
            if self._over:
                raise Unavailable("Server exiting")
            self._held.update(names)
        try:
            yield
        finally:
            with self._changed:
                self._held.difference_update(names)
                self._changed.notify_all()

    def end(self, timeout_s: float) -> bool:
        """Let nobody in any more; whether all who were in have gone in that time."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._held, timeout_s)
