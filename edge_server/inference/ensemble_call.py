"""One request to an ensemble: the requests to its steps, and its response, counted."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from edge_server.backends.contract import Phases, all_on_host
from edge_server.errors import Cancelled, DeadlineExceeded, EdgeServerError, InternalError
from edge_server.inference.job import batch_size_of, in_rank, in_shape
from edge_server.inference.statistics import FailureReason
from edge_server.requests import InferRequest, InferResponse, SequencePlace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edge_server.backends.contract import Tensors
    from edge_server.inference.data_flow import Made, PlannedStep
    from edge_server.inference.statistics import ModelStatistics
    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import Parameters, ResponseCallback, StepTiming
    from edge_server.tensors import Tensor

log = logging.getLogger(__name__)

_SEQUENCE_PARAMETERS = ("sequence_id", "sequence_start", "sequence_end")


def _sequence_parameters(place: SequencePlace) -> Parameters:
    return dict(zip(_SEQUENCE_PARAMETERS, (place.id, place.start, place.end), strict=True))


_NO_SEQUENCE = _sequence_parameters(SequencePlace(0))


class EnsembleCall:
    """One checked request to an ensemble.

    Args:
        config: the ensemble's.
        names: the requested outputs, in order.
    """

    def __init__(
        self,
        config: ModelConfig,
        version: str,
        statistics: ModelStatistics,
        request: InferRequest,
        names: Sequence[str],
    ) -> None:
        self.request = request
        self._config = config
        self._version = version
        self._statistics = statistics
        self._names = names
        self._batch_size = batch_size_of(config, request)
        self._began_ns = self._last_ns = time.monotonic_ns()
        self._responses = 0

    def inputs(self) -> dict[str, Tensor]:
        """Return the request's tensors in the shapes that the steps take."""
        shapes = self._config.reshapes
        return {
            name: in_shape(tensor, shapes.get(name), self._batch_size)
            for name, tensor in self.request.inputs.items()
        }

    def check_alive(self, step: PlannedStep) -> None:
        """Raises: Cancelled, DeadlineExceeded: `step` need not begin, as the caller has gone."""
        request = self.request
        if request.cancelled:
            raise Cancelled("")
        if request.deadline is not None and time.monotonic() >= request.deadline:
            raise DeadlineExceeded(
                f"the request's deadline passed before model '{step.model_name}' of ensemble "
                f"'{self._config.name}' began"
            )

    def step_request(self, step: PlannedStep, inputs: Mapping[str, Tensor]) -> InferRequest:
        """Return the request to the model of `step`."""
        request = self.request
        if shapes := step.full_shapes:
            inputs = {
                name: in_rank(tensor, shapes[name]) if name in shapes else tensor
                for name, tensor in inputs.items()
            }
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

    def step_failure(self, step: PlannedStep, error: Exception) -> InternalError:
        """Return the error of a step whose scheduler has raised an unforeseen one."""
        log.error(
            "ensemble %s: model %s raised", self._config.name, step.model_name, exc_info=error
        )
        return InternalError(f"model '{step.model_name}' failed: {error!r}")

    def step_outputs(self, step: PlannedStep, response: InferResponse) -> Made:
        """Return the outputs of `step` by the ensemble's names; None is one that the model has
        left out: the steps behind it run without that input, which they may declare optional, and
        the ensemble's response comes without that output."""
        made = response.outputs
        return {tensor: made.get(name) for name, tensor in step.outputs}

    def deadlock(self) -> InternalError:
        """Return the error of a step that ended without a response (Triton's text)."""
        return InternalError(
            f"in ensemble '{self._config.name}', {self.request.log_prefix}unexpected deadlock, "
            "at least one output is not set while no more ensemble steps can be made"
        )

    def response(self, tensors: Made, timings: tuple[StepTiming, ...]) -> InferResponse:
        """Return the response whose outputs are among `tensors`; its parameters are the place in
        the sequence, which Triton's ensembles always return.

        Raises:
            EdgeServerError: the device that holds an output failed, or the output does not fit its
                required shape.
        """
        config = self._config
        outputs: Tensors = {
            name: tensor for name in self._names if (tensor := tensors.get(name)) is not None
        }
        if not self.request.on_device:
            outputs = all_on_host(outputs, self._statistics.copied)
        if config.reshapes:
            shapes = {s.name: s.shape for s in config.outputs if s.name in config.reshapes}
            outputs = {
                name: in_shape(tensor, shapes.get(name), self._batch_size)
                for name, tensor in outputs.items()
            }
        if config.mixes_batching:
            full = {spec.name: config.full_shape(spec) for spec in config.outputs}
            outputs = {name: in_rank(tensor, full[name]) for name, tensor in outputs.items()}
        place = self.request.sequence
        parameters = _NO_SEQUENCE if place is None else _sequence_parameters(place)
        return InferResponse(
            config.name, self._version, self.request.id, outputs, timings, parameters
        )

    def count(self, response: ResponseCallback, *, final: bool) -> None:
        """Count a response before the caller gets it."""
        now_ns = time.monotonic_ns()
        failed = isinstance(response, EdgeServerError)
        if self._config.decoupled:
            self._statistics.responded(
                self._responses, now_ns - self._last_ns, empty=response is None, failed=failed
            )
            if self._responses == 0:
                self._statistics.first_responded(now_ns - self._began_ns)
            self._responses += 1
            self._last_ns = now_ns
        if self.request.replayed:
            return
        if failed:
            self._statistics.failed(FailureReason.OTHER, now_ns - self._began_ns)
        elif final:
            phases = Phases(0, now_ns - self._began_ns, 0)
            self._statistics.executed(max(1, self._batch_size), phases)
            self._statistics.succeeded(phases.infer, 0, phases)
