"""Ensembles and their members for tests: members that run, that queue, and that stream."""

from __future__ import annotations

import math
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from support.model_configs import config_of
from support.waiting import TIMEOUT_S

from edge_server.backends.contract import TensorModel
from edge_server.errors import EdgeServerError
from edge_server.inference.ensemble import EnsembleScheduler
from edge_server.inference.line import StepThreads
from edge_server.inference.registry import (
    LoadedModel,
    ModelEntry,
    ModelState,
    Snapshot,
    Submits,
)
from edge_server.inference.scheduling import Scheduling
from edge_server.inference.statistics import ModelStatistics
from edge_server.model_config.ensemble_graph import resolve_graph
from edge_server.requests import InferResponse, StepTiming
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.backends.contract import Run, Tensors
    from edge_server.inference.registry import Scheduler
    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import InferRequest, Respond, ResponseCallback


def config(name: str, inputs: str, outputs: str, extra: str = "") -> ModelConfig:
    """Tensors separated by blanks, all FP32 of any length."""
    text = f'name: "{name}" backend: "identity" instance_group {{ name: "{name}" count: 1 }}'
    for kind, names in (("input", inputs), ("output", outputs)):
        for tensor in names.split():
            text += f'{kind} {{ name: "{tensor}" data_type: TYPE_FP32 dims: -1 }}\n'
    return config_of(text + extra)


def ensemble_config(
    name: str, inputs: str, outputs: str, *steps: str, max_inflight: int = 0, extra: str = ""
) -> ModelConfig:
    """Steps as `model in=tensor ... > out=tensor ...`."""
    text = ""
    for step in steps:
        model, _, maps = step.partition(" ")
        reads, _, writes = maps.partition(">")
        text += f'step {{ model_name: "{model}" model_version: -1 '
        for kind, pairs in (("input_map", reads), ("output_map", writes)):
            for pair in pairs.split():
                key, value = pair.split("=")
                text += f'{kind} {{ key: "{key}" value: "{value}" }} '
        text += "}\n"
    text = f"ensemble_scheduling {{ {text} max_inflight_requests: {max_inflight} }}"
    return config(name, inputs, outputs, f'platform: "ensemble" {text} {extra}')


def value(*numbers: float) -> Tensor:
    return Tensor(np.array(numbers, np.float32))


def entry_of(model_config: ModelConfig, scheduler: Scheduler) -> ModelEntry:
    loaded = LoadedModel(model_config, 1, scheduler, ModelStatistics())
    return ModelEntry(model_config.name, 1, ModelState.READY, loaded=loaded)


def running(
    name: str, run: Run, inputs: str = "a", outputs: str = "b", extra: str = ""
) -> ModelEntry:
    """A directly scheduled model of one instance."""
    loaded = Scheduling().model(config(name, inputs, outputs, extra), 1, TensorModel(run))
    return ModelEntry(name, 1, ModelState.READY, loaded=loaded)


