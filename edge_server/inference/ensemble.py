"""The ensemble scheduler: a data-flow graph whose steps share tensors by reference."""

from __future__ import annotations

import time
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from edge_server.backends.contract import Phases, on_host
from edge_server.errors import EdgeServerError
from edge_server.inference.ensemble_plan import plan_of
from edge_server.inference.ensemble_run import EnsembleRun
from edge_server.inference.execution import in_shape
from edge_server.inference.statistics import FailureReason
from edge_server.inference.step_slots import StepSlots
from edge_server.requests import InferResponse

if TYPE_CHECKING:
    from edge_server.inference.line_watch import LineWatch
    from edge_server.inference.snapshot import Snapshot
    from edge_server.inference.statistics import ModelStatistics
    from edge_server.inference.step_threads import StepThreads
    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import InferRequest, Respond, StepTiming
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
        self.config = config
        self._version = str(version)
        self._statistics = statistics
        self._threads = threads
        self._output_names = tuple(spec.name for spec in config.outputs)
        self._plan = lru_cache(_PLANS)(partial(plan_of, config))
        limit = config.max_inflight_requests
        self._slots = [StepSlots(limit, watch) for _ in config.steps] if limit else []
        self._watch = watch
        if watch is not None:
            for slots in self._slots:
                watch.add(slots)

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        names = request.outputs or self._output_names
        answers = _EnsembleResponses(self.config, self._version, self._statistics, request, respond)
        run = EnsembleRun(
            self._plan(frozenset(names)),
            request,
            snapshot,
            ensemble=self.config.name,
            tensors=answers.inputs(),
            names=names,
            threads=self._threads,
            slots=self._slots,
            leave=answers,
        )
        run.start()

    def pending(self) -> int:
        """0: the members count the waiting requests."""
        return 0

    def longest_run_s(self, now: float) -> float:  # noqa: ARG002 - its members count
        return 0.0

    def close(self) -> None:
        """Close nothing: the members are loaded models of their own."""
        if self._watch is not None:
            for slots in self._slots:
                self._watch.remove(slots)


class _EnsembleResponses:
    """Turns the results of a run into responses, and counts each before the caller gets it."""

    def __init__(
        self,
        config: ModelConfig,
        version: str,
        statistics: ModelStatistics,
        request: InferRequest,
        respond: Respond,
    ) -> None:
        self._config = config
        self._version = version
        self._statistics = statistics
        self._request = request
        self._respond = respond
        self._began_ns = self._last_ns = time.monotonic_ns()
        self._responses = 0
        self._over = False
        batched = config.max_batch_size > 0 and request.inputs
        self._batch_size = next(iter(request.inputs.values())).shape[0] if batched else 0

    def inputs(self) -> dict[str, Tensor]:
        """The request's tensors in the shapes that the steps take."""
        shapes = self._config.reshapes
        if not shapes:
            return dict(self._request.inputs)
        return {
            name: in_shape(tensor, shapes.get(name), self._batch_size)
            for name, tensor in self._request.inputs.items()
        }

    def _response(
        self, tensors: dict[str, Tensor], timings: tuple[StepTiming, ...]
    ) -> InferResponse | EdgeServerError:
        config = self._config
        try:
            if not self._request.on_device:
                copied = self._statistics.copied
                tensors = {name: on_host(tensor, copied) for name, tensor in tensors.items()}
            if config.reshapes:
                shapes = {s.name: s.shape for s in config.outputs if s.name in config.reshapes}
                tensors = {
                    name: in_shape(tensor, shapes.get(name), self._batch_size)
                    for name, tensor in tensors.items()
                }
        except EdgeServerError as error:
            return error
        return InferResponse(config.name, self._version, self._request.id, tensors, timings)

    def __call__(
        self,
        answer: tuple[dict[str, Tensor], tuple[StepTiming, ...]] | EdgeServerError | None,
        *,
        final: bool,
    ) -> None:
        if self._over:
            return
        response = self._response(*answer) if isinstance(answer, tuple) else answer
        self._over = final = final or isinstance(response, EdgeServerError)
        now_ns = time.monotonic_ns()
        if self._config.decoupled:
            self._statistics.responded(
                self._responses,
                now_ns - self._last_ns,
                empty=response is None,
                failed=isinstance(response, EdgeServerError),
            )
            self._responses += 1
            self._last_ns = now_ns
        if self._request.replayed:
            pass
        elif isinstance(response, EdgeServerError):
            self._statistics.failed(FailureReason.OTHER, now_ns - self._began_ns)
        elif final:
            phases = Phases(0, now_ns - self._began_ns, 0)
            self._statistics.executed(max(1, self._batch_size), phases)
            self._statistics.succeeded(phases.infer, 0, phases)
        self._respond(response, final)
