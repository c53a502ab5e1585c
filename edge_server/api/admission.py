"""What may be in flight at once: inferences and streams (Admission), and bytes (ByteBudget)."""

from __future__ import annotations

import threading
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from edge_server.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge_server.errors import EdgeServerError
    from edge_server.requests import Cancellation

    class Call(Cancellation, Protocol):
        """A request on its way, as the door knows it that it came through."""

        def count(self, size_bytes: int) -> None:
            """Count what is about to be made of the request, until the call no longer needs it.

            Raises: Unavailable: see `ByteBudget.take`.
            """
            ...


WINDOW_BITS = {"gzip": 31, "deflate": 15}  # zlib's, the header included
PART_BYTES = 256 * 1024


def decompress(
    data: bytes | memoryview, encoding: str, longest_bytes: int, call: Call, setting: str
) -> bytes:
    """Return what `data` was before its client compressed it in the way `encoding` of
    `WINDOW_BITS`.

    Args:
        longest_bytes: of the result; `setting` names that limit.
        call: counts the result, part by part and before it is kept.

    Raises:
        InvalidRequest: it is not compressed in that way, or too long.
        Unavailable: there is no room for the result.
    """
    reader = zlib.decompressobj(WINDOW_BITS[encoding])
    parts: list[bytes] = []
    size_bytes = 0
    try:
        for part in _inflated(reader, memoryview(data)):
            size_bytes += len(part)
            if size_bytes > longest_bytes:
                raise InvalidRequest(
                    f"the body has more than {longest_bytes} bytes when it is decompressed "
                    f"({setting})"
                )
            if len(part) == PART_BYTES:
                call.count(len(part))
            parts.append(part)
    except zlib.error as error:
        raise InvalidRequest(f"the body is not compressed with {encoding}: {error}") from error
    if not reader.eof:
        raise InvalidRequest(f"the body ends before its {encoding} data does")
    return b"".join(parts)


def _inflated(reader: Any, body: memoryview) -> Iterator[bytes]:
    """Yield what `body` decompresses to, in parts of at most `PART_BYTES`."""
    for start in range(0, len(body), PART_BYTES):
        left: bytes | memoryview = body[start : start + PART_BYTES]
        while left and not reader.eof:
            yield reader.decompress(left, PART_BYTES)
            left = reader.unconsumed_tail
    yield reader.flush()


MIB = 1024 * 1024
SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."
# Smaller messages are not counted: the number of calls bounds them, and counting slows each call.
COUNTED_FROM_BYTES = 64 * 1024
# Interval at which a waiting thread checks whether to give up.
_LOOK_S = 0.2


def _too_many_streams(streams: int) -> EdgeServerError:
    return Unavailable(
        f"{streams} streams are open already; close one, send requests with ModelInfer, or raise "
        "grpc.max_infer_streams"
    )


