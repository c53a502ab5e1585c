"""Messages on their way, in and out: none may take for ever, nor all together fill the memory.

gRPC holds what has come of a request until all of it has, and an answer until its client has taken
it. A client that sends half of the one, or reads half of the other, keeps memory here and perhaps a
thread; keep-alive does not end that, because such a client still answers pings.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

import grpc

from edge_server.api.grpc.byte_budget import COUNTED_FROM_BYTES, MIB, ByteBudget
from edge_server.process.allocator import give_back, resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

_LOOK_S = 0.05
# Small messages are there as soon as their call; only what takes longer is looked at.
_LONG_S = 0.05
# While calls wait for a thread, those that hold one for a message must be quicker.
_CROWDED_S = 0.5
_TELL_EVERY_S = 60.0


class Traffic:
    """Reads the requests of one side's calls, and cancels the calls whose messages get stuck.

    A call is cancelled when its request is not complete after `within_s`, or its large answer not
    taken; when its request is not complete after half a second and other calls wait for a thread;
    and when more requests are on their way than `budget` has room for at their longest while the
    process grows by as much as that: then the youngest go. The client hears CANCELLED, the only
    status that gRPC lets another thread give.

    Nothing is watched before `start`.

    Args:
        budget: where requests count until they are answered, and then answers until they are
            taken; None is one of its own.
        within_s: how long a message may be on its way.
        longest_bytes: of one request.
        waiting: how many calls wait for a thread.
        resident: how much memory this process has, in bytes.
    """

    def __init__(
        self,
        budget: ByteBudget | None = None,
        within_s: float = 3.0,
        longest_bytes: int = 64 * MIB,
        *,
        waiting: Callable[[], int] = lambda: 0,
        resident: Callable[[], int] = resident_bytes,
    ) -> None:
        self.budget = budget or ByteBudget()
        self._within_s = within_s
        self._longest_bytes = longest_bytes
        self._waiting = waiting
        self._resident = resident
        # Since when, oldest first; single steps on a dict need no lock.
        self._coming: dict[grpc.ServicerContext, float] = {}
        self._going: dict[grpc.ServicerContext, float] = {}
        self._resident_before = resident()
        self._cut = 0
        self._told_at = float("-inf")
        self._awake = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.budget.when_many = self._wake

    def start(self) -> None:
        """From now on calls are watched."""
        self._thread = threading.Thread(target=self._watch, name="grpc-traffic", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no more; started or not."""
        self._closed.set()
        self._awake.set()
        if self._thread is not None:
            self._thread.join()

    def read(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """The request of a call that has one; the call ends as gRPC's own where there is none."""
        self._coming[context] = time.monotonic()
        self._wake()
        try:
            request = next(requests, None)
        finally:
            self._coming.pop(context, None)
        if request is None:
            context.abort(
                grpc.StatusCode.UNIMPLEMENTED, "this method requires exactly one request message."
            )
        return request

    def send(self, answer: bytes, context: grpc.ServicerContext) -> bytes:
        """`answer`, which counts until the call is over."""
        size_bytes = len(answer)
        if size_bytes >= COUNTED_FROM_BYTES:
            self.budget.add(size_bytes)
            self._going[context] = time.monotonic()
            self._wake()

            def sent() -> None:
                self._going.pop(context, None)
                self.budget.give(size_bytes)

            if not context.add_callback(sent):
                sent()
        return answer

    def tick(self, now: float) -> None:
        """Cancel what takes too long or too much, and give memory back that nobody needs."""
        crowded = self._waiting() > 0
        within_s = min(self._within_s, _CROWDED_S) if crowded else self._within_s
        coming = self._coming.copy()
        long = [context for context, since in coming.items() if now - since > _LONG_S]
        stuck = [context for context in long if now - coming[context] > within_s]
        stuck += [c for c, since in self._going.copy().items() if now - since > self._within_s]
        room = max(1, self.budget.room_bytes // self._longest_bytes)
        if len(long) <= room:
            self._resident_before = self._resident()
        elif self._resident() - self._resident_before > self.budget.limit_bytes:
            stuck += long[room:]
        cut = dict.fromkeys(stuck)
        for context in cut:
            self._coming.pop(context, None)
            self._going.pop(context, None)
            context.cancel()
            self.budget.note_many()
        self._cut += len(cut)
        if self.budget.memory_is_due(now):
            give_back()
        if self._cut and now - self._told_at > _TELL_EVERY_S:
            log.warning("grpc: %d calls were cut off, their messages got stuck", self._cut)
            self._cut, self._told_at = 0, now

    def _wake(self) -> None:
        if not self._awake.is_set():
            self._awake.set()

    def _watch(self) -> None:
        while self._awake.wait() and not self._closed.is_set():
            self._awake.clear()
            while not self._closed.wait(_LOOK_S):
                self.tick(time.monotonic())
                busy = self._coming or self._going or self._cut or self.budget.waits_for_quiet
                if not busy:
                    break
