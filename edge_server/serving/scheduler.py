"""Direct scheduling: which thread runs a request, and when, where nothing is batched."""

from __future__ import annotations

import queue
import time
from typing import TYPE_CHECKING

from edge_server.backends.contract import ExecuteRequest, Instance, Model, Tensors
from edge_server.errors import EdgeServerError, InternalError
from edge_server.serving.requests import InferResponse, StepTiming

if TYPE_CHECKING:
    from edge_server.model_config.config import ModelConfig
    from edge_server.serving.requests import InferRequest
    from edge_server.serving.snapshot import Snapshot


class DirectScheduler:
    """The caller's own thread takes an idle instance and runs: no queue, no hop.

    Where every instance is busy the caller waits for the first that is idle again.
    """

    def __init__(self, config: ModelConfig, version: int, model: Model) -> None:
        self._config = config
        self._version = str(version)
        self._output_names = tuple(spec.name for spec in config.outputs)
        self._model = model
        self._instances = [
            model.make_instance(f"{group.name}_{index}")
            for group in config.instance_groups
            for index in range(group.count)
        ]
        self._idle: queue.LifoQueue[Instance] = queue.LifoQueue()
        for instance in self._instances:
            self._idle.put(instance)

    def infer(self, request: InferRequest, snapshot: Snapshot) -> InferResponse:
        del snapshot
        names = request.outputs or self._output_names
        answers: list[Tensors | EdgeServerError] = []
        execute = ExecuteRequest(
            request.inputs, frozenset(names), lambda answer, _final: answers.append(answer)
        )
        instance = self._idle.get()
        started_ns = time.monotonic_ns()
        try:
            instance.execute([execute])
        finally:
            duration_ns = time.monotonic_ns() - started_ns
            self._idle.put(instance)
        if not answers:
            raise InternalError(f"model '{self._config.name}' ended without an answer")
        answer = answers[-1]
        if isinstance(answer, EdgeServerError):
            raise answer
        return InferResponse(
            self._config.name,
            self._version,
            request.id,
            {name: answer[name] for name in names},
            (StepTiming(self._config.name, self._config.backend, duration_ns),),
        )

    def close(self) -> None:
        for instance in self._instances:
            instance.close()
        self._model.close()