class Admission:
    """Admits `limit` callers and refuses the rest at once, so that other calls find a thread.

    A caller is inside for a `with` block. After `close` every caller is refused with a text.
    Without it gRPC ends a call that arrives during shutdown as CANCELLED, and the client cannot
    tell whether the call ran.

    A stream holds one of `streams` places for as long as it is open. Its requests take none of
    `limit`: they hold no thread of a call, and the stream itself limits their number by leaving the
    next one in the client's socket. A refused one would be missing in a sequence.

    Attributes:
        inside: the number of callers inside.
    """

    def __init__(
        self,
        limit: int,
        streams: int = 8,
        too_many: Callable[[int], EdgeServerError] = _too_many_streams,
        stopping: str = SHUTTING_DOWN,
    ) -> None:
        self._stopping = stopping
        self._limit = limit
        self._streams = streams
        self._too_many = too_many
        self.inside = 0
        self._closed = False
        self._lock = threading.Lock()  # a third of an entered Condition's time
        self._changed = threading.Condition(self._lock)
        self._open_streams: list[Callable[[], object]] = []

    def __enter__(self) -> None:
        """Raises: Unavailable: all places are taken, or the gate is closed (Triton's texts)."""
        with self._lock:
            if self._closed or self.inside == self._limit:
                raise self.refusal() or Unavailable(self._stopping)
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.inside -= 1
            if self._closed:
                self._changed.notify_all()

    def refusal(self) -> Unavailable | None:
        """Return the error that a caller would get now; None if it would be admitted."""
        if self._closed:
            return Unavailable(self._stopping)
        if self.inside == self._limit:
            return Unavailable(
                f"Exceeds maximum queue size: {self._limit} inferences are in flight already "
                "(serving.max_inferences)"
            )
        return None

    def stream_refusal(self) -> EdgeServerError | None:
        """Return the error that a stream would get now; None if it would be admitted."""
        if self._closed:
            return Unavailable(self._stopping)
        if len(self._open_streams) >= self._streams:
            return self._too_many(self._streams)
        return None

    @contextmanager
    def stream(self, when_closed: Callable[[], object]) -> Iterator[None]:
        """Hold a stream's place for the block; `when_closed` is called once the gate closes.

        Raises: EdgeServerError: see `stream_refusal`.
        """
        with self._changed:
            if (error := self.stream_refusal()) is not None:
                raise error
            self._open_streams.append(when_closed)
        try:
            yield
        finally:
            with self._changed:
                self._open_streams.remove(when_closed)
                self._changed.notify_all()

    def close(self) -> None:
        """Refuse every new caller; inferences in flight continue."""
        with self._changed:
            self._closed = True
            streams = tuple(self._open_streams)
        for when_closed in streams:
            when_closed()

    def wait_until_empty(self, timeout_s: float) -> None:
        """After `close`: return after the last caller and stream, or after `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self.inside and not self._open_streams, timeout_s)


class ByteBudget:
    """Counts the bytes that callers make the server hold: requests, what is parsed from them, and
    responses.

    A request that is alone is always accepted: only the limit on one message bounds it.
    """

    def __init__(
        self, limit_bytes: int = 192 * MIB, setting: str = "grpc.max_pending_bytes"
    ) -> None:
        self.limit_bytes = limit_bytes
        self._setting = setting
        self._changed = threading.Condition()
        self.used_bytes = 0

    def take(self, size_bytes: int, instead_of: int = 0) -> None:
        """Count `size_bytes` until `give`.

        Args:
            instead_of: bytes counted before, which count no more: a response takes the place of its
                request, and fits if it is no longer.

        Raises: Unavailable: the bytes exceed the limit together with the other messages in flight.
        """
        with self._changed:
            others = self.used_bytes - instead_of
            if size_bytes > instead_of and others and others + size_bytes > self.limit_bytes:
                raise Unavailable(
                    f"Exceeds maximum queue size: messages of {others} bytes are in flight "
                    f"already, and of {self.limit_bytes} at most ({self._setting}); this one has "
                    f"{size_bytes}"
                )
            self.used_bytes = others + size_bytes

    def take_when_it_fits(self, size_bytes: int, given_up: Callable[[], bool]) -> bool:
        """Wait for room and count the bytes until `give`; return False after `given_up`."""
        with self._changed:
            while not self._fits(size_bytes):
                if given_up():
                    return False
                self._changed.wait(_LOOK_S)
            self.used_bytes += size_bytes
            return True

    def add(self, size_bytes: int) -> None:
        """Count `size_bytes` until `give`, even beyond the limit: they are already in memory."""
        with self._changed:
            self.used_bytes += size_bytes

    def give(self, size_bytes: int) -> None:
        """Stop counting the bytes; from any thread."""
        with self._changed:
            self.used_bytes -= size_bytes
            self._changed.notify_all()

    @property
    def room_bytes(self) -> int:
        """The number of bytes that still fit."""
        return max(0, self.limit_bytes - self.used_bytes)

    def _fits(self, size_bytes: int) -> bool:
        return not self.used_bytes or self.used_bytes + size_bytes <= self.limit_bytes
