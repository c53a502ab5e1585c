"""How many inferences may be inside at once, so that the other calls always find a thread."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from edge_server.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator


class Admission:
    """Lets `limit` callers in and turns the others away at once."""

    def __init__(self, limit: int) -> None:
        self._places = threading.Semaphore(limit)
        self._limit = limit

    @contextmanager
    def admit(self) -> Iterator[None]:
        """A place inside for the block.

        Raises:
            Unavailable: all places are taken (Triton's text for a full queue).
        """
        if not self._places.acquire(blocking=False):
            raise Unavailable(
                f"Exceeds maximum queue size: {self._limit} inferences are in flight already"
            )
        try:
            yield
        finally:
            self._places.release()