def plus(number: float) -> Run:
    """b = the sum of the inputs + number."""

    def run(inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        total = sum(tensor.array for tensor in inputs.values())
        return dict.fromkeys(outputs, Tensor(np.asarray(total + number, np.float32)))

    return run


class Queueing(Submits):
    """A scheduler that only keeps what is submitted, until the test responses."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[InferRequest, Respond]] = deque()
        self.came = threading.Semaphore(0)
        self.closed = threading.Event()

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        self.jobs.append((request, respond))
        self.came.release()

    def next(self) -> tuple[InferRequest, Respond]:
        """The oldest that has not been taken, once it is there."""
        assert self.came.acquire(timeout=TIMEOUT_S)
        return self.jobs.popleft()

    def running_since(self) -> float:
        return math.inf

    def close(self) -> None:
        self.closed.set()


def queueing(name: str, scheduler: Queueing, inputs: str = "a", outputs: str = "b") -> ModelEntry:
    return entry_of(config(name, inputs, outputs, "dynamic_batching { }"), scheduler)


class Streaming(Submits):
    """A decoupled model: `produce` responds on the thread that submits."""

    def __init__(self, produce: Callable[[InferRequest, Respond], None]) -> None:
        self._produce = produce

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        self._produce(request, respond)

    def running_since(self) -> float:
        return math.inf

    def close(self) -> None: ...


def streaming(
    name: str,
    produce: Callable[[InferRequest, Respond], None],
    outputs: str = "b",
    extra: str = "",
) -> ModelEntry:
    text = f"model_transaction_policy {{ decoupled: true }} {extra}"
    return entry_of(config(name, "a", outputs, text), Streaming(produce))


def counting(count: int, *, end: bool = False) -> Callable[[InferRequest, Respond], None]:
    """Answers a+0, a+1, ...; the last is final, or where `end`, is followed by the mere end."""

    def produce(request: InferRequest, respond: Respond) -> None:
        for index in range(count):
            given = request.inputs["a"].array + np.float32(index)
            respond(response_to(request, b=Tensor(given)), not end and index == count - 1)
        if end or not count:
            respond(None, True)

    return produce


def response_to(request: InferRequest, **outputs: Tensor) -> InferResponse:
    return InferResponse(
        request.model_name, "1", request.id, outputs, (StepTiming(request.model_name, "", 1),)
    )


def models_of(
    ensemble: ModelConfig, *members: ModelEntry, threads: StepThreads | None = None
) -> Models:
    return Models((ensemble,), members, threads or StepThreads())


class Models:
    """Ensembles, inner ones first, their members, and the threads of their steps."""

    def __init__(
        self,
        ensembles: tuple[ModelConfig, ...],
        members: tuple[ModelEntry, ...],
        threads: StepThreads,
    ) -> None:
        self.threads = threads
        entries = {member.name: member for member in members}
        for given in ensembles:
            resolved = resolve_graph(
                given, Path(given.name), lambda step: entries[step.model_name].loaded.config
            )
            statistics = ModelStatistics()
            scheduler = EnsembleScheduler(resolved, 1, statistics, threads)
            loaded = LoadedModel(resolved, 1, scheduler, statistics)
            entries[given.name] = ModelEntry(given.name, 1, ModelState.READY, loaded=loaded)
        self.entries = entries
        self.snapshot = Snapshot({(e.name, e.version): e for e in entries.values()})

    def statistics(self, name: str) -> ModelStatistics:
        return self.snapshot.find(name).statistics


class Responses:
    """A `Respond` that keeps all responses, and notes those that no caller may get."""

    def __init__(self) -> None:
        self.responses: list[tuple[ResponseCallback, bool]] = []
        self.over = threading.Event()
        self.came = threading.Semaphore(0)
        self._inside = threading.Lock()
        self.faults: list[str] = []

    def __call__(self, response: ResponseCallback, final: bool) -> None:
        if not self._inside.acquire(blocking=False):
            self.faults.append("two responses at once")
            return
        if self.over.is_set():
            self.faults.append("a response after the last")
        self.responses.append((response, final))
        self._inside.release()
        self.came.release()
        if final:
            self.over.set()

    def wait(self) -> list[ResponseCallback]:
        """All responses, once the last is there."""
        assert self.over.wait(TIMEOUT_S)
        assert self.faults == []
        return [response for response, _ in self.responses]

    def numbers(self, output: str) -> list[list[float]]:
        """What each response says of `output`, once the last is there."""
        return [
            response.outputs[output].array.tolist()
            for response in self.wait()
            if isinstance(response, InferResponse)
        ]


def inferred(snapshot_of: Models, request: InferRequest) -> Responses:
    """As `submitted`, by `infer` on a thread of its own."""
    responses = Responses()

    def infer() -> None:
        try:
            responses(snapshot_of.snapshot.infer(request), True)
        except EdgeServerError as error:
            responses(error, True)

    threading.Thread(target=infer, daemon=True).start()
    return responses


def submitted(snapshot_of: Models, request: InferRequest) -> Responses:
    responses = Responses()
    snapshot_of.snapshot.submit(request, responses)
    return responses
