"""The ensemble scheduler: a data-flow graph whose steps share tensors by reference."""

from __future__ import annotations

import threading
from collections import deque
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from edge_server.errors import EdgeServerError, Unavailable
from edge_server.inference.ensemble_steps import DataFlow, EnsembleCall, plan_of
from edge_server.inference.line import StepSlots
from edge_server.inference.registry import Submits
from edge_server.requests import Reply

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from edge_server.inference.ensemble_steps import DataSet, Plan, PlannedStep
    from edge_server.inference.line import StepThreads
    from edge_server.inference.registry import Snapshot
    from edge_server.inference.statistics import ModelStatistics
    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import (
        InferRequest,
        InferResponse,
        Respond,
        ResponseCallback,
        StepTiming,
    )
    from edge_server.tensors import Tensor


class EnsembleRun:
    """Starts each step as soon as its tensors are there, and responds when the outputs are.

    A step whose model runs on the submitting thread is followed there by the steps that it makes
    ready, at constant stack depth. Where several steps are ready, those whose models queue are
    submitted first; all but one of the others go to idle threads, and without idle threads they run
    here, one after the other. A response on another thread than its step's submitting one only
    starts the steps it makes ready.

    A decoupled model is held in its `respond` while the steps behind it have no slot. The model
    waits for the models of those steps only, so they must be able to go on without the held
    instance. A nested ensemble is not held: its own limit bounds its requests in flight.

    The first error ends the request at once; steps that still run keep the snapshot's models open
    until they end, and their responses are dropped. `respond` is never called concurrently."""

    def __init__(
        self,
        plan: Plan,
        call: EnsembleCall,
        snapshot: Snapshot,
        respond: Respond,
        *,
        threads: StepThreads,
        slots: Sequence[StepSlots],
    ) -> None:
        self.call = call
        self._plan = plan
        self._snapshot = snapshot
        self._respond = respond
        self._threads = threads
        self._slots = slots
        self._lock = threading.Lock()
        # Held while responses are sent, so that they go in order and never concurrently. Its
        # holder takes no lock but `_lock`, those of the slots, and those of an ensemble around this
        # one.
        self._sending = threading.Lock()
        self._flow = DataFlow(plan, call.inputs())
        self._over = False

    def start(self) -> None:
        if self._plan.steps:
            self.drive(StepTask(self, *ready) for ready in self._flow.first())
        else:
            self._send_complete()

    def drive(self, tasks: Iterable[StepTask], *, may_run: bool = True) -> None:
        """Start `tasks`, and those that responses on this very thread make ready; a step thread
        runs the models where this thread may not.
        """
        ready = deque(tasks)
        to_run = deque[StepTask]()
        while ready or to_run:
            if ready:
                task = ready.popleft()
                if self._queues(task.step):
                    self._submit(task, ready)
                else:
                    to_run.append(task)
            elif not may_run:
                self.drive_later(to_run.popleft())
            elif len(to_run) > 1 and self._threads.try_run(to_run[0]):
                to_run.popleft()
            else:
                self._submit(to_run.popleft(), ready)

    def drive_later(self, task: StepTask) -> None:
        try:
            self._threads.run(task)
        except Unavailable as error:
            self._fail(error)

    def is_over(self, step: PlannedStep) -> bool:
        """Whether `step` need not begin any more; the caller then has its response."""
        try:
            self.call.check_alive(step)
        except EdgeServerError as error:
            self._fail(error)
        return self._over

    def slots_of(self, step: PlannedStep) -> StepSlots | None:
        return self._slots[step.index] if self._slots else None

    def responded(self, step_call: _StepCall, response: ResponseCallback, *, final: bool) -> None:
        step = step_call.task.step
        slots = self.slots_of(step)
        if final and slots is not None:
            slots.give_back()
        try:
            ready = self._take(step_call.task, response, final=final)
        except EdgeServerError as error:
            self._fail(error)
            return
        if not final:
            self._run_beside(step_call, ready)
        elif step_call.submits_here():
            step_call.ready.extend(ready)
        else:
            self.drive(ready, may_run=False)
        if not ready or self._plan.level:
            self._send_complete()

    def _queues(self, step: PlannedStep) -> bool:
        """Whether the step's model queues a request instead of running it on the submitter."""
        config = self._config(step)
        return config is None or (
            config.dynamic_batching is not None or config.sequence_batching is not None
        )

    def _config(self, step: PlannedStep) -> ModelConfig | None:
        try:
            return self._snapshot.find(step.model_name, step.version).config
        except EdgeServerError:
            return None

    def _submit(self, task: StepTask, ready: deque[StepTask]) -> None:
        step, slots = task.step, self.slots_of(task.step)
        if slots is not None and not task.has_slot:
            try:
                if not slots.take(task, urgent=self.call.request.urgent):
                    return
            except Unavailable as error:
                self._fail(error)
                return
        self.is_over(step)
        with self._lock:
            over = self._over
            if not over:
                inputs = self._flow.inputs(task.data, step)
                step_call = _StepCall(self, task, self._snapshot, ready)
        if over:
            if slots is not None:
                slots.give_back()
            return
        try:
            self._snapshot.submit(self.call.step_request(step, inputs), step_call)
        except EdgeServerError as error:
            step_call(error, True)
        except Exception as error:  # noqa: BLE001 - the caller waits for a response in any case
            step_call(self.call.step_failure(step, error), True)
        step_call.thread = 0

    def _take(self, task: StepTask, response: ResponseCallback, *, final: bool) -> list[StepTask]:
        """Store a step's response unless the run is over; return the steps it makes ready.

        Raises: EdgeServerError: the response is an error, or lacks what other steps wait for.
        """
        step = task.step
        if isinstance(response, EdgeServerError):
            raise response
        if step.decoupled and response is not None and not response.outputs:
            response = None
        if not step.decoupled and (response is None or not final):
            raise self.call.deadlock()
        with self._lock:
            ready = []
            if response is not None and not self._over:
                # None is an output that the model has left out: steps run without that input,
                # and the response comes without that output.
                made = {tensor: response.outputs.get(name) for name, tensor in step.outputs}
                ready = self._flow.write(task.data, step, made, response.timings)
            task.data.all_parts |= step.decoupled and final
        return [StepTask(self, *each) for each in ready]

    def _run_beside(self, step_call: _StepCall, ready: Iterable[StepTask]) -> None:
        """Run `ready` while a decoupled step goes on; hold that step back for a slot."""
        holds = bool(self._slots) and self._may_hold(step_call.task.step)
        for task in ready:
            slots = self.slots_of(task.step) if holds else None
            if slots is not None:
                if not slots.wait(self.call.request.deadline, task, lambda: self._over):
                    self.is_over(task.step)
                    return
                task.has_slot = True
            if self._queues(task.step):
                self.drive((task,), may_run=False)
            elif not self._threads.try_run(task):
                # A task that waits for a thread holds no slot: tasks with a slot must finish.
                if slots is not None:
                    task.has_slot = False
                    slots.give_back()
                if step_call.submits_here():
                    step_call.ready.append(task)
                else:
                    self.drive_later(task)

    def _may_hold(self, step: PlannedStep) -> bool:
        """Whether the responding thread belongs to the step's model, and not to a member of a
        nested ensemble for which the steps behind may wait."""
        config = self._config(step)
        return config is not None and not config.is_ensemble

    def _send_complete(self) -> None:
        """Send every complete response that has none pending before it."""
        with self._sending:
            final = False
            while not final:
                with self._lock:
                    if self._over:
                        return
                    data = self._flow.next_complete()
                    final = self._flow.exhausted()
                    if data is None and not final:
                        return
                    result = None if data is None else self._flow.result(data)
                response: ResponseCallback = None
                if result is not None:
                    try:
                        response = self.call.response(*result)
                    except EdgeServerError as error:
                        response, final = error, True
                if final and not self._end():
                    return
                self._send(response, final=final)

    def _fail(self, error: EdgeServerError) -> None:
        if self._end():
            with self._sending:
                self._send(error, final=True)

    def _end(self) -> bool:
        """Drop all later responses of steps; False where the run has ended before."""
        with self._lock:
            if self._over:
                return False
            self._over = True
        for slots in self._slots:
            slots.look_again()
        return True

    def _send(self, response: ResponseCallback, *, final: bool) -> None:
        self.call.count(response, final=final)
        self._respond(response, final)


