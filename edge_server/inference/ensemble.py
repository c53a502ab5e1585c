"""The ensemble scheduler: a data-flow graph whose steps share tensors by reference."""

from __future__ import annotations

from functools import lru_cache, partial
from math import inf
from typing import TYPE_CHECKING

from edge_server.errors import EdgeServerError
from edge_server.inference.data_flow import plan_of
from edge_server.inference.ensemble_call import EnsembleCall
from edge_server.inference.ensemble_limits import StepSlots
from edge_server.inference.ensemble_run import EnsembleRun
from edge_server.inference.schedulers import infer_by_submit

if TYPE_CHECKING:
    from edge_server.inference.data_flow import Plan
    from edge_server.inference.ensemble_limits import StepThreads
    from edge_server.inference.line_watch import LineWatch
    from edge_server.inference.snapshot import Snapshot
    from edge_server.inference.statistics import ModelStatistics
    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import InferRequest, InferResponse, Respond, StepTiming
    from edge_server.tensors import Tensor

# The number of cached plans; a client may request any subset of the outputs.
_PLANS = 64


class EnsembleScheduler:
    """Runs the steps that the requested outputs need, each as soon as its tensors are there.

    The graph is resolved before the scheduler is made, so an order exists. Steps run in the
    snapshot that the request's lease pins, so no request sees two versions of one member. With a
    decoupled step the ensemble responds once for each response of that step, in their order.

    Args:
        watch: drops the ended tasks that wait for a slot of a step; None without such a watch.
    """

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        statistics: ModelStatistics,
        threads: StepThreads,
        watch: LineWatch | None = None,
    ) -> None:
        self._call = partial(EnsembleCall, config, str(version), statistics)
        self._threads = threads
        self._output_names = tuple(spec.name for spec in config.outputs)
        self._plan = lru_cache(_PLANS)(partial(plan_of, config))
        limit = config.max_inflight_requests
        self._slots = [StepSlots(limit, watch) for _ in config.steps] if limit else []
        self._watch = watch
        if watch is not None:
            for slots in self._slots:
                watch.add(slots)

    def infer(self, request: InferRequest, snapshot: Snapshot) -> InferResponse:
        names = request.outputs or self._output_names
        plan = self._plan(frozenset(names))
        if not plan.is_chain or self._slots:
            return infer_by_submit(self, request, snapshot)
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

    def pending(self) -> int:
        """0: the members count the waiting requests."""
        return 0

    def running_since(self) -> float:
        """Infinity: the members count their runs."""
        return inf

    def close(self) -> None:
        """Close nothing: the members are loaded models of their own."""
        if self._watch is not None:
            for slots in self._slots:
                self._watch.remove(slots)


def _run_chain(plan: Plan, call: EnsembleCall, snapshot: Snapshot) -> InferResponse:
    """Run steps that wait for each other one after the other, on this very thread.

    Raises:
        EdgeServerError: a step failed, or was not begun.
    """
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
        tensors.update(call.step_outputs(step, response))
        timings += response.timings
    return call.response(tensors, tuple(timings))
