"""The mirror: replays requests of a new version on its predecessor and compares both."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace as with_fields
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from edge_server.backends.contract import Interruptible, interrupt, not_counted, on_host
from edge_server.errors import (
    Cancelled,
    DeadlineExceeded,
    EdgeServerError,
    InvalidRequest,
    Unavailable,
)
from edge_server.inference.data_plane import ENDS_S, MODEL_STUCK_S
from edge_server.inference.registry import ModelEntry, ModelState, Snapshot, close_model, innermost
from edge_server.inference.request_check import check_request
from edge_server.inference.scheduling import size_bytes
from edge_server.model_config.parse import FRAMEWORK_BACKENDS, interface_break
from edge_server.process.threads import Worker
from edge_server.requests import InferResponse, Reply
from edge_server.tensors import Tensor, is_finite

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edge_server.inference.registry import LoadedModel
    from edge_server.requests import InferRequest, ResponseCallback

log = logging.getLogger(__name__)

# A cancelled, late or refused request reveals nothing about the version, and many of them must not
# hide the failures of others.
WITHOUT_VERDICT = (Cancelled, DeadlineExceeded, Unavailable)
# Backends whose models only calculate: running a request twice does no harm.
_REPEATABLE = FRAMEWORK_BACKENDS | {
    *("onnxruntime", "tensorrt", "image_preprocess", "lane_decode", "identity")
}
# The deadline of a replay in the predecessor's queue.
_DEADLINE_S = 10.0
# How often a thread looks for a replay that hangs, where its model can be ended.
_LOOK_S = 1.0


class Fault(Enum):
    FAILED = "failed"
    NOT_FINITE = "not finite"


class ReplayTarget:
    """Runs copies of requests on the version before the new one; only one thread at a time. The
    responses go to the caller alone, and no statistics count them.

    Attributes:
        calculates: the models only calculate, so that any request may run again.
        batch_size: of the largest batch that a run may make of several requests.
        others_used: the predecessor has sent a request to another model, so its responses are
            unknown."""

    @staticmethod
    def of(
        new: LoadedModel, predecessor: LoadedModel, members: Sequence[LoadedModel]
    ) -> ReplayTarget | None:
        """Return None where `new` and `predecessor` cannot be compared request by request: one of
        them, or of the ensemble's members, keeps state or is decoupled, or the interface has
        changed. The models are shared until `close`."""
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
        result = ReplayTarget([model for model in shared if model is not None])
        if None in shared:
            result.close()
            return None
        result.calculates = all(c.is_ensemble or c.backend in _REPEATABLE for c in configs[1:])
        batches = [c.max_batch_size for c in configs if c.dynamic_batching]
        result.batch_size = max([1, *batches])
        return result

    def __init__(self, models: Sequence[LoadedModel]) -> None:
        self._models = models
        self._snapshot = _MembersOnly(models[1:])
        self.calculates = False
        self.batch_size = 1
        self._watch: Worker | None = None
        self._began_s = math.inf

    @property
    def others_used(self) -> bool:
        return self._snapshot.others_used

    def not_ready_reason(self) -> str:
        return next((text for model in self._models if (text := model.not_ready_reason())), "")

    def response(self, request: InferRequest) -> InferResponse | EdgeServerError:
        """Run a copied request. A model is closed after its runs, so one that hangs is waited for;
        it is ended where its backend can do that."""
        predecessor = self._models[0]
        if self._watch is None and any(isinstance(m.model, Interruptible) for m in self._models):
            self._watch = Worker("replays", self._end_hanging, deadline_s=math.inf)
            with suppress(RuntimeError):  # the system has no thread left
                self._watch.start()
        self._began_s = time.monotonic()
        reply: Reply[InferResponse] = Reply()
        queued = replace(request, deadline=time.monotonic() + _DEADLINE_S)
        try:
            check_request(predecessor.config, queued)
            innermost(predecessor.scheduler).submit(queued, self._snapshot, reply)
            return reply.wait(request)
        except EdgeServerError as error:
            return error
        finally:
            self._began_s = math.inf

    def _end_hanging(self, now: float) -> None:
        began_s = self._began_s
        if now - began_s > MODEL_STUCK_S:
            for model in self._models:
                interrupt(model.model, began_s + ENDS_S)
        if self._watch is not None:
            self._watch.wait(_LOOK_S)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.ask_to_stop()
        for model in self._models:
            close_model(model)


class _MembersOnly(Snapshot):
    """The snapshot of a copied request: the members of an ensemble, and no other model."""

    def __init__(self, members: Sequence[LoadedModel]) -> None:
        entries = {}
        for member in members:
            key = (member.name, member.version)
            loaded = with_fields(member, scheduler=innermost(member.scheduler))
            entries[key] = ModelEntry(*key, ModelState.READY, loaded=loaded)
        super().__init__(entries)
        self._members = {member.name for member in members}
        self.others_used = False

    def find(self, name: str, version: str = "") -> LoadedModel:
        if name in self._members:
            return super().find(name, version)
        self.others_used = True
        raise Unavailable(f"model '{name}' is not used again for a comparison")

    def model_ready(self, name: str, version: str) -> bool:
        """True, so that the model sends its request to this snapshot and nowhere else."""
        del version
        self.others_used |= name not in self._members
        return True


def copied(request: InferRequest) -> InferRequest:
    """The request to run again, without the caller's deadline and cancellation; its inputs stay
    constant after the caller gets the response.
    Raises: EdgeServerError: the device that holds an input failed."""
    return replace(
        request,
        inputs={
            name: on_host(tensor, not_counted) if tensor.on_device else Tensor(tensor.array.copy())
            for name, tensor in request.inputs.items()
        },
        model_version="",
        deadline=None,
        urgent=False,
        timeout_us=0,
        cancellation=None,
        trace=None,
        on_device=False,
        replayed=True,
    )


def has_non_finite(response: ResponseCallback) -> bool:
    """Whether a response, on the host, holds infinity or NaN; False for an error."""
    return isinstance(response, InferResponse) and not all(
        map(is_finite, response.outputs.values())
    )


def all_finite(request: InferRequest) -> bool:
    """Whether the inputs of `request` hold neither infinity nor NaN; False where a failed device
    holds them."""
    try:
        return all(is_finite(on_host(tensor, not_counted)) for tensor in request.inputs.values())
    except EdgeServerError:
        return False


# The limits of the queue of replays.
_MOST_WAITING = 8
_MOST_BYTES = 64 << 20
# How long the mirror rests, as a multiple of a replay's time: after any, and between two samples.
_REST = 3
REST_OF_SAMPLES = 9
_LEAST_REST_S = 0.02
# How many of the last comparisons count.
_LAST_FAULTS = 50
MOST_SAMPLES = 200
# With fewer samples than this, a single worse response of the predecessor makes no share.
_LEAST_FOR_SHARE = 20


class Mirror:
    """Replays requests of a version on its predecessor, on the thread that calls `step` and
    `time_s`.

    Each request with a fault (it fails, or its response is not finite) is replayed as far as the
    queue has room; where the predecessor only calculates, also a sample of the others, to compare
    times. No caller waits for a replay, or gets its response. At most 64 MiB and eight requests
    with a fault wait, one runs at a time, and samples take a tenth of one thread's time.

    Attributes:
        comparable: whether the predecessor's responses are known.
        shared_failures: number of requests that both versions failed at, and neither refused.
        timed: whether times are compared: not where a run may batch, or inputs are on a device."""

    def __init__(self, target: ReplayTarget, wake: Callable[[], None] = lambda: None) -> None:
        self.target = target
        self.timed = target.calculates and target.batch_size == 1
        self.comparable = True
        self.shared_failures = 0
        self._wake = wake
        self._lock = threading.Lock()
        self._waiting: deque[_Replay] = deque()
        self._running: _Replay | None = None
        self._has_sample = False
        self._rests_till_s = self._samples_from_s = 0.0
        self._better: dict[Fault, deque[bool]] = {f: deque(maxlen=_LAST_FAULTS) for f in Fault}
        self._samples: deque[_Replayed] = deque(maxlen=MOST_SAMPLES)
        self._timed_request: tuple[InferRequest, float | None] | None = None

    def wants_sample(self) -> bool:
        may = self.target.calculates and not self._has_sample
        return may and time.monotonic() >= self._samples_from_s

    def sample(self, request: InferRequest, response: InferResponse) -> None:
        """Replay a request that has a good `response`; returns at once. To be called before the
        caller gets the response: until then the inputs do not change."""
        if any(tensor.on_device for tensor in request.inputs.values()):
            # The caller would wait for the copy; the ensemble around this model is timed instead.
            self.timed = False
            return
        self._put(request, None, _work_ns(response))

    def compare(self, request: InferRequest, fault: Fault) -> None:
        """Replay a request whose response has `fault`; returns at once, as `sample`."""
        self._put(request, fault, 0)

    @property
    def is_comparing(self) -> bool:
        with self._lock:
            replays = (self._running, *self._waiting)
        return any(replay is not None and replay.fault is not None for replay in replays)

    def better(self, fault: Fault) -> tuple[int, int]:
        """Of the last replays with that fault: how many got a good response from the predecessor,
        and how many there were."""
        with self._lock:
            better = self._better[fault]
            return sum(better), len(better)

    def worse_share(self, fault: Fault) -> float:
        """The share of samples in which only the predecessor has the fault."""
        with self._lock:
            count = max(len(self._samples), _LEAST_FOR_SHARE)
            return sum(sample.fault is fault for sample in self._samples) / count

    @property
    def sampled(self) -> int:
        return len(self._samples)

    def times(self) -> list[tuple[int, int]]:
        """The compute times in ns of the new version and of its predecessor for the last samples
        that both calculated, one right after the other."""
        with self._lock:
            times = [(each.new_ns, each.old_ns) for each in self._samples]
        return [(new_ns, old_ns) for new_ns, old_ns in times if new_ns and old_ns]

    def wait_s(self, now: float) -> float:
        return max(0.0, self._rests_till_s - now) if self._waiting else math.inf

    def step(self) -> bool:
        with self._lock:
            if not self._waiting:
                return False
            replay = self._running = self._waiting.popleft()
        began_s = time.monotonic()
        try:
            self._replay(replay)
        except Exception:
            log.exception("model %s: a request could not be replayed", replay.request.model_name)
            self.comparable = False
        now = time.monotonic()
        took_s = now - began_s
        with self._lock:
            self._running = None
            self._rests_till_s = now + _REST * took_s
            if replay.fault is None:
                # Requests with a fault, however many, must not keep samples away.
                self._has_sample = False
                self._samples_from_s = now + max(_LEAST_REST_S, REST_OF_SAMPLES * took_s)
        return True

    def time_s(self, request: InferRequest) -> float | None:
        """The predecessor's time in s for a request that still runs, replayed once and at once.
        Returns: None where the predecessor refuses the request, or fails at it. Whether its
            response is finite makes no difference: the request may not be finite either."""
        if self._timed_request is None or self._timed_request[0] is not request:
            took_s = None
            try:
                copy = copied(request)
                began_s = time.monotonic()
                response = self.target.response(copy)
                if not isinstance(response, EdgeServerError):
                    took_s = time.monotonic() - began_s
            except (EdgeServerError, MemoryError) as error:
                log.debug("model %s: not replayed: %r", request.model_name, error)
            self._timed_request = (request, took_s)
        return self._timed_request[1]

    def _put(self, request: InferRequest, fault: Fault | None, work_ns: int) -> None:
        n_bytes = sum(map(size_bytes, request.inputs.values()))
        with self._lock:
            full = fault is not None and len(self._waiting) >= _MOST_WAITING
            waiting_bytes = sum(replay.n_bytes for replay in self._waiting)
            if not self.comparable or full or waiting_bytes + n_bytes > _MOST_BYTES:
                return
            try:
                # The lock bounds the memory: one copy at a time is made.
                replay = _Replay(copied(request), fault, work_ns, n_bytes)
            except (EdgeServerError, MemoryError) as error:
                log.debug("model %s: not replayed: %r", request.model_name, error)
                return
            if fault is not None:
                self._waiting.append(replay)
            else:
                # At the head of the queue, so that both versions run at the same time.
                self._waiting.appendleft(replay)
                self._has_sample = True
        self._wake()

    def _replay(self, replay: _Replay) -> None:
        fault = replay.fault
        response = self.target.response(replay.request)
        if self.target.others_used:
            self.comparable = False
        elif not isinstance(response, WITHOUT_VERDICT):
            failed = isinstance(response, EdgeServerError)
            refused = isinstance(response, InvalidRequest)
            # A response that is not finite, to a request that is not, is no better than a failure.
            bad = has_non_finite(response) and (
                fault is Fault.NOT_FINITE or not all_finite(replay.request)
            )
            with self._lock:
                self.shared_failures += fault is Fault.FAILED and failed and not refused
                if fault is None:
                    self._samples.append(_replayed(replay.work_ns, response))
                else:
                    self._better[fault].append(not (failed or bad))


class _Replay(NamedTuple):
    request: InferRequest
    fault: Fault | None
    work_ns: int
    n_bytes: int


class _Replayed(NamedTuple):
    """The predecessor's fault, and the compute times of both models, 0 where not measured, for a
    request to which the new version responded well."""

    fault: Fault | None
    new_ns: int
    old_ns: int


def _replayed(new_ns: int, response: InferResponse | EdgeServerError) -> _Replayed:
    if isinstance(response, EdgeServerError):
        # A request that only the new version accepts is no fault of its predecessor.
        accepted = not isinstance(response, InvalidRequest)
        return _Replayed(Fault.FAILED if accepted else None, 0, 0)
    fault = Fault.NOT_FINITE if has_non_finite(response) else None
    return _Replayed(fault, new_ns, _work_ns(response))


def _work_ns(response: InferResponse) -> int:
    """The models' compute time in ns, without queues; 0 where it was not measured."""
    return sum(timing.duration_ns for timing in response.timings)
