"""One request's walk through an ensemble: who runs which step on which thread."""

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
    """Takes the answers of a run: tensors with who computed them, an error, or the mere end."""

    def __call__(
        self,
        answer: tuple[dict[str, Tensor], tuple[StepTiming, ...]] | EdgeServerError | None,
        *,
        final: bool,
    ) -> None: ...


class ReadyStep(NamedTuple):
    """A step that has all its tensors; `slotted` where its slot is taken already."""

    data: DataSet
    step: PlannedStep
    slotted: bool = False


class EnsembleRun:
    """Starts each step as soon as its tensors are there, and answers when the outputs are.

    A chain of directly scheduled models stays on the caller's thread, at one depth however long
    it is. Where several steps are ready, those whose models queue are submitted first; all but
    one of the others go to threads that have nothing to do, and where there are none they run
    here, one after the other. An answer that comes on another thread than its step was submitted
    on only hands on what it makes ready.

    A decoupled model is held in its `respond` while the steps behind it have no slot. It waits for
    their models only, so they must be able to go on without the instance that is held. An
    ensemble within is not held: its own limit bounds what it has in flight.

    The first error ends the request at once; what still runs then keeps the snapshot's models
    open till it has ended, and is not heard.

    Args:
        ensemble: its name, for texts.
        tensors: the request's, by the ensemble's names.
        names: the tensors that are wanted, in order.
        slots: one for each step of the configuration; none without a limit.
        leave: never called twice at once, and once with `final`.
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
        # Held while answers leave, so that they leave in order and never two at once. Whoever
        # holds it takes no lock but `_lock` and those of an ensemble around this one.
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
        """Submit `tasks`, and those that their answers on this very thread make ready."""
        ready = deque(tasks)
        while ready:
            if len(ready) > 1:
                self._share(ready)
            self._submit(ready.popleft(), ready)

    def _share(self, ready: deque[ReadyStep]) -> None:
        """Keep what only queues, in front, and what runs and finds no other thread."""
        queueing, running = list[ReadyStep](), deque[ReadyStep]()
        for task in ready:
            (queueing if self._queues(task.step) else running).append(task)
        while len(running) > 1 and self._try_thread(running[0]):
            running.popleft()
        ready.clear()
        ready.extend(queueing)
        ready.extend(running)

    def _queues(self, step: PlannedStep) -> bool:
        """Whether its model takes a request without running it on the thread that submits."""
        config = self._config(step)
        return config is None or (
            config.dynamic_batching is not None or config.sequence_batching is not None
        )

    def _config(self, step: PlannedStep) -> ModelConfig | None:
        """Its model's; None where that is not there, which the step will answer."""
        try:
            return self._snapshot.find(step.model_name, step.version).config
        except EdgeServerError:
            return None

    def _try_thread(self, task: ReadyStep) -> bool:
        return self._threads.try_run(lambda: self._drive((task,)))

    def _hand_on(self, task: ReadyStep) -> None:
        """Have `task` done soon, and return at once."""
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
        """Whether there is one now; else `task` comes back when there may be."""
        try:
            return slots.take(_Parked(self, task), urgent=self._request.urgent)
        except Unavailable as error:
            self._fail(error)
            return False

    def do_later(self, task: ReadyStep) -> None:
        """Have `task` done on another thread, unless nobody waits for it by then."""
        slots = self._slots[task.step.index] if self._slots else None
        try:
            self._threads.run(
                lambda: self._drive((task,)),
                is_over=lambda: self.is_over(task.step),
                # The slot that it may have come for is another's.
                dropped=(lambda: None) if slots is None else slots.wake_next,
            )
        except Unavailable as error:
            self._fail(error)

    def is_over(self, step: PlannedStep) -> bool:
        """Whether `step` need not begin any more; the caller has been told why."""
        self._check_life(step)
        return self._over

    def _check_life(self, step: PlannedStep) -> None:
        """Work that nobody waits for is not begun."""
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
            # What only the answer has is copied best by the model itself, which may have a faster
            # way to the host.
            on_device=request.on_device or step.hands_on,
            replayed=request.replayed,
        )

    def answered(self, call: _Call, answer: ResponseCallback, *, final: bool) -> None:
        """Take what a step says; on any thread."""
        step = call.step
        if final and self._slots:
            self._slots[step.index].give_back()
        if step.decoupled and _is_bare(answer):
            answer = None
        if not step.decoupled and (answer is None or not final):
            answer = self._deadlock()
        if isinstance(answer, InferResponse) and not answer.outputs.keys() >= set(step.wanted):
            # Whatever it leaves out is read by a step, or by the answer, that waits for it.
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
        """Keep what a step gave, unless it is too late; the steps that this makes ready."""
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
        """One step less is in flight."""
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
        """Have `ready` done while a decoupled step goes on; holds that step back for a slot."""
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
                # Who waits for a thread holds no slot: those who do must come to an end.
                if slots is not None:
                    slots.give_back()
                if here:
                    call.ready.append(task)
                else:
                    self._hand_on(task)

    def _may_hold(self, step: PlannedStep) -> bool:
        """Whether the thread that answers is its model's own, and not that of some member of an
        ensemble within, which may be what the steps behind wait for."""
        config = self._config(step)
        return config is not None and not config.is_ensemble

    def _give_answers(self) -> None:
        """Pass on every answer that is complete and has none before it."""
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
        """Hear nothing more; under `_lock`, and before the caller's own lease ends."""
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
    """A step that has been submitted: what its model calls `respond`.

    Attributes:
        ready: the tasks of the thread that submitted it.
        thread: that thread, while it submits; else 0.
        over: it has had its last answer.
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
        # What a scheduler raises after the last answer shall give back no second slot.
        if not self.over:
            self.over = final
            self.run.answered(self, answer, final=final)