class StepTask:
    __slots__ = ("_run", "data", "has_slot", "step")

    def __init__(self, run: EnsembleRun, data: DataSet, step: PlannedStep) -> None:
        self._run = run
        self.data = data
        self.step = step
        self.has_slot = False

    def run(self) -> None:
        self._run.drive((self,))

    def run_later(self) -> None:
        self._run.drive_later(self)

    def is_over(self) -> bool:
        return self._run.is_over(self.step)

    def dropped(self) -> None:
        """Pass the task's slot, or the free one that woke it, on to the next."""
        slots = self._run.slots_of(self.step)
        if slots is not None:
            (slots.give_back if self.has_slot else slots.wake_next)()


class _StepCall(Reply["InferResponse"]):
    """A submitted step, which its model calls as `respond`; it keeps the snapshot's models open.
    `thread` is the one that submits it, as long as it does."""

    __slots__ = ("_run", "ready", "task", "thread")

    def __init__(
        self, run: EnsembleRun, task: StepTask, snapshot: Snapshot, ready: deque[StepTask]
    ) -> None:
        super().__init__(snapshot.retain())
        self._run = run
        self.task = task
        self.ready = ready
        self.thread = threading.get_ident()

    def submits_here(self) -> bool:
        """Whether this thread submits the step, and will run the tasks in `ready`."""
        return self.thread == threading.get_ident()

    def _take(self, response: ResponseCallback, final: bool) -> None:
        self._run.responded(self, response, final=final)


