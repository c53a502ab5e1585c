"""Traffic: limits the time and the bytes of requests that arrive and of responses being sent.

gRPC holds the received part of a request until the rest arrives, and a response until the client
has read it. A client that sends half a request, or reads half a response, holds memory of the
server and perhaps a thread; keepalive does not end that, because such a client still answers pings.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from edge_server.api.admission import MIB, ByteBudget, decompress
from edge_server.errors import Unsupported
from edge_server.process.allocator import give_back, resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import grpc

    from edge_server.api.admission import Call
    from edge_server.api.grpc.methods import UnaryCall

log = logging.getLogger(__name__)

_LOOK_S = 0.05
# Small requests arrive with their call; only slower requests can be large.
_LONG_S = 0.05
# While calls wait for a thread, a call that holds one for its request gets less time.
_CROWDED_S = 0.5
# A stream's client reads one response after another, and may process each before the next.
SLOW_READER_S = 10.0
_LOG_EVERY_S = 60.0
_LOOK_AT_TOKENS_S = 1.0
# What a smaller response takes is less than gRPC keeps for its call.
WATCHED_FROM_BYTES = 4 * 1024
# What is counted of a call takes up to three times as much: a tensor, the response with it, and
# gRPC's copy of that.
_TIMES_MORE = 2
# How compressed messages begin: gzip's magic number, and the headers that zlib writes for its
# levels. No message of the services does.
_GZIP = b"\x1f\x8b"
COMPRESSED = (_GZIP, b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
# Once the process has grown by so much, the allocator may hold that as free memory. It goes back to
# the kernel after a quiet time, as a sequence of large requests uses it again; under load from time
# to time, as that sequence uses some more.
_MANY_BYTES = 8 * MIB
_QUIET_S = 2.0
_MOST_UNREST_S = 10.0


class _Leaving(NamedTuple):
    """A response that gRPC has, and perhaps not the client yet."""

    since: float
    limit_s: float


class Traffic:
    """Reads the requests of one side's calls, and ends calls whose messages stall.

    A call ends, as CANCELLED, when its request is not complete after `within_s`, or its client has
    not read its response by then; when its request is not complete after half a second and other
    calls wait for a thread; when a stream's client has not read one response after `within_s` and
    after `SLOW_READER_S`; and when more requests arrive than `budget` has room for at their longest
    while the process grows by more than that and what the counted messages explain: then the
    youngest calls end. gRPC lets no other thread than the call's own, which waits for the message,
    choose another status.

    A stream's client may pause between two requests without limit, and gRPC does not show whether
    half a request has arrived: the limit on open streams bounds those bytes.

    Args:
        budget: counts requests until their response, and then responses until they are read.
        within_s: seconds that a message may take to transfer.
        longest_bytes: of one request.
        longest_decompressed_bytes: of one that its client compressed; 0 refuses those.
        waiting, inferences: return the number of calls without a thread, and of inferences in
            flight.
        resident, give_back: return the process's memory in bytes, and its free part to the kernel.
    """

    def __init__(
        self,
        budget: ByteBudget | None = None,
        within_s: float = 3.0,
        longest_bytes: int = 64 * MIB,
        *,
        longest_decompressed_bytes: int = 0,
        waiting: Callable[[], int] = lambda: 0,
        inferences: Callable[[], int] = lambda: 0,
        resident: Callable[[], int] = resident_bytes,
        give_back: Callable[[], None] = give_back,
    ) -> None:
        self.budget = budget or ByteBudget()
        self._within_s = within_s
        self._longest_bytes = longest_bytes
        self._longest_decompressed_bytes = longest_decompressed_bytes
        self._waiting = waiting
        self._inferences = inferences
        self._resident = resident
        self._give_back = give_back
        # Calls whose request is arriving, oldest first, with their start time; calls whose response
        # is being sent; streams, with what may end them. Single steps on a dict need no lock.
        self._arriving: dict[grpc.ServicerContext, float] = {}
        self._leaving: dict[grpc.ServicerContext, _Leaving] = {}
        self._streams: dict[grpc.ServicerContext, Callable[[], object]] = {}
        self._looked_at = 0.0
        self._ticked_at = time.monotonic()
        # Resident memory without requests on their way, and when memory last went back.
        self._resident_before = self._rest_bytes = resident()
        self._counted_bytes = 0  # at the last look
        # The time of the last message in flight.
        self._returned_at = self._busy_at = time.monotonic()
        self._ended = 0
        self._logged_at = float("-inf")
        self._awake = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def change(self, limit_bytes: int, within_s: float) -> None:
        self.budget.limit_bytes = limit_bytes
        self._within_s = within_s

    def start(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="grpc-traffic", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching calls, started or not."""
        self._closed.set()
        self._awake.set()
        if self._thread is not None:
            self._thread.join()

    def read(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes | None:
        """Return a call's first request; None for a call that ends without one."""
        self._arriving[context] = time.monotonic()
        if not self._awake.is_set():
            self._awake.set()
        try:
            return next(requests, None)
        finally:
            self._arriving.pop(context, None)

    def send(self, response: bytes, call: UnaryCall) -> None:
        """Count a large response, which gRPC keeps twice until its client has read it, in place of
        its request, and watch that the client reads it.

        Raises: Unavailable: responses that no client has read yet leave no room for this one.
        """
        size_bytes, context = len(response), call.context
        self.budget.take(size_bytes, instead_of=call.counted_bytes)
        call.counted_bytes = 0
        self._leaving[context] = _Leaving(time.monotonic(), self._within_s)
        self._awake.set()

        def over() -> None:
            self._leaving.pop(context, None)
            self.budget.give(size_bytes)

        if not context.add_callback(over):
            over()

    @contextmanager
    def sending(self, response: bytes, context: grpc.ServicerContext) -> Iterator[None]:
        """Count and watch a stream's `response` for the block, which ends when it is sent."""
        self.budget.add(len(response))
        self._leaving[context] = _Leaving(time.monotonic(), max(self._within_s, SLOW_READER_S))
        self._awake.set()
        try:
            yield
        finally:
            self._leaving.pop(context, None)
            self.budget.give(len(response))

    def end_once(self, context: grpc.ServicerContext, revoked: Callable[[], object]) -> None:
        """End a stream within two seconds after `revoked` returns something true."""
        self._streams[context] = revoked
        self._awake.set()

        def over() -> None:
            self._streams.pop(context, None)

        if not context.add_callback(over):
            over()

    def decompressed(self, request: bytes, call: Call) -> bytes:
        """Return a request that begins with one of `COMPRESSED` as it was before.

        Raises: Unsupported: the settings allow none. InvalidRequest, Unavailable: see `decompress`.
        """
        encoding = "gzip" if request.startswith(_GZIP) else "deflate"
        longest_bytes = self._longest_decompressed_bytes
        if not longest_bytes:
            raise Unsupported(
                f"the request is compressed with {encoding}, and this server reads none; send it "
                "without compression, or set grpc.max_decompressed_bytes"
            )
        return decompress(request, encoding, longest_bytes, call, "grpc.max_decompressed_bytes")

    def tick(self, now: float) -> None:
        """End calls over their time or byte limit, and return free memory to the kernel."""
        resident = self._resident()
        self._end_late_requests(now, resident)
        for context, leaving in self._leaving.copy().items():
            if now - leaving.since > leaving.limit_s:
                self._end(context)
        if now - self._looked_at > _LOOK_AT_TOKENS_S:
            self._looked_at = now
            for context, revoked in self._streams.copy().items():
                if revoked():
                    self._end(context)
        self._return_memory(now, resident)
        if self._ended and now - self._logged_at > _LOG_EVERY_S:
            log.warning(
                "grpc: %d calls were ended: their messages got stuck (grpc.message_timeout_ms, "
                "grpc.max_pending_bytes), or their tokens are no longer valid",
                self._ended,
            )
            self._ended, self._logged_at = 0, now

    def _return_memory(self, now: float, resident: int) -> None:
        if self._arriving or self._leaving or self._inferences() or self.budget.used_bytes:
            self._busy_at = now
        is_quiet = now - self._busy_at > _QUIET_S
        is_first = is_quiet and self._busy_at >= self._returned_at
        is_due = is_first or now - self._returned_at > _MOST_UNREST_S
        # What slow connections held for a while was no rest.
        self._rest_bytes = min(self._rest_bytes, resident)
        if is_due and resident - self._rest_bytes >= _MANY_BYTES:
            self._give_back()
            self._returned_at = now
            if is_quiet:
                # Connections that close later free more: what is left is believed by halves.
                self._rest_bytes = (self._rest_bytes + self._resident()) // 2

    def _end_late_requests(self, now: float, resident: int) -> None:
        within_s = min(self._within_s, _CROWDED_S) if self._waiting() else self._within_s
        # Threads that copy large tensors keep small requests waiting as long as this look.
        overslept_s = max(0.0, now - self._ticked_at - _LOOK_S)
        self._ticked_at = now
        arriving = ((each, now - at) for each, at in self._arriving.copy().items())
        long = [(each, waits_s) for each, waits_s in arriving if waits_s > _LONG_S + overslept_s]
        late = [context for context, waits_s in long if waits_s > within_s]
        room = max(1, self.budget.room_bytes // self._longest_bytes)
        # Memory goes a moment later than its count.
        counted_before, self._counted_bytes = self._counted_bytes, self.budget.used_bytes
        explained_bytes = _TIMES_MORE * max(counted_before, self._counted_bytes)
        if len(long) <= room:
            self._resident_before = resident
        elif resident - self._resident_before > self.budget.limit_bytes + explained_bytes:
            late += [context for context, _ in long[room:] if context not in late]
        for context in late:
            self._end(context)

    def _end(self, context: grpc.ServicerContext) -> None:
        for watched in (self._arriving, self._leaving, self._streams):
            watched.pop(context, None)
        context.cancel()
        self._ended += 1

    def _watch(self) -> None:
        while not self._closed.is_set():
            # Connections without a call take memory too.
            self._awake.wait(_LOOK_AT_TOKENS_S if self._streams or self._ended else _QUIET_S)
            self._awake.clear()
            while not self._closed.wait(_LOOK_S):
                self.tick(time.monotonic())
                if not (self._arriving or self._leaving):
                    break
