"""An ensemble: a data-flow graph whose steps hand each other tensors by reference."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from edge_server.backends.contract import Phases
from edge_server.errors import EdgeServerError
from edge_server.requests import InferRequest, InferResponse, StepTiming
from edge_server.serving.statistics import Failure

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edge_server.model_config.config import EnsembleStep, ModelConfig
    from edge_server.requests import Respond
    from edge_server.serving.snapshot import Snapshot
    from edge_server.serving.statistics import ModelStatistics
    from edge_server.tensors import Tensor


class EnsembleScheduler:
    """Runs the steps that the wanted outputs need, each as soon as its tensors are there.

    The graph was validated before it came here, so an order exists; it is worked out once. Steps
    run on the caller's thread, in the snapshot that the request's lease pinned, so that no request
    sees two versions of one member.
    """

    def __init__(self, config: ModelConfig, version: int, statistics: ModelStatistics) -> None:
        self._config = config
        self._version = str(version)
        self._statistics = statistics
        self._output_names = tuple(spec.name for spec in config.outputs)
        self._steps = _in_order(config)

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        began_ns = time.monotonic_ns()
        try:
            response = self._run(request, snapshot)
        except EdgeServerError as error:
            self._statistics.failed(Failure.OTHER, time.monotonic_ns() - began_ns)
            respond(error, True)
            return
        phases = Phases(0, time.monotonic_ns() - began_ns, 0)
        self._statistics.executed(1, phases)
        self._statistics.succeeded(phases.infer, 0, phases)
        respond(response, True)

    def _run(self, request: InferRequest, snapshot: Snapshot) -> InferResponse:
        names = request.outputs or self._output_names
        tensors: dict[str, Tensor] = dict(request.inputs)
        timings: list[StepTiming] = []
        for step, wanted in self._plan(names):
            response = snapshot.infer(
                InferRequest(
                    model_name=step.model_name,
                    model_version="" if step.model_version == -1 else str(step.model_version),
                    inputs={name: tensors[tensor] for name, tensor in step.input_map.items()},
                    outputs=wanted,
                    id=request.id,
                    deadline=request.deadline,
                    urgent=request.urgent,
                )
            )
            for name in wanted:
                tensors[step.output_map[name]] = response.outputs[name]
            timings += response.timings
        return InferResponse(
            self._config.name,
            self._version,
            request.id,
            {name: tensors[name] for name in names},
            tuple(timings),
        )

    def pending(self) -> int:
        """None: its members tell."""
        return 0

    def longest_run_s(self, now: float) -> float:  # noqa: ARG002 - its members tell
        return 0.0

    def close(self) -> None:
        """An ensemble holds nothing: its members are models of their own."""

    def _plan(self, names: Iterable[str]) -> list[tuple[EnsembleStep, tuple[str, ...]]]:
        """The steps that `names` need, in order, each with the outputs that are wanted of it."""
        needed = set(names)
        plan: list[tuple[EnsembleStep, tuple[str, ...]]] = []
        for step in reversed(self._steps):
            wanted = tuple(name for name, tensor in step.output_map.items() if tensor in needed)
            if wanted:
                needed.update(step.input_map.values())
                plan.append((step, wanted))
        return plan[::-1]


def _in_order(config: ModelConfig) -> list[EnsembleStep]:
    """The steps so that each comes after those that write what it reads."""
    written = {spec.name for spec in config.inputs}
    waiting = list(config.steps)
    ordered: list[EnsembleStep] = []
    while ready := [step for step in waiting if written.issuperset(step.input_map.values())]:
        for step in ready:
            written.update(step.output_map.values())
            waiting.remove(step)
        ordered += ready
    return ordered
