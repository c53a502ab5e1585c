"""The canary window: checks and counts the first responses of a new model version."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from edge_server.backends.contract import not_counted, on_host
from edge_server.errors import (
    Cancelled,
    DeadlineExceeded,
    EdgeServerError,
    InvalidRequest,
    Unavailable,
)
from edge_server.inference.response_future import infer_by_submit
from edge_server.requests import InferResponse
from edge_server.tensors import is_finite

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.inference.mirror import Mirror
    from edge_server.inference.snapshot import Scheduler, Snapshot
    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import InferRequest, Respond, ResponseCallback

log = logging.getLogger(__name__)

# A cancelled, late or refused request reveals nothing about the version, and many of them must not
# hide the failures of others.
_WITHOUT_VERDICT = (Cancelled, DeadlineExceeded, Unavailable)

# How many sequences with non-finite inputs are remembered.
_MOST_SPOILT = 1024


class Fault(Enum):
    """The possible faults of a response."""

    FAILED = "failed"
    NOT_FINITE = "not finite"


class WindowCounts(NamedTuple):
    """The number of requests, and of their responses by fault."""

    requests: int = 0
    failed: int = 0
    not_finite: int = 0

    def plus(self, other: WindowCounts, times: int = 1) -> WindowCounts:
        return WindowCounts(*(a + times * b for a, b in zip(self, other, strict=True)))


class CanaryWindow:
    """Counts the responses of one model version; every method may be called from any thread.

    Args:
        window: how many requests `recent` covers.
        most: requests after this many are not counted; None is unlimited.
        changed: called after each request with a fault.
    """

    def __init__(
        self, window: int, *, most: int | None = None, changed: Callable[[], None] = lambda: None
    ) -> None:
        self._most = most
        self._changed = changed
        self._lock = threading.Lock()
        self._last: deque[WindowCounts] = deque(maxlen=window)
        self._recent = self._all = WindowCounts()

    @property
    def recent(self) -> WindowCounts:
        return self._recent

    @property
    def all(self) -> WindowCounts:
        return self._all

    @property
    def is_full(self) -> bool:
        return self._most is not None and self._all.requests >= self._most

    def note(self, fault: Fault | None) -> None:
        """Count a request that has had its last response; None is a good response."""
        seen = WindowCounts(1, int(fault is Fault.FAILED), int(fault is Fault.NOT_FINITE))
        with self._lock:
            if self.is_full:
                return
            self._all = self._all.plus(seen)
            if len(self._last) == self._last.maxlen:
                self._recent = self._recent.plus(self._last[0], -1)
            self._recent = self._recent.plus(seen)
            self._last.append(seen)
        if fault is not None:
            self._changed()


class WatchedScheduler:
    """Passes requests on to `scheduler` and counts their responses in `watch`, until `end`.

    Until then responses are on the host, where they can be checked. A `mirror` gets the doubtful
    requests and a sample of the others. Without a mirror, a non-finite response counts only where
    the request, and with it its sequence, held finite numbers alone.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        watch: CanaryWindow,
        config: ModelConfig,
        mirror: Mirror | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._watch: CanaryWindow | None = watch
        self._counted = watch
        self._mirror = mirror
        self._spoilt = None if config.sequence_batching is None else _SpoiltSequences()
        # The arrival time of each request, and the request; only with a mirror.
        self._running: dict[int, tuple[float, InferRequest]] = {}

    @property
    def beneath(self) -> Scheduler:
        return self._scheduler

    @property
    def seen(self) -> WindowCounts:
        """The counts so far; after `end`, those of the whole canary."""
        return self._counted.all

    def end(self) -> None:
        """Stop counting responses."""
        self._watch = self._mirror = None

    def oldest(self) -> InferRequest | None:
        """The request that has waited longest for its last response."""
        running = list(self._running.values())
        return min(running, key=lambda each: each[0])[1] if running else None

    def rows(self) -> int:
        """The rows of all requests without a last response: an upper bound for any run."""
        tensors = [next(iter(r.inputs.values()), None) for _, r in list(self._running.values())]
        return sum(tensor.shape[0] for tensor in tensors if tensor is not None and tensor.shape)

    def infer(self, request: InferRequest, snapshot: Snapshot) -> InferResponse:
        if self._watch is None:
            return self._scheduler.infer(request, snapshot)
        return infer_by_submit(self, request, snapshot)

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        watch = self._watch
        if watch is None:
            self._scheduler.submit(request, snapshot, respond)
            return
        if watch.is_full:
            self.end()
        if request.on_device:
            request = replace(request, on_device=False)
        if self._mirror is not None:
            self._running[id(request)] = (time.monotonic(), request)
        spoilt = self._spoilt is not None and self._spoilt.has(request)
        finite = True

        def look(response: ResponseCallback, final: bool) -> None:
            nonlocal finite
            if final:
                self._running.pop(id(request), None)
            try:
                if isinstance(response, InferResponse):
                    finite = finite and all(is_finite(each) for each in response.outputs.values())
                if final:
                    # Before `respond`: afterwards the caller may write into the inputs.
                    fault = _fault(response, finite=finite)
                    self._note(watch, request, response, None if spoilt else fault)
            except Exception:
                # The check may run out of memory; the caller gets the response even so.
                log.exception("model %s: a response could not be looked at", request.model_name)
            respond(response, final)

        try:
            self._scheduler.submit(request, snapshot, look)
        except BaseException:
            self._running.pop(id(request), None)
            raise

    def pending(self) -> int:
        return self._scheduler.pending()

    def longest_run_s(self, now: float) -> float:
        return self._scheduler.longest_run_s(now)

    def close(self) -> None:
        self._scheduler.close()

    def _note(
        self,
        watch: CanaryWindow,
        request: InferRequest,
        response: ResponseCallback,
        fault: Fault | None,
    ) -> None:
        mirror = self._mirror if self._mirror is not None and self._mirror.comparable else None
        if isinstance(response, _WITHOUT_VERDICT):
            return
        if mirror is None:
            if isinstance(response, InvalidRequest):
                # Only the predecessor could show that the request was not at fault.
                return
            if fault is Fault.NOT_FINITE and not all_finite(request):
                fault = None
        elif fault is not None:
            mirror.doubt(request, fault)
        elif isinstance(response, InferResponse) and mirror.wants_sample():
            mirror.sample(request, response)
        watch.note(fault)


class _SpoiltSequences:
    """Sequences that got non-finite inputs: a model's state may keep such numbers for good."""

    def __init__(self) -> None:
        self._ids: set[int | str] = set()

    def has(self, request: InferRequest) -> bool:
        """Whether `request`, or an earlier one of its sequence, holds non-finite inputs."""
        place = request.sequence
        if place is None:
            return not all_finite(request)
        if place.start:
            self._ids.discard(place.id)
        if len(self._ids) <= _MOST_SPOILT and not all_finite(request):
            self._ids.add(place.id)
        # Beyond that number any sequence may be one of them.
        spoilt = place.id in self._ids or len(self._ids) > _MOST_SPOILT
        if place.end:
            self._ids.discard(place.id)
        return spoilt


def all_finite(request: InferRequest) -> bool:
    """Whether the inputs of `request` hold neither infinity nor NaN; False where a failed device
    holds them."""
    try:
        return all(is_finite(on_host(tensor, not_counted)) for tensor in request.inputs.values())
    except EdgeServerError:
        return False


def _fault(response: ResponseCallback, *, finite: bool) -> Fault | None:
    if isinstance(response, EdgeServerError):
        return Fault.FAILED
    return None if finite else Fault.NOT_FINITE
