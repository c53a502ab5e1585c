"""Direct scheduling: which thread runs a request, and when, where nothing is batched."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from edge_server.backends.contract import ExecuteRequest, Model, Tensors
from edge_server.errors import EdgeServerError, InternalError
from edge_server.serving.instance_pool import InstancePool
from edge_server.serving.requests import InferResponse, StepTiming

if TYPE_CHECKING:
    from edge_server.model_config.config import ModelConfig
    from edge_server.serving.requests import InferRequest
    from edge_server.serving.snapshot import Snapshot

log = logging.getLogger(__name__)


class DirectScheduler:
    """The caller's own thread takes an idle instance and runs: no queue, no hop.

    Where every instance is busy the caller waits for its turn, or for its deadline.
    """

    def __init__(self, config: ModelConfig, version: int, model: Model) -> None:
        self._config = config
        self._version = str(version)
        self._output_names = tuple(spec.name for spec in config.outputs)
        self._model = model
        self._pool = InstancePool(
            [
                model.make_instance(f"{group.name}_{index}")
                for group in config.instance_groups
                for index in range(group.count)
            ]
        )

    def infer(self, request: InferRequest, snapshot: Snapshot) -> InferResponse:
        del snapshot
        names = request.outputs or self._output_names
        answers: list[Tensors | EdgeServerError] = []
        execute = ExecuteRequest(
            request.inputs, frozenset(names), lambda answer, _final: answers.append(answer)
        )
        with self._pool.lend(urgent=request.urgent, deadline=request.deadline) as instance:
            started_ns = time.monotonic_ns()
            try:
                instance.execute([execute])
            except Exception as error:
                log.exception("model %s: an instance raised", self._config.name)
                answers.append(InternalError(f"model '{self._config.name}' failed: {error!r}"))
            duration_ns = time.monotonic_ns() - started_ns
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

    def longest_run_s(self, now: float) -> float:
        return self._pool.longest_run_s(now)

    def close(self) -> None:
        self._pool.close()
        self._model.close()
