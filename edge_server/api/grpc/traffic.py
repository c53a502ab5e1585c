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
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from edge_server.api.admission import COUNTED_FROM_BYTES, MIB, ByteBudget, decompress
from edge_server.errors import Unsupported
from edge_server.process.allocator import give_back, resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge_server.api.admission import Call

    _Reason = Callable[[], tuple[grpc.StatusCode, str] | None]

log = logging.getLogger(__name__)

_LOOK_S = 0.05
# Small requests arrive with their call; only slower requests can be large.
_LONG_S = 0.05
# While calls wait for a thread, a call that holds one for its request gets less time.
_CROWDED_S = 0.5
# A stream's client reads one response after another, and may process each before the next.
SLOW_READER_S = 10.0
_LOG_EVERY_S = 60.0
# Larger responses are watched, and count once they have not been sent for so long; what a smaller
# one takes is less than gRPC keeps for its call.
_WATCHED_FROM_BYTES = 4 * 1024
_UNSENT_S = 1.0
# How compressed messages begin: gzip's magic number, and the headers that zlib writes for its
# levels. No message of the services does.
_GZIP = b"\x1f\x8b"
COMPRESSED = (_GZIP, b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
# After so many bytes in flight at once the allocator may hold some hundred MiB of free memory. It
# goes back to the kernel after a quiet time, as a sequence of large requests uses it again; under
# load from time to time, as that sequence uses some more.
_MANY_BYTES = 8 * MIB
_QUIET_S = 2.0
_MOST_UNREST_S = 10.0


@dataclass
class _Leaving:
    """A response that gRPC has, and perhaps not the client yet."""

    since: float
    limit_s: float
    size_bytes: int
    counts: bool
    is_over: bool = False


class Traffic:
    """Reads the requests of one side's calls, and ends calls whose messages stall.

    A call ends when its request is not complete after `within_s`, or its client has not read its
    large response by then; when its request is not complete after half a second and other calls
    wait for a thread; when a stream's client has not read one response after `within_s` and after
    `SLOW_READER_S`; and when more requests arrive than `budget` has room for at their longest while
    the process grows by as much as that: then the youngest calls end. The status is UNAVAILABLE for
    a request, DEADLINE_EXCEEDED for a response, with the reason.

    A stream's client may pause between two requests without limit, and gRPC does not show whether
    half a request has arrived: the limit on open streams bounds those bytes.

    No call is watched before `start`.

    Args:
        budget: counts requests until their response, and then responses until they are read;
            None creates a private budget.
        within_s: seconds that a message may take to transfer.
        longest_bytes: of one request.
        longest_decompressed_bytes: of one that its client compressed; 0 refuses those.
        waiting: returns the number of calls that wait for a thread.
        inferences: returns the number of inferences in flight.
        resident: returns the resident memory of this process, in bytes.
        give_back: returns its free memory to the kernel.
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
        self._streams: dict[grpc.ServicerContext, _Reason] = {}
        self._counting = threading.Lock()
        self._looked_at = 0.0
        self._resident_before = resident()
        # Whether free memory is due to go back to the kernel; resident memory when it last did,
        # that time, and the time of the last message in flight.
        self._is_due = False
        self._rest_bytes = self._resident_before
        self._returned_at = self._busy_at = time.monotonic()
        self._ended = 0
        self._logged_at = float("-inf")
        self._awake = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def change(self, limit_bytes: int, within_s: float) -> None:
        """Apply another limit to the bytes in flight, and another time limit to each message."""
        self.budget.limit_bytes = limit_bytes
        self._within_s = within_s

    def start(self) -> None:
        """Start watching calls."""
        self._thread = threading.Thread(target=self._watch, name="grpc-traffic", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching calls, started or not."""
        self._closed.set()
        self._awake.set()
        if self._thread is not None:
            self._thread.join()

    def read(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Return a call's request; a call without one ends with gRPC's own status."""
        request = self.first(requests, context)
        if request is None:
            context.abort(
                grpc.StatusCode.UNIMPLEMENTED, "this method requires exactly one request message."
            )
        return request

    def first(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes | None:
        """Return a call's first request; None for a call that ends without one."""
        self._arriving[context] = time.monotonic()
        if not self._awake.is_set():
            self._awake.set()
        try:
            request = next(requests, None)
        finally:
            self._arriving.pop(context, None)
        if request is not None and len(request) >= COUNTED_FROM_BYTES:
            self._note(len(request))
        return request

    def send(self, response: bytes, context: grpc.ServicerContext, request_bytes: int = 0) -> bytes:
        """Return `response`; a large one counts until the call is over, others once they wait.

        gRPC keeps each response twice until its client has read it.

        Args:
            request_bytes: of the call's request, which still counts.

        Raises:
            Unavailable: responses that no client has read yet leave no room for this one.
        """
        size_bytes = len(response)
        if size_bytes >= _WATCHED_FROM_BYTES:
            is_large = size_bytes >= COUNTED_FROM_BYTES
            if is_large:
                self.budget.take_for_response(size_bytes, request_bytes)
                self._note(0)
            leaving = _Leaving(time.monotonic(), self._within_s, size_bytes, counts=is_large)
            self._leaving[context] = leaving
            self._wake()

            def sent() -> None:
                self._leaving.pop(context, None)
                with self._counting:
                    leaving.is_over = True
                if leaving.counts:
                    self.budget.give(size_bytes)

            if not context.add_callback(sent):
                sent()
        return response

    def end_once(self, context: grpc.ServicerContext, reason: _Reason) -> None:
        """End a stream with its status and text within two seconds after `reason` returns some."""
        self._streams[context] = reason
        self._wake()

        def over() -> None:
            self._streams.pop(context, None)

        if not context.add_callback(over):
            over()

    def decompressed(self, request: bytes, call: Call) -> bytes:
        """Return a request that begins with one of `COMPRESSED` as it was before.

        Raises:
            Unsupported: the settings allow none.
            InvalidRequest, Unavailable: see `decompress`.
        """
        encoding = "gzip" if request.startswith(_GZIP) else "deflate"
        if not self._longest_decompressed_bytes:
            raise Unsupported(
                f"the request is compressed with {encoding}, and this server reads none; send it "
                "without compression, or set grpc.max_decompressed_bytes"
            )
        return decompress(
            request,
            encoding,
            self._longest_decompressed_bytes,
            call,
            "grpc.max_decompressed_bytes",
        )

    @contextmanager
    def sending(self, response: bytes, context: grpc.ServicerContext) -> Iterator[None]:
        """Count and watch a stream's `response` for the block, which ends when it is sent."""
        self.budget.add(len(response))
        self._note(0)
        self._leaving[context] = _Leaving(
            time.monotonic(), max(self._within_s, SLOW_READER_S), len(response), counts=True
        )
        self._wake()
        try:
            yield
        finally:
            self._leaving.pop(context, None)
            self.budget.give(len(response))

    def tick(self, now: float) -> None:
        """End calls over their time or byte limit, and return free memory to the kernel."""
        self._end_late_requests(now)
        for context, leaving in self._leaving.copy().items():
            waits_s = now - leaving.since
            if waits_s > leaving.limit_s:
                text = f"the client did not read the response within {leaving.limit_s:g} s"
                self._end(context, grpc.StatusCode.DEADLINE_EXCEEDED, text)
            elif waits_s > _UNSENT_S and not leaving.counts and not self._fits(leaving):
                text = "unread responses take too much memory (grpc.max_pending_bytes)"
                self._end(context, grpc.StatusCode.DEADLINE_EXCEEDED, text)
        if now - self._looked_at > _UNSENT_S:
            self._looked_at = now
            for context, reason in self._streams.copy().items():
                if (found := reason()) is not None:
                    self._end(context, *found)
        self._return_memory(now)
        if self._ended and now - self._logged_at > _LOG_EVERY_S:
            log.warning("grpc: %d calls were cut off, their messages got stuck", self._ended)
            self._ended, self._logged_at = 0, now

    def _fits(self, leaving: _Leaving) -> bool:
        """Count a response that is not sent yet; return whether there is room for it."""
        with self._counting:
            if leaving.is_over:
                return True
            self.budget.add(leaving.size_bytes)
            leaving.counts = True
        return self.budget.used_bytes <= self.budget.limit_bytes

    def note_many(self) -> None:
        """Note that many bytes were in flight: free memory is due once all is quiet."""
        self._is_due = True
        self._busy_at = time.monotonic()
        self._wake()

    def _note(self, size_bytes: int) -> None:
        if self.budget.used_bytes + size_bytes >= _MANY_BYTES:
            self.note_many()

    def _wake(self) -> None:
        if not self._awake.is_set():
            self._awake.set()

    def _return_memory(self, now: float) -> None:
        if self._arriving or self._leaving or self._inferences() or self.budget.used_bytes:
            self._busy_at = now
        if self._resident() - self._rest_bytes >= _MANY_BYTES:
            self._is_due = True
        is_quiet = now - self._busy_at > _QUIET_S
        is_first = is_quiet and self._busy_at >= self._returned_at
        if self._is_due and (is_first or now - self._returned_at > _MOST_UNREST_S):
            self._give_back()
            # Connections that close later free more: what is left is believed by halves.
            left = self._resident()
            self._rest_bytes = (self._rest_bytes + left) // 2 if is_quiet else left
            self._returned_at = now
            self._is_due = not is_quiet  # what is in use now is free only later

    def _end_late_requests(self, now: float) -> None:
        within_s, why = self._within_s, " (grpc.message_timeout_ms)"
        if self._waiting() and within_s > _CROWDED_S:
            within_s, why = _CROWDED_S, " while other calls waited for a thread"
        arriving = self._arriving.copy()
        long = [context for context, since in arriving.items() if now - since > _LONG_S]
        late = [context for context in long if now - arriving[context] > within_s]
        for context in late:
            text = f"the request did not arrive within {within_s:g} s{why}"
            self._end(context, grpc.StatusCode.UNAVAILABLE, text)
        room = max(1, self.budget.room_bytes // self._longest_bytes)
        if len(long) <= room:
            self._resident_before = self._resident()
        elif self._resident() - self._resident_before > self.budget.limit_bytes:
            text = "requests that arrive at once take too much memory (grpc.max_pending_bytes)"
            for context in long[room:]:
                if context not in late:
                    self._end(context, grpc.StatusCode.UNAVAILABLE, text)

    def _end(self, context: grpc.ServicerContext, code: grpc.StatusCode, text: str) -> None:
        self._arriving.pop(context, None)
        self._leaving.pop(context, None)
        self._streams.pop(context, None)
        end_call(context, code, text)
        self._ended += 1
        self._is_due = True

    def _watch(self) -> None:
        while not self._closed.is_set():
            # Connections without a call take memory too.
            soon = self._streams or self._ended or self._is_due
            self._awake.wait(_UNSENT_S if soon else _MOST_UNREST_S)
            self._awake.clear()
            while not self._closed.wait(_LOOK_S):
                self.tick(time.monotonic())
                if not (self._arriving or self._leaving):
                    break


def end_call(context: grpc.ServicerContext, code: grpc.StatusCode, text: str) -> None:
    """End a call with this status, from any thread."""
    call = getattr(getattr(context, "_rpc_event", None), "call", None)
    if call is None:
        # A later gRPC may keep it elsewhere; its `cancel` only sets the status CANCELLED.
        context.cancel()
    else:
        call.cancel(code.value[0], text)
