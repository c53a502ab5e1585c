"""The gate for inferences: how many may be inside at once, and whether any may still come."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from edge_server.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator


class Admission:
    """Lets `limit` callers in and turns the others away at once, so that other calls find a thread.

    After `close` everybody is turned away in words. Without it a call that arrives as the server
    shuts down is cut off as CANCELLED, and its client cannot tell whether it ran.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._inside = 0
        self._closed = False
        self._left = threading.Condition()

    @contextmanager
    def admit(self) -> Iterator[None]:
        """A place inside for the block.

        Raises:
            Unavailable: all places are taken, or the gate is closed (Triton's texts).
        """
        with self._left:
            if self._closed:
                raise Unavailable(
                    "GRPC server is shutting down and has stopped accepting new requests."
                )
            if self._inside == self._limit:
                raise Unavailable(
                    f"Exceeds maximum queue size: {self._limit} inferences are in flight already"
                )
            self._inside += 1
        try:
            yield
        finally:
            with self._left:
                self._inside -= 1
                self._left.notify_all()

    def close(self) -> None:
        """Let nobody in any more; who is inside goes on."""
        with self._left:
            self._closed = True

    def wait_until_empty(self, timeout_s: float) -> None:
        """Return when the last inference has left, or after `timeout_s`."""
        with self._left:
            self._left.wait_for(lambda: self._inside == 0, timeout_s)
