"""Admission: limits the inferences in flight, and refuses new ones during shutdown."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from edge_server.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."


class Admission:
    """Admits `limit` callers and refuses the rest at once, so that other calls find a thread.

    After `close` every caller is refused with a text. Without it gRPC ends a call that arrives
    during shutdown as CANCELLED, and the client cannot tell whether the call ran.

    A stream holds one of `streams` places for as long as it is open. Its requests take none of
    `limit`: they hold no thread of a call, and the stream itself limits their number by leaving
    the next one in the client's socket. A refused one would be missing in a sequence.
    """

    def __init__(self, limit: int, streams: int = 8) -> None:
        self._limit = limit
        self._streams = streams
        self._inside = 0
        self._inside_streams = 0
        self._closed = False
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._open_streams: list[Callable[[], None]] = []

    def enter(self) -> None:
        """Take a place until `leave`.

        Raises:
            Unavailable: all places are taken, or the gate is closed (Triton's texts).
        """
        with self._lock:
            refusal = self.refusal()
            if refusal is not None:
                raise refusal
            self._inside += 1

    def enter_from_stream(self) -> None:
        """Count a request of an open stream until `leave_from_stream`.

        Raises:
            Unavailable: the gate is closed.
        """
        with self._lock:
            if self._closed:
                raise Unavailable(SHUTTING_DOWN)
            self._inside_streams += 1

    def leave_from_stream(self) -> None:
        """Stop counting a request of a stream; from any thread."""
        with self._lock:
            self._inside_streams -= 1
            self._tell_if_empty()

    def refusal(self) -> Unavailable | None:
        """Return the error that `enter` would raise now; None if it would admit the caller."""
        if self._closed:
            return Unavailable(SHUTTING_DOWN)
        if self._inside == self._limit:
            return Unavailable(
                f"Exceeds maximum queue size: {self._limit} inferences are in flight already"
            )
        return None

    def leave(self) -> None:
        """Release a place; from any thread."""
        with self._lock:
            self._inside -= 1
            self._tell_if_empty()

    def __enter__(self) -> None:
        """Do the same as `enter`."""
        self.enter()

    def __exit__(self, *_: object) -> None:
        self.leave()

    @contextmanager
    def stream(self, when_closed: Callable[[], None]) -> Iterator[None]:
        """Hold a stream's place for the block; `when_closed` is called once the gate closes.

        Raises:
            Unavailable: `streams` streams are open, or the gate is closed.
        """
        with self._left:
            if self._closed:
                raise Unavailable(SHUTTING_DOWN)
            if len(self._open_streams) == self._streams:
                raise Unavailable(
                    f"{self._streams} streams are open already; close one, or send requests "
                    "with ModelInfer"
                )
            self._open_streams.append(when_closed)
        try:
            yield
        finally:
            with self._left:
                self._open_streams.remove(when_closed)

    def close(self) -> None:
        """Refuse every new caller; inferences in flight continue."""
        with self._left:
            self._closed = True
            streams = tuple(self._open_streams)
        for when_closed in streams:
            when_closed()

    def wait_until_empty(self, timeout_s: float) -> None:
        """After `close`: return after the last inference, or after `timeout_s` seconds."""
        with self._left:
            self._left.wait_for(lambda: not self._inside and not self._inside_streams, timeout_s)

    def _tell_if_empty(self) -> None:
        if self._closed and not self._inside and not self._inside_streams:
            self._left.notify_all()
