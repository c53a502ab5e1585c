"""The gate for inferences: how many may be inside at once, and whether any may still come."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from edge_server.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."


class Admission:
    """Lets `limit` callers in and turns the others away at once, so that other calls find a thread.

    After `close` everybody is turned away in words. Without it a call that arrives as the server
    shuts down is cut off as CANCELLED, and its client cannot tell whether it ran.

    A stream holds one of `streams` places for as long as it is open. Its requests take none of
    `limit`: they hold no thread of a call, and of how many it takes the stream itself sees to, by
    leaving the next one in the client's socket. Turned away, they would be missing in a sequence.
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
        """Take a place, to be given back with `leave`.

        Raises:
            Unavailable: all places are taken, or the gate is closed (Triton's texts).
        """
        with self._lock:
            refusal = self.refusal()
            if refusal is not None:
                raise refusal
            self._inside += 1

    def enter_from_stream(self) -> None:
        """Be counted as a request of an open stream, until `leave`.

        Raises:
            Unavailable: the gate is closed.
        """
        with self._lock:
            if self._closed:
                raise Unavailable(SHUTTING_DOWN)
            self._inside_streams += 1

    def leave_from_stream(self) -> None:
        """Be counted no more; from any thread."""
        with self._lock:
            self._inside_streams -= 1
            self._tell_if_empty()

    def refusal(self) -> Unavailable | None:
        """What `enter` would raise at this moment; None where it would let in."""
        if self._closed:
            return Unavailable(SHUTTING_DOWN)
        if self._inside == self._limit:
            return Unavailable(
                f"Exceeds maximum queue size: {self._limit} inferences are in flight already"
            )
        return None

    def leave(self) -> None:
        """Give a place back; from any thread."""
        with self._lock:
            self._inside -= 1
            self._tell_if_empty()

    def __enter__(self) -> None:
        """As `enter`."""
        self.enter()

    def __exit__(self, *_: object) -> None:
        self.leave()

    @contextmanager
    def stream(self, when_closed: Callable[[], None]) -> Iterator[None]:
        """A stream's place for the block; `when_closed` is called once the gate closes.

        Raises:
            Unavailable: as many streams are open as may be, or the gate is closed.
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
        """Let nobody in any more; who is inside goes on."""
        with self._left:
            self._closed = True
            streams = tuple(self._open_streams)
        for when_closed in streams:
            when_closed()

    def wait_until_empty(self, timeout_s: float) -> None:
        """After `close`: return when the last inference has left, or after `timeout_s`."""
        with self._left:
            self._left.wait_for(lambda: not self._inside and not self._inside_streams, timeout_s)

    def _tell_if_empty(self) -> None:
        if self._closed and not self._inside and not self._inside_streams:
            self._left.notify_all()
