"""What the answers of a model version that has just begun to serve are like."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from edge_server.errors import (
    Cancelled,
    DeadlineExceeded,
    EdgeServerError,
    InvalidRequest,
    Unavailable,
)
from edge_server.requests import InferResponse
from edge_server.tensors import is_finite

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.requests import Answer, InferRequest, Respond
    from edge_server.serving.snapshot import Scheduler, Snapshot

# The caller's own doing, or a matter of load; a model that is slow shows in the latencies.
_NOT_THE_MODELS = (Cancelled, DeadlineExceeded, InvalidRequest, Unavailable)


class Seen(NamedTuple):
    """How many requests there were, and what they were; a slow one may have failed too."""

    requests: int = 0
    failed: int = 0
    not_finite: int = 0
    slow: int = 0

    def plus(self, other: Seen, times: int = 1) -> Seen:
        return Seen(*(a + times * b for a, b in zip(self, other, strict=True)))


class Watch:
    """Counts the answers of one model version; every method may be called from any thread.

    Args:
        window: how many requests `recent` looks back.
        most: after so many nothing more is counted; None has no end.
        slow_ns: what takes longer is slow; 0 is nothing.
        changed: called after each request that was not as it should be.
    """

    def __init__(
        self,
        window: int,
        *,
        most: int | None = None,
        slow_ns: int = 0,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.slow_ns = slow_ns
        self._most = most
        self._changed = changed
        self._lock = threading.Lock()
        self._last: deque[Seen] = deque(maxlen=window)
        self._recent = self._all = Seen()

    @property
    def recent(self) -> Seen:
        return self._recent

    @property
    def all(self) -> Seen:
        return self._all

    @property
    def is_full(self) -> bool:
        return self._most is not None and self._all.requests >= self._most

    def note(self, error: EdgeServerError | None, ns: int, *, finite: bool) -> None:
        """A request has been answered, the last time after `ns`."""
        failed = error is not None and not isinstance(error, _NOT_THE_MODELS)
        seen = Seen(1, int(failed), int(not finite), int(0 < self.slow_ns < ns))
        with self._lock:
            if self.is_full:
                return
            self._all = self._all.plus(seen)
            if len(self._last) == self._last.maxlen:
                self._recent = self._recent.plus(self._last[0], -1)
            self._recent = self._recent.plus(seen)
            self._last.append(seen)
        if any(seen[1:]):
            self._changed()


class WatchedScheduler:
    """Passes requests on to `scheduler`, and tells `watch` of their answers while there is one.

    As long as that is so, answers are on the host, where they can be looked at.
    """

    def __init__(self, scheduler: Scheduler, watch: Watch) -> None:
        self._scheduler = scheduler
        self._watch: Watch | None = watch
        self._told = watch

    @property
    def beneath(self) -> Scheduler:
        return self._scheduler

    @property
    def seen(self) -> Seen:
        """What was told so far, or in all."""
        return self._told.all

    def end(self) -> None:
        """Look no more."""
        self._watch = None

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        watch = self._watch
        if watch is None:
            self._scheduler.submit(request, snapshot, respond)
            return
        if watch.is_full:
            self.end()
        if request.on_device:
            request = replace(request, on_device=False)
        began_ns = time.monotonic_ns()
        finite = True

        def look(answer: Answer, final: bool) -> None:
            nonlocal finite
            if isinstance(answer, InferResponse):
                finite = finite and all(is_finite(each) for each in answer.outputs.values())
            if final:
                error = answer if isinstance(answer, EdgeServerError) else None
                watch.note(error, time.monotonic_ns() - began_ns, finite=finite)
            respond(answer, final)

        self._scheduler.submit(request, snapshot, look)

    def pending(self) -> int:
        return self._scheduler.pending()

    def longest_run_s(self, now: float) -> float:
        return self._scheduler.longest_run_s(now)

    def close(self) -> None:
        self._scheduler.close()
