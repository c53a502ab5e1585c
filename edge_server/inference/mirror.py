"""The mirror: replays requests of a new version on its predecessor and compares both."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from dataclasses import replace as with_fields
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec.structs import replace

from edge_server.backends.contract import not_counted, on_host
from edge_server.errors import (
    Cancelled,
    DeadlineExceeded,
    EdgeServerError,
    InvalidRequest,
    Unavailable,
)
from edge_server.inference.canary_window import Fault, WatchedScheduler, all_finite
from edge_server.inference.request_check import check_request
from edge_server.inference.response_cache import uncached
from edge_server.inference.snapshot import ModelEntry, ModelState, Snapshot
from edge_server.model_config.interface import interface_break
from edge_server.process.worker import Worker
from edge_server.requests import InferResponse
from edge_server.tensors import Tensor, is_finite

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edge_server.inference.snapshot import LoadedModel, Scheduler
    from edge_server.requests import InferRequest, Respond, ResponseCallback

log = logging.getLogger(__name__)

# Backends whose models only calculate: running a request twice does no harm.
_CALCULATE = frozenset({"onnxruntime", "tensorrt", "image_preprocess", "lane_decode", "identity"})

# The limits of the queue of replays.
_MOST_WAITING = 8
_MOST_BYTES = 64 << 20
# How long the thread rests after a replay, as a multiple of the replay's time: before the next
# doubtful request, and before a sample.
_REST_BEFORE_DOUBT = 3
_REST_BEFORE_SAMPLE = 9
_LEAST_REST_S = 0.02
_LOOK_S = 0.25
# The deadline of a replay in the predecessor's queue.
_DEADLINE_S = 10.0
# How many of the last comparisons count.
_LAST_DOUBTS = 50
_LAST_SAMPLES = 200
# With fewer samples than this, a single worse response of the predecessor makes no share.
_LEAST_FOR_SHARE = 20
# A version is slower at a request that takes twice the predecessor's time and this in addition.
_SLOWER_NS = 2_000_000


class Pairs(NamedTuple):
    """The times of the same requests in both versions, run one right after the other.

    Attributes:
        slower: how many of `requests` took longer than twice the predecessor's time and 2 ms.
        new_ms, old_ms: medians.
    """

    requests: int = 0
    slower: int = 0
    new_ms: float = 0.0
    old_ms: float = 0.0


class Mirror:
    """Replays requests of a version on its predecessor, on a thread of its own.

    The mirror replays each doubtful request (one that fails, or whose response is not finite) as
    far as its queue has room; where the predecessor only calculates, also a sample of the others,
    to compare times. No caller waits for a replay; the predecessor's response goes to no caller and
    counts in no statistics. At most 64 MiB and eight doubtful requests wait, one runs at a time,
    and samples take a tenth of one thread's time.

    Every method may be called from any thread.

    Args:
        predecessor: shared by the mirror and closed when the thread has ended; so are `members`.
        samples: whether requests other than doubtful ones are replayed.
        batch_size: of the largest batch that a run may make of several requests; above 1 the times
            of single requests are not compared.
        changed: called after each replay of a doubtful request.
    """

    @staticmethod
    def of(
        new: LoadedModel,
        predecessor: LoadedModel,
        members: Sequence[LoadedModel],
        changed: Callable[[], None] = lambda: None,
    ) -> Mirror | None:
        """Return None where `new` and `predecessor` cannot be compared request by request: one of
        them, or of the ensemble's members, keeps state or is decoupled, or the interface has
        changed."""
        configs = [new.config, predecessor.config, *(member.config for member in members)]
        if any(c.sequence_batching is not None or c.decoupled for c in configs):
            return None
        known = {member.name for member in members}
        steps = [step for config in configs[1:] for step in config.steps]
        if not known.issuperset(step.model_name for step in steps):
            return None
        if interface_break(predecessor.config, new.config):
            return None
        shared = [model.shared(model.config) for model in (predecessor, *members)]
        open_ones = [model for model in shared if model is not None]
        if len(open_ones) < len(shared):
            for model in open_ones:
                model.close()
            return None
        samples = all(c.is_ensemble or c.backend in _CALCULATE for c in configs[1:])
        # The largest batch that a scheduler may make of several requests.
        batch_size = max((c.max_batch_size for c in configs if c.dynamic_batching), default=1)
        return Mirror(
            open_ones[0], open_ones[1:], samples=samples, batch_size=batch_size, changed=changed
        )

    def __init__(
        self,
        predecessor: LoadedModel,
        members: Sequence[LoadedModel],
        *,
        samples: bool,
        batch_size: int,
        changed: Callable[[], None],
    ) -> None:
        self.samples = samples
        self.batch_size = max(1, batch_size)
        # `sample` clears this where inputs are on a device.
        self.timed = samples and self.batch_size == 1
        self.comparable = True
        self._changed = changed
        self._held = (predecessor, *members)
        self._others = _NoOthers()
        self._config = predecessor.config
        self._scheduler = _plain(predecessor.scheduler)
        self._world: Snapshot = self._others
        if predecessor.config.is_ensemble:
            self._world = _world(members, self._others)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._waiting: deque[_Replay] = deque()
        self._waiting_bytes = 0
        self._running: _Replay | None = None
        self._has_sample = False
        self._rests_till_s = self._samples_from_s = 0.0
        self._doubts: dict[Fault, deque[bool]] = {f: deque(maxlen=_LAST_DOUBTS) for f in Fault}
        self._sampled: deque[Fault | None] = deque(maxlen=_LAST_SAMPLES)
        self._pairs: deque[tuple[int, int]] = deque(maxlen=_LAST_SAMPLES)
        self._hanging: tuple[InferRequest, float] | None = None
        # A run of the predecessor may take arbitrarily long.
        self._worker = Worker(
            f"mirror-{predecessor.name}", self._tick, deadline_s=float("inf"), on_end=self._close
        )
        self._started = False

    def start(self) -> None:
        """Raises: RuntimeError: the system gives no thread."""
        self._worker.start()
        self._started = True

    def stop(self, timeout_s: float = 5.0) -> None:
        """End after the running replay, and wait at most `timeout_s` for that.

        The predecessor is closed when the replay has ended, however late.
        """
        if not self._started:
            self._close()
            return
        self._worker.ask_to_stop()
        self._wake.set()
        self._worker.stop(timeout_s)

    def wants_sample(self) -> bool:
        """Whether the next request is to be replayed as a sample."""
        return self.samples and not self._has_sample and time.monotonic() >= self._samples_from_s

    def sample(self, request: InferRequest, response: InferResponse) -> None:
        """Replay a request that has a good `response`; returns at once.

        To be called before the caller gets the response: until then the inputs do not change.
        """
        if any(tensor.on_device for tensor in request.inputs.values()):
            # The caller would wait for the copy; the ensemble around this model is timed instead.
            self.timed = False
            return
        self._put(request, None, _work_ns(response))

    def doubt(self, request: InferRequest, fault: Fault) -> None:
        """Replay a request whose response has `fault`; returns at once, as `sample`."""
        self._put(request, fault, 0)

    def doubt_lasting(self, request: InferRequest) -> float | None:
        """Replay a request that still runs, once.

        Returns:
            The predecessor's time in s; None before its response, or where that is bad.
        """
        with self._lock:
            hanging = self._hanging
        if hanging is not None and hanging[0] is request:
            return hanging[1] if hanging[1] >= 0 else None
        # Before `_put`, because the replay may end before `_put` returns.
        with self._lock:
            self._hanging = (request, -1.0)
        if not self._put(request, None, 0, lasting=request):
            with self._lock:
                self._hanging = None
        return None

    @property
    def has_doubts(self) -> bool:
        """Whether replays of doubtful requests are queued or running."""
        with self._lock:
            replays = (self._running, *self._waiting)
        return any(replay is not None and replay.fault is not None for replay in replays)

    def better(self, fault: Fault) -> tuple[int, int]:
        """Of the last replays with that fault: how many got a good response from the predecessor,
        and how many there were."""
        with self._lock:
            doubts = self._doubts[fault]
            return sum(doubts), len(doubts)

    def worse_share(self, fault: Fault) -> float:
        """The share of samples in which the predecessor has the fault and the new version none."""
        with self._lock:
            count = max(len(self._sampled), _LEAST_FOR_SHARE)
            return sum(each is fault for each in self._sampled) / count

    @property
    def sampled(self) -> int:
        """The number of samples replayed, of the last ones."""
        return len(self._sampled)

    def pairs(self) -> Pairs:
        with self._lock:
            pairs = list(self._pairs)
        if not pairs:
            return Pairs()
        return Pairs(
            len(pairs),
            sum(new_ns > 2 * old_ns + _SLOWER_NS for new_ns, old_ns in pairs),
            statistics.median(new_ns for new_ns, _ in pairs) / 1e6,
            statistics.median(old_ns for _, old_ns in pairs) / 1e6,
        )

    def not_ready_reason(self) -> str:
        """Why the predecessor cannot respond at this moment; empty where it can."""
        return next((text for model in self._held if (text := model.not_ready_reason())), "")

    def step(self) -> bool:
        """Replay the first queued request; False where the queue is empty."""
        with self._lock:
            if not self._waiting:
                return False
            replay = self._running = self._waiting.popleft()
        began_s = time.monotonic()
        try:
            self._replay(replay)
        except Exception:
            # Without its thread the mirror would queue every later request for ever.
            log.exception("model %s: a request could not be replayed", self._config.name)
            self.comparable = False
        finally:
            now = time.monotonic()
            took_s = now - began_s
            with self._lock:
                self._waiting_bytes -= replay.n_bytes
                self._running = None
                if replay.fault is None and replay.lasting is None:
                    self._has_sample = False
                self._rests_till_s = now + _REST_BEFORE_DOUBT * took_s
                self._samples_from_s = now + max(_LEAST_REST_S, _REST_BEFORE_SAMPLE * took_s)
            self._changed()
        return True

    def _tick(self, now: float) -> None:
        self._worker.wait(max(0.0, self._rests_till_s - now))
        if not self.step():
            self._wake.wait(_LOOK_S)
            self._wake.clear()

    def _put(
        self,
        request: InferRequest,
        fault: Fault | None,
        work_ns: int,
        lasting: InferRequest | None = None,
    ) -> bool:
        """Queue `request` for its replay; False where the queue is full or comparing has ended."""
        if not self.comparable:
            return False
        n_bytes = sum(_n_bytes(tensor) for tensor in request.inputs.values())
        with self._lock:
            full = fault is not None and len(self._waiting) >= _MOST_WAITING
            if full or self._waiting_bytes + n_bytes > _MOST_BYTES:
                return False
            self._waiting_bytes += n_bytes
        try:
            kept = _kept(request)
        except (EdgeServerError, MemoryError) as error:
            log.debug("model %s: not replayed: %r", request.model_name, error)
            with self._lock:
                self._waiting_bytes -= n_bytes
            return False
        replay = _Replay(kept, fault, work_ns, n_bytes, lasting)
        with self._lock:
            if fault is not None:
                self._waiting.append(replay)
            else:
                # At the head of the queue, so that both versions run at the same time.
                self._waiting.appendleft(replay)
                self._has_sample |= lasting is None
        self._wake.set()
        return True

    def _replay(self, replay: _Replay) -> None:
        if replay.fault is Fault.NOT_FINITE and not all_finite(replay.request):
            # A bad response to non-finite inputs is no fault of the version.
            self._note(replay, better=False)
            return
        began_s = time.monotonic()
        answer = self._ask(replay.request)
        if self._others.asked:
            # Without the other model the predecessor's response is unknown.
            self.comparable = False
        elif isinstance(answer, InferResponse):
            finite = all(is_finite(tensor) for tensor in answer.outputs.values())
            self._answered(replay, answer, time.monotonic() - began_s, finite=finite)
        elif not isinstance(answer, (Cancelled, DeadlineExceeded, Unavailable)):
            self._note(replay, better=False)
            if replay.fault is None and replay.lasting is None:
                # A request that only the new version accepts is no fault of its predecessor.
                taken = not isinstance(answer, InvalidRequest)
                with self._lock:
                    self._sampled.append(Fault.FAILED if taken else None)

    def _answered(
        self, replay: _Replay, answer: InferResponse, took_s: float, *, finite: bool
    ) -> None:
        self._note(replay, better=finite or replay.fault is Fault.FAILED)
        with self._lock:
            if replay.lasting is not None:
                self._hanging = (replay.lasting, took_s)
            elif replay.fault is None:
                self._sampled.append(None if finite else Fault.NOT_FINITE)
                old_ns = _work_ns(answer)
                if replay.work_ns and old_ns:
                    self._pairs.append((replay.work_ns, old_ns))

    def _note(self, replay: _Replay, *, better: bool) -> None:
        if replay.fault is not None:
            with self._lock:
                self._doubts[replay.fault].append(better)

    def _ask(self, request: InferRequest) -> ResponseCallback:
        # Without the caller's deadline and cancellation.
        replayed = replace(
            request,
            model_version="",
            deadline=time.monotonic() + _DEADLINE_S,
            urgent=False,
            timeout_us=0,
            cancellation=None,
            trace=None,
            on_device=False,
            replayed=True,
        )
        last = _LastResponse()
        try:
            check_request(self._config, replayed)
            self._scheduler.submit(replayed, self._world, last)
        except EdgeServerError as error:
            return error
        # The predecessor may be closed only after the run has ended.
        last.event.wait()
        return last.answer

    def _close(self) -> None:
        held, self._held = self._held, ()
        for model in held:
            try:
                model.close()
            except Exception:
                log.exception("model %s: closing version %d failed", model.name, model.version)


class _Replay(NamedTuple):
    """A queued request; without `fault` a sample, or `lasting`: a request that still runs."""

    request: InferRequest
    fault: Fault | None
    work_ns: int
    n_bytes: int
    lasting: InferRequest | None


class _LastResponse:
    """A `Respond` that keeps the response and sets `event` at the last one."""

    def __init__(self) -> None:
        self.answer: ResponseCallback = None
        self.event = threading.Event()

    def __call__(self, answer: ResponseCallback, final: bool) -> None:
        if answer is not None:
            self.answer = answer
        if final:
            self.event.set()


class _NoOthers(Snapshot):
    """The snapshot of a replay: requests of the model to other models are refused.

    Attributes:
        asked: the model has made such a request.
    """

    def __init__(self) -> None:
        super().__init__({})
        self.asked = False

    def submit(self, request: InferRequest, respond: Respond) -> None:
        del respond
        self.asked = True
        raise Unavailable(f"model '{request.model_name}' is not asked again for a comparison")

    def model_ready(self, name: str, version: str) -> bool:
        """True, so that the model sends its request to this snapshot and nowhere else."""
        del name, version
        self.asked = True
        return True


class _InNoWorld:
    """The scheduler of an ensemble's member; refuses the member's requests to other models."""

    def __init__(self, scheduler: Scheduler, others: Snapshot) -> None:
        self._scheduler = scheduler
        self._others = others

    def infer(self, request: InferRequest, snapshot: Snapshot) -> InferResponse:
        del snapshot
        return self._scheduler.infer(request, self._others)

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        del snapshot
        self._scheduler.submit(request, self._others, respond)

    def pending(self) -> int:
        return self._scheduler.pending()

    def longest_run_s(self, now: float) -> float:
        return self._scheduler.longest_run_s(now)

    def close(self) -> None:
        """Close nothing: the member closes its scheduler."""


def _world(members: Sequence[LoadedModel], others: Snapshot) -> Snapshot:
    entries = {}
    for member in members:
        scheduler = _plain(member.scheduler)
        if not member.config.is_ensemble:
            scheduler = _InNoWorld(scheduler, others)
        loaded = with_fields(member, scheduler=scheduler)
        key = (member.name, member.version)
        entries[key] = ModelEntry(*key, ModelState.READY, loaded=loaded)
    return Snapshot(entries)


def _plain(scheduler: Scheduler) -> Scheduler:
    """The scheduler that runs the model, beneath the watching and the caching ones."""
    if isinstance(scheduler, WatchedScheduler):
        scheduler = scheduler.beneath
    return uncached(scheduler)


def _work_ns(response: InferResponse) -> int:
    """The models' compute time in ns, without queues; 0 where it was not measured."""
    return sum(timing.duration_ns for timing in response.timings)


def _kept(request: InferRequest) -> InferRequest:
    """A copy of the request whose inputs stay constant after its caller gets the response.

    Raises:
        EdgeServerError: the device that holds an input failed.
    """
    inputs = {name: _own(tensor) for name, tensor in request.inputs.items()}
    return replace(request, inputs=inputs)


def _own(tensor: Tensor) -> Tensor:
    if tensor.on_device is not None:
        return on_host(tensor, not_counted)
    array = tensor.array
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    # A received message does not change; a camera or a client may write into other memory.
    constant = isinstance(base, bytes) and not array.flags.writeable
    return tensor if constant else Tensor(array.copy())


def _n_bytes(tensor: Tensor) -> int:
    array = tensor.array
    if isinstance(array, np.ndarray) and array.dtype.hasobject:
        return array.nbytes + sum(len(element) for element in array.flat)
    return array.nbytes
