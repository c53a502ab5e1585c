"""Requests on their way in: none may take for ever, and together they may not fill the memory.

gRPC holds what has come of a message until all of it has. A client that sends half of one keeps
that half here, and a thread; keep-alive does not end it, because such a client still answers pings.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

import grpc

from edge_server.appliance.allocator import give_back, resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge_server.grpc_api.byte_budget import ByteBudget

    Waiting = Callable[[], int]

log = logging.getLogger(__name__)

_LOOK_S = 0.05
# Small messages are there as soon as their call; only what takes longer is looked at.
_LONG_S = 0.05
# While calls wait for a thread, those that hold one for a message must be quicker.
_CROWDED_S = 0.5
_TELL_EVERY_S = 60.0


def read_one(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
    """The message of a call that has one; the call ends as gRPC's own where there is none."""
    request = next(requests, None)
    if request is None:
        context.abort(
            grpc.StatusCode.UNIMPLEMENTED, "this method requires exactly one request message."
        )
    return request


class Arrivals:
    """Reads the messages of calls, and cancels the calls whose messages do not come.

    Three things end a call: its message is not complete after `within_s`; it is not after half a
    second, and other calls wait for a thread; or more messages are on their way than `budget` has
    room for at their longest, and the process has grown by as much: then the youngest go. The
    client hears CANCELLED, the only status that gRPC lets another thread give.

    Args:
        budget: what complete requests count in; once they have gone, it says when memory is due.
        longest_bytes: of one message.
        resident: how much memory this process has, in bytes.
    """

    def __init__(
        self,
        budget: ByteBudget,
        within_s: float,
        longest_bytes: int,
        resident: Callable[[], int] = resident_bytes,
    ) -> None:
        self._budget = budget
        self._within_s = within_s
        self._fit = max(1, budget.limit_bytes // longest_bytes)
        self._resident = resident
        # By call, oldest first; single steps on a dict need no lock.
        self._pending: dict[grpc.ServicerContext, tuple[float, Waiting | None]] = {}
        self._resident_before = 0
        self._cut = 0
        self._told_at = float("-inf")
        self._awake = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """From now on calls are watched."""
        self._thread = threading.Thread(target=self._watch, name="grpc-arrivals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no more; started or not."""
        self._closed.set()
        self._awake.set()
        if self._thread is not None:
            self._thread.join()

    def read(
        self,
        requests: Iterator[bytes],
        context: grpc.ServicerContext,
        waiting: Waiting | None = None,
    ) -> bytes:
        """As `read_one`, watched.

        Args:
            waiting: how many calls wait for the thread that this one has.
        """
        self._pending[context] = (time.monotonic(), waiting)
        if not self._awake.is_set():
            self._awake.set()
        try:
            return read_one(requests, context)
        finally:
            del self._pending[context]

    def tick(self, now: float) -> None:
        """Cancel what takes too long or too much, and give memory back that nobody needs."""
        long = []
        for context, (since, waiting) in self._pending.copy().items():
            crowded = waiting is not None and waiting() > 0
            if now - since > (min(self._within_s, _CROWDED_S) if crowded else self._within_s):
                self._cancel(context)
            elif now - since > _LONG_S:
                long.append(context)
        if len(long) <= self._fit:
            self._resident_before = self._resident()
        elif self._resident() - self._resident_before > self._budget.limit_bytes:
            for context in long[self._fit :]:
                self._cancel(context)
            self._budget.note_many()
        if self._budget.memory_is_due(now):
            give_back()
        if self._cut and now - self._told_at > _TELL_EVERY_S:
            log.warning("grpc: %d calls were cut off, their messages did not come", self._cut)
            self._cut, self._told_at = 0, now

    def _cancel(self, context: grpc.ServicerContext) -> None:
        self._cut += 1
        context.cancel()

    def _watch(self) -> None:
        while self._awake.wait() and not self._closed.is_set():
            self._awake.clear()
            # What is read while this is awake sets the event again, so that it stays awake.
            while not self._closed.wait(_LOOK_S):
                self.tick(time.monotonic())
                if not (self._pending or self._cut or self._budget.waits_for_quiet):
                    break