# The number of cached plans; a client may request any subset of the outputs.
_PLANS = 64


class EnsembleScheduler(Submits):
    """Runs the steps that the requested outputs need, in the snapshot that the request's lease
    pins, so that no request sees two versions of one member. With a decoupled step the ensemble
    responds once for each response of that step, in their order."""

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        statistics: ModelStatistics,
        threads: StepThreads,
    ) -> None:
        self._call = partial(EnsembleCall, config, str(version), statistics)
        self._threads = threads
        self._output_names = tuple(spec.name for spec in config.outputs)
        self._plan = lru_cache(_PLANS)(partial(plan_of, config))
        limit = config.max_inflight_requests
        self._watch = threads.watch
        self._slots = [StepSlots(limit, self._watch) for _ in config.steps] if limit else []
        for slots in self._slots:
            self._watch.add(slots)

    def infer(self, request: InferRequest, snapshot: Snapshot) -> InferResponse:
        names = request.outputs or self._output_names
        plan = self._plan(frozenset(names))
        if not plan.is_chain or self._slots:
            return super().infer(request, snapshot)
        call = self._call(request, names)
        try:
            response = _run_chain(plan, call, snapshot)
        except EdgeServerError as error:
            call.count(error, final=True)
            raise
        call.count(response, final=True)
        return response

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        names = request.outputs or self._output_names
        call = self._call(request, names)
        plan = self._plan(frozenset(names))
        run = EnsembleRun(plan, call, snapshot, respond, threads=self._threads, slots=self._slots)
        run.start()

    # The members count the waiting requests, and their runs.

    def close(self) -> None:
        for slots in self._slots:
            self._watch.remove(slots)


def _run_chain(plan: Plan, call: EnsembleCall, snapshot: Snapshot) -> InferResponse:
    """Run steps that wait for each other one after the other, on this very thread."""
    tensors: dict[str, Tensor | None] = dict(call.inputs())
    timings: list[StepTiming] = []
    for step in plan.steps:
        call.check_alive(step)
        inputs = {
            name: made for name, tensor in step.inputs if (made := tensors.get(tensor)) is not None
        }
        request = call.step_request(step, inputs)
        try:
            response = snapshot.infer(request)
        except EdgeServerError:
            raise
        except Exception as error:
            raise call.step_failure(step, error) from error
        tensors |= {tensor: response.outputs.get(name) for name, tensor in step.outputs}
        timings += response.timings
    return call.response(tensors, tuple(timings))
