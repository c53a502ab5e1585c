"""One request's run through an ensemble: which step runs on which thread, and when."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

from edge_server.errors import (
    Cancelled,
    DeadlineExceeded,
    EdgeServerError,
    InternalError,
    Unavailable,
)
from edge_server.inference.data_flow import DataFlow
from edge_server.requests import InferRequest, InferResponse

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from edge_server.inference.data_flow import DataSet
    from edge_server.inference.ensemble_plan import Plan, PlannedStep
    from edge_server.inference.snapshot import RetainedSnapshot, Snapshot
    from edge_server.inference.step_slots import StepSlots
    from edge_server.inference.step_threads import StepThreads
    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import ResponseCallback, StepTiming
    from edge_server.tensors import Tensor

log = logging.getLogger(__name__)


class ResponseSink(Protocol):
    """Takes the results of a run: tensors with their timings, an error, or the bare end."""

    def __call__(
        self,
        answer: tuple[dict[str, Tensor], tuple[StepTiming, ...]] | EdgeServerError | None,
        *,
        final: bool,
    ) -> None: ...


class ReadyStep(NamedTuple):
    """A step that has all its tensors; `slotted` where it already holds its slot."""

    data: DataSet
    step: PlannedStep
    slotted: bool = False


class EnsembleRun:
    """Starts each step as soon as its tensors are there, and responds when the outputs are.

    A chain of directly scheduled models stays on the caller's thread, at constant stack depth.
    Where several steps are ready, those whose models queue are submitted first; all but one of the
    others go to idle threads, and without idle threads they run here, one after the other. A
    response on another thread than its step's submitting one only starts the steps it makes ready.

    A decoupled model is held in its `respond` while the steps behind it have no slot. The model
    waits for the models of those steps only, so they must be able to go on without the held
    instance. A nested ensemble is not held: its own limit bounds its requests in flight.

    The first error ends the request at once; steps that still run keep the snapshot's models open
    until they end, and their responses are dropped.

    Args:
        ensemble: its name, for texts.
        tensors: the request's, by the ensemble's names.
        names: the requested tensors, in order.
        slots: one for each step of the configuration; none without a limit.
        leave: never called concurrently, and once with `final`.
    """

    def __init__(
        self,
        plan: Plan,
        request: InferRequest,
        snapshot: Snapshot,
        *,
        ensemble: str,
        tensors: dict[str, Tensor],
        names: Sequence[str],
        threads: StepThreads,
        slots: Sequence[StepSlots],
        leave: ResponseSink,
    ) -> None:
        self._ensemble = ensemble
        self._plan = plan
        self._request = request
        self._snapshot = snapshot
        self._names = names
        self._threads = threads
        self._slots = slots
        self._leave = leave
        self._lock = threading.Lock()
        # Held while responses are sent, so that they go in order and never concurrently. Its
        # holder takes no lock but `_lock` and those of an ensemble around this one.
        self._leaving = threading.Lock()
        self._flow = DataFlow(plan, tensors)
        self._over = False
        self._in_flight = 0
        self._kept: RetainedSnapshot | None = None

    def start(self) -> None:
        if not self._plan.steps:
            self._give_answers()
            return
        self._drive(ReadyStep(self._flow.root, step) for step in self._plan.first)

    def _drive(self, tasks: Iterable[ReadyStep]) -> None:
        """Submit `tasks`, and those made ready by their responses on this very thread."""
        ready = deque(tasks)
        while ready:
            if len(ready) > 1:
                self._share(ready)
            self._submit(ready.popleft(), ready)

    def _share(self, ready: deque[ReadyStep]) -> None:
        """Keep the steps that only queue, in front, and those that run without another thread."""
        queueing, running = list[ReadyStep](), deque[ReadyStep]()
        for task in ready:
            (queueing if self._queues(task.step) else running).append(task)
        while len(running) > 1 and self._try_thread(running[0]):
            running.popleft()
        ready.clear()
        ready.extend(queueing)
        ready.extend(running)

    def _queues(self, step: PlannedStep) -> bool:
        """Whether the step's model queues a request instead of running it on the submitter."""
        config = self._config(step)
        return config is None or (
            config.dynamic_batching is not None or config.sequence_batching is not None
        )

    def _config(self, step: PlannedStep) -> ModelConfig | None:
        """The configuration of the step's model; None without one, and then submitting fails."""
        try:
            return self._snapshot.find(step.model_name, step.version).config
        except EdgeServerError:
            return None

    def _try_thread(self, task: ReadyStep) -> bool:
        return self._threads.try_run(lambda: self._drive((task,)))

    def _hand_on(self, task: ReadyStep) -> None:
        """Run `task` soon on some thread, and return at once."""
        if not self._queues(task.step):
            self.do_later(task)
            return
        ready = deque[ReadyStep]()
        self._submit(task, ready)
        for other in ready:
            self._hand_on(other)

    def _submit(self, task: ReadyStep, ready: deque[ReadyStep]) -> None:
        data, step, slotted = task
        slots = self._slots[step.index] if self._slots else None
        if slots is not None and not slotted and not self._take_slot(slots, task):
            return
        self._check_life(step)
        with self._lock:
            over = self._over
            if not over:
                self._in_flight += 1
                inputs = self._flow.inputs(data, step)
        if over:
            if slots is not None:
                slots.give_back()
            return
        call = _Call(self, data, step, ready)
        try:
            self._snapshot.submit(self._step_request(step, inputs), call)
        except EdgeServerError as error:
            call(error, True)
        except Exception as error:
            log.exception("ensemble %s: model %s raised", self._ensemble, step.model_name)
            call(InternalError(f"model '{step.model_name}' failed: {error!r}"), True)
        call.thread = 0

    def _take_slot(self, slots: StepSlots, task: ReadyStep) -> bool:
        """Whether a slot was free; otherwise `task` is retried when one may be."""
        try:
            return slots.take(_Parked(self, task), urgent=self._request.urgent)
        except Unavailable as error:
            self._fail(error)
            return False

    def do_later(self, task: ReadyStep) -> None:
        """Run `task` on another thread, unless its request has ended by then."""
        slots = self._slots[task.step.index] if self._slots else None
        try:
            self._threads.run(
                lambda: self._drive((task,)),
                is_over=lambda: self.is_over(task.step),
                # A dropped task passes the slot that woke it on to the next.
                dropped=(lambda: None) if slots is None else slots.wake_next,
            )
        except Unavailable as error:
            self._fail(error)

    def is_over(self, step: PlannedStep) -> bool:
        """Whether `step` need not begin any more; the caller then has its response."""
        self._check_life(step)
        return self._over

    def _check_life(self, step: PlannedStep) -> None:
        """Begin no step of a request that is cancelled or overdue."""
        request = self._request
        if request.cancelled:
            self._fail(Cancelled(""))
        elif request.deadline is not None and time.monotonic() >= request.deadline:
            self._fail(
                DeadlineExceeded(
                    f"the request's deadline passed before model '{step.model_name}' of ensemble "
                    f"'{self._ensemble}' began"
                )
            )

    def _step_request(self, step: PlannedStep, inputs: dict[str, Tensor]) -> InferRequest:
        request = self._request
        return InferRequest(
            step.model_name,
            inputs,
            step.version,
            step.wanted,
            request.id,
            request.deadline,
            request.urgent,
            request.priority,
            request.timeout_us,
            request.sequence,
            request.parameters,
            request.cancellation,
            None if request.trace is None else request.trace.child(step.model_name, request.id),
            # The model itself copies outputs that only the response reads: it may have a faster
            # way to the host.
            on_device=request.on_device or step.hands_on,
            replayed=request.replayed,
        )

    def answered(self, call: _Call, answer: ResponseCallback, *, final: bool) -> None:
        """Take a response of a step; on any thread."""
        step = call.step
        if final and self._slots:
            self._slots[step.index].give_back()
        if step.decoupled and _is_bare(answer):
            answer = None
        if not step.decoupled and (answer is None or not final):
            answer = self._deadlock()
        if isinstance(answer, InferResponse) and not answer.outputs.keys() >= set(step.wanted):
            # A step or the response waits for the output that the model omitted.
            answer = self._deadlock()
        if isinstance(answer, EdgeServerError):
            self._fail(answer)
            if final:
                self._ended()
            return
        ready = self._take(call, answer, final=final)
        if final and call.thread == threading.get_ident():
            call.ready.extend(ready)
        elif final:
            for task in ready:
                self._hand_on(task)
        else:
            self._stream(call, ready)
        if not ready or self._plan.level:
            self._give_answers()

    def _take(self, call: _Call, response: InferResponse | None, *, final: bool) -> list[ReadyStep]:
        """Store a step's response unless the run is over; return the steps it makes ready."""
        ready: list[ReadyStep] = []
        with self._lock:
            if not self._over and response is not None:
                ready = [
                    ReadyStep(*task) for task in self._flow.write(call.data, call.step, response)
                ]
            call.data.all_parts |= call.step.decoupled and final
        if final:
            self._ended()
        return ready

    def _ended(self) -> None:
        """Count one step less in flight."""
        with self._lock:
            self._in_flight -= 1
            unused = None if self._in_flight else self._kept
            self._kept = self._kept if self._in_flight else None
        if unused is not None:
            unused.release()

    def _deadlock(self) -> InternalError:
        return InternalError(
            f"in ensemble '{self._ensemble}', {self._request.log_prefix}unexpected deadlock, "
            "at least one output is not set while no more ensemble steps can be made"
        )

    def _stream(self, call: _Call, ready: Iterable[ReadyStep]) -> None:
        """Run `ready` while a decoupled step goes on; hold that step back for a slot."""
        here = call.thread == threading.get_ident()
        holds = bool(self._slots) and self._may_hold(call.step)
        for task in ready:
            slots = self._slots[task.step.index] if holds else None
            if slots is not None and not slots.wait(
                self._request.deadline, _Parked(self, task), lambda: self._over
            ):
                self._check_life(task.step)
                return
            slotted = task._replace(slotted=holds)
            if self._queues(task.step):
                self._hand_on(slotted)
            elif not self._try_thread(slotted):
                # A task that waits for a thread holds no slot: tasks with a slot must finish.
                if slots is not None:
                    slots.give_back()
                if here:
                    call.ready.append(task)
                else:
                    self._hand_on(task)

    def _may_hold(self, step: PlannedStep) -> bool:
        """Whether the responding thread belongs to the step's model, and not to a member of a
        nested ensemble for which the steps behind may wait."""
        config = self._config(step)
        return config is not None and not config.is_ensemble

    def _give_answers(self) -> None:
        """Send every complete response that has none pending before it."""
        with self._leaving:
            final = False
            while not final:
                with self._lock:
                    if self._over:
                        return
                    data = self._flow.next_complete()
                    final = self._flow.exhausted()
                    if data is None and not final:
                        return
                    answer = None if data is None else self._flow.answer(data, self._names)
                    if final:
                        self._end()
                self._leave(answer, final=final)

    def _fail(self, error: EdgeServerError) -> None:
        with self._lock:
            if self._over:
                return
            self._end()
        for slots in self._slots:
            slots.look_again()
        with self._leaving:
            self._leave(error, final=True)

    def _end(self) -> None:
        """Drop all later responses; under `_lock`, and before the caller's own lease ends."""
        self._over = True
        if self._in_flight:
            self._kept = self._snapshot.retain()


def _is_bare(answer: ResponseCallback) -> bool:
    return isinstance(answer, InferResponse) and not answer.outputs


class _Parked:
    """A task that waits for a slot of its step; see `Parked`."""

    __slots__ = ("_run", "_task")

    def __init__(self, run: EnsembleRun, task: ReadyStep) -> None:
        self._run = run
        self._task = task

    def __call__(self) -> None:
        self._run.do_later(self._task)

    def is_over(self) -> bool:
        return self._run.is_over(self._task.step)


class _Call:
    """A submitted step; its model calls this as `respond`.

    Attributes:
        ready: the tasks of the submitting thread.
        thread: that thread, while it submits; else 0.
        over: the step has had its last response.
    """

    __slots__ = ("data", "over", "ready", "run", "step", "thread")

    def __init__(
        self, run: EnsembleRun, data: DataSet, step: PlannedStep, ready: deque[ReadyStep]
    ) -> None:
        self.run = run
        self.data = data
        self.step = step
        self.ready = ready
        self.thread = threading.get_ident()
        self.over = False

    def __call__(self, answer: ResponseCallback, final: bool) -> None:
        # An error that a scheduler raises after the last response must not free a second slot.
        if not self.over:
            self.over = final
            self.run.answered(self, answer, final=final)
