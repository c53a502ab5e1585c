"""HttpCall: a request as its connection sees it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from edge_server.api.admission import COUNTED_FROM_BYTES
from edge_server.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from starlette.types import Scope

    from edge_server.api.admission import ByteBudget

_KEY = "edge_server.call"
# Of a body without tensors and files; `http.max_body_bytes` is never less.
QUESTION_BYTES = 64 * 1024


class Refused(BaseException):
    """The body is not read any further; see `HttpCall.refusal`.

    No `Exception`: Starlette would answer with 500 before the application does.
    """


class Refusal(NamedTuple):
    """Why a body is not read."""

    status: int
    text: str


class HttpCall:
    """One request; made when its header is complete, and the `Cancellation` of what it requests.

    A body is written into one buffer of its declared length, and nothing of a body that is too
    long, alone or together with those of other requests, is kept. Used on the server's thread;
    `cancelled` and `when_cancelled` are safe from any thread.

    Args:
        length: of the body, as declared; None is chunked.
        longest_bytes: of the body.
        budget: counts the body until `release`.

    Attributes:
        refusal: why the body is not read; None where it is.
        began_ns, read_ns: when the header and then the body was complete; `time.monotonic_ns()`.
    """

    def __init__(self, length: int | None, longest_bytes: int, budget: ByteBudget) -> None:
        self.began_ns = time.monotonic_ns()
        self.read_ns = self.began_ns
        self.refusal: Refusal | None = None
        self._longest_bytes = longest_bytes
        self._budget = budget
        self._counted_bytes = 0
        self._used = 0
        self._buffer = bytearray()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._when_answered: list[Callable[[], None]] = []
        self.cancelled = False
        self._answered = False
        self._declared = length is not None
        if length:
            self._make_room(length)

    @staticmethod
    def of(scope: Scope) -> HttpCall:
        """Return the call of a request."""
        return cast("HttpCall", scope["extensions"][_KEY])

    def put_into(self, scope: MutableMapping[str, Any]) -> None:
        """Have `of` return this call for `scope`."""
        scope["extensions"] = {_KEY: self}

    @property
    def body(self) -> memoryview:
        """What has arrived of the body."""
        return memoryview(self._buffer)[: self._used]

    @property
    def left(self) -> int:
        """The number of bytes that are missing of a body of declared length."""
        return len(self._buffer) - self._used if self._declared else 0

    @property
    def missing(self) -> memoryview:
        """The rest of the buffer, for what has not arrived of a body of declared length."""
        return memoryview(self._buffer)[self._used :]

    def add(self, part: bytes) -> None:
        """Take a part of the body."""
        end = self._used + len(part)
        if self.refusal is None and end > len(self._buffer):
            self._make_room(max(end, min(2 * len(self._buffer), self._longest_bytes)))
        if self.refusal is None:
            self._buffer[self._used : end] = part
            self._used = end

    def advance(self, count: int) -> None:
        """Take `count` bytes that were written into `missing`."""
        self._used += count

    def complete(self) -> None:
        """The body is complete."""
        self.read_ns = time.monotonic_ns()

    def limit(self, longest_bytes: int) -> None:
        """Refuse a body that is longer, which may be arriving."""
        self._longest_bytes = min(self._longest_bytes, longest_bytes)
        if self.refusal is None and len(self._buffer) > longest_bytes:
            self._refuse_length(len(self._buffer))

    def count(self, size_bytes: int) -> None:
        """Count more bytes until `release`, on any thread; see `Call`.

        Raises:
            Unavailable: they do not fit.
        """
        self._budget.take(size_bytes)
        with self._lock:
            if not self._answered:
                self._counted_bytes += size_bytes
                return
        self._budget.give(size_bytes)

    def count_answer(self, size_bytes: int) -> None:
        """Count an answer too, as far as it is longer than what the call holds already.

        Raises:
            Unavailable: it does not fit.
        """
        more_bytes = size_bytes - self._counted_bytes
        if more_bytes >= COUNTED_FROM_BYTES:
            self.count(more_bytes)

    def give(self, size_bytes: int) -> None:
        """Count that many bytes no longer; they are given up before the call is over."""
        with self._lock:
            size_bytes = min(size_bytes, self._counted_bytes)
            self._counted_bytes -= size_bytes
        self._budget.give(size_bytes)

    def release(self) -> None:
        """Stop counting the body: its request is answered."""
        self._buffer = bytearray()
        self._used = 0
        with self._lock:
            callbacks, self._when_answered = self._when_answered, []
            self._answered = True
            counted_bytes, self._counted_bytes = self._counted_bytes, 0
        self._budget.give(counted_bytes)
        for callback in callbacks:
            callback()

    def when_answered(self, callback: Callable[[], None]) -> bool:
        """Call `callback` when the answer is sent, or the client gone; False if that is over."""
        with self._lock:
            if not self._answered:
                self._when_answered.append(callback)
            return not self._answered

    def cancel(self) -> None:
        """The client is gone."""
        with self._lock:
            self.cancelled = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def when_cancelled(self, callback: Callable[[], None]) -> None:
        """See `Cancellation`."""
        with self._lock:
            if not self.cancelled:
                self._callbacks.append(callback)
                return
        callback()

    def _make_room(self, size_bytes: int) -> None:
        if size_bytes > self._longest_bytes:
            self._refuse_length(size_bytes)
            return
        if size_bytes >= COUNTED_FROM_BYTES:
            try:
                self._budget.take(size_bytes - self._counted_bytes)
            except Unavailable as error:
                self._refuse(503, str(error))
                return
            self._counted_bytes = size_bytes
        if self._buffer:
            self._buffer += bytes(size_bytes - len(self._buffer))
        else:
            self._buffer = bytearray(size_bytes)

    def _refuse_length(self, size_bytes: int) -> None:
        setting = " (http.max_body_bytes)" if self._longest_bytes > QUESTION_BYTES else ""
        self._refuse(
            413,
            f"a body of {size_bytes} bytes is not read; it has {self._longest_bytes} at most"
            f"{setting}",
        )

    def _refuse(self, status: int, text: str) -> None:
        self.refusal = Refusal(status, text)
        self._buffer = bytearray()
        self._used = 0
        self.give(self._counted_bytes)
