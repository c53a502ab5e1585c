"""The executor: runs checked requests on an instance, counts and responds to them."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from edge_server.backends.contract import ExecuteRequest, Phases, on_host
from edge_server.errors import (
    Cancelled,
    DeadlineExceeded,
    EdgeServerError,
    InternalError,
    Unavailable,
)
from edge_server.inference.statistics import FailureReason
from edge_server.requests import NO_PARAMETERS, InferResponse, StepTiming
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_server.backends.contract import Instance, Tensors
    from edge_server.inference.job import Job
    from edge_server.inference.statistics import ModelStatistics
    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import Parameters, ResponseCallback, Trace

log = logging.getLogger(__name__)


class Executor:
    """Runs jobs of one model version on its instances.

    Every job gets its response, however the instance and the callers of the other jobs fail, and
    is counted in the statistics before its response.
    """

    def __init__(self, config: ModelConfig, version: int, statistics: ModelStatistics) -> None:
        self.config = config
        self.statistics = statistics
        self._version = str(version)
        self._output_names = tuple(spec.name for spec in config.outputs)
        self._model_shapes = config.reshapes
        self._client_shapes = {
            spec.name: spec.shape for spec in config.outputs if spec.name in config.reshapes
        }

    def run(self, instance: Instance, jobs: Sequence[Job]) -> None:
        """Run `jobs` as one batch; all but decoupled ones have their response on return."""
        # A decoupled request may get its last response, and so lose its lease, while the model is
        # still inside `execute`.
        kept = [job.snapshot.retain() for job in jobs] if self.config.decoupled else ()
        try:
            self._run(instance, jobs)
        finally:
            for lease in kept:
                if lease is not None:
                    lease.release()

    def _run(self, instance: Instance, jobs: Sequence[Job]) -> None:
        turns = [Execution(self, job) for job in jobs]
        began_ns = time.monotonic_ns()
        failure: EdgeServerError | None = None
        phases = None
        try:
            phases = instance.execute([turn.execute_request() for turn in turns])
        except Exception as error:
            log.exception("model %s: an instance raised", self.config.name)
            failure = InternalError(f"model '{self.config.name}' failed: {error!r}")
        if phases is None:
            phases = Phases(0, time.monotonic_ns() - began_ns, 0)
        if failure is None and not all(job.request.replayed for job in jobs):
            batch_size = max(1, sum(job.batch_size for job in jobs))
            self.statistics.executed(batch_size, phases, sum(job.padding for job in jobs))
        for turn in turns:
            turn.end(failure, phases)

    def refuse(self, job: Job, error: EdgeServerError) -> None:
        """Respond with `error` to a job that will not run or has failed, and count it."""
        if not job.request.replayed:
            self.statistics.failed(_reason(error), time.monotonic_ns() - job.queued_at_ns)
        self.respond(job, error, final=True)

    def respond(self, job: Job, answer: ResponseCallback, *, final: bool) -> None:
        """Pass a response to the caller; log what the callback raises, so other jobs go on."""
        try:
            job.respond(answer, final)
        except Exception:
            log.exception("model %s: a response could not be given", self.config.name)

    def inputs_for_model(self, job: Job) -> Tensors:
        """Return the job's inputs in the model's own shapes."""
        if not self._model_shapes:
            return job.inputs
        return {
            name: in_shape(tensor, self._model_shapes.get(name), job.batch_size)
            for name, tensor in job.inputs.items()
        }

    def response(
        self, job: Job, made: Tensors, parameters: Parameters, infer_ns: int
    ) -> InferResponse:
        """Build the caller's response from the model's outputs; a model may omit outputs.

        Raises:
            InternalError: an output does not fit its required shape.
            EdgeServerError: the device that holds an output failed.
        """
        names = job.request.outputs or self._output_names
        outputs = {name: made[name] for name in names if name in made}
        if not job.request.on_device:
            outputs = self.on_host(outputs)
        if shapes := self._client_shapes:
            outputs = {
                name: in_shape(tensor, shapes.get(name), job.batch_size)
                for name, tensor in outputs.items()
            }
        return InferResponse(
            self.config.name,
            self._version,
            job.request.id,
            outputs,
            (StepTiming(self.config.name, self.config.backend, infer_ns),),
            parameters,
        )

    def on_host(self, tensors: Tensors) -> dict[str, Tensor]:
        """Raises: EdgeServerError: the device that holds a tensor failed."""
        copied = self.statistics.copied
        return {name: on_host(tensor, copied) for name, tensor in tensors.items()}


class Execution:
    """One running job; its instance calls `respond`."""

    __slots__ = ("_began_ns", "_executor", "_held", "_job", "_last_ns", "_over", "_responses")

    def __init__(self, executor: Executor, job: Job) -> None:
        self._executor = executor
        self._job = job
        self._began_ns = self._last_ns = time.monotonic_ns()
        self._held: tuple[Tensors | EdgeServerError, Parameters] | None = None
        self._responses = 0
        self._over = False

    def execute_request(self) -> ExecuteRequest:
        job = self._job
        return ExecuteRequest(
            self._executor.inputs_for_model(job),
            job.outputs,
            self,
            job.request,
            job.snapshot,
            self._executor.statistics.copied,
        )

    def __call__(
        self,
        answer: Tensors | EdgeServerError | None,
        final: bool,
        parameters: Parameters = NO_PARAMETERS,
    ) -> None:
        if self._job.padding:
            return
        if self._over:
            log.warning("model %s: an answer after the last one", self._executor.config.name)
        elif self._executor.config.decoupled:
            self._stream(answer, final, parameters)
        elif answer is not None:
            # Sent at the end of the run, so that the statistics count it before the caller gets it.
            self._held = (answer, parameters)

    def end(self, failure: EdgeServerError | None, phases: Phases) -> None:
        """End the job once the instance has finished the batch."""
        if self._job.padding:
            return
        if self._executor.config.decoupled:
            if failure is not None and not self._over:
                self._over = True
                self._executor.refuse(self._job, failure)
            return
        if self._job.request.trace is not None:
            self._trace(self._job.request.trace, phases)
        self._over = True
        answer, parameters = self._held or (failure, NO_PARAMETERS)
        if answer is None:
            name = self._executor.config.name
            answer = InternalError(f"model '{name}' ended without an answer")
        self._answer(answer, parameters, phases, final=True)

    def _trace(self, trace: Trace, phases: Phases) -> None:
        # As in the statistics: phases that the instance did not measure count as inference.
        at_ns = self._began_ns
        trace.mark("COMPUTE_START", at_ns)
        trace.mark("COMPUTE_INPUT_END", at_ns := at_ns + phases.input)
        trace.mark("COMPUTE_OUTPUT_START", at_ns := at_ns + phases.infer)
        trace.mark("COMPUTE_END", at_ns + phases.output)

    def _stream(
        self, answer: Tensors | EdgeServerError | None, final: bool, parameters: Parameters
    ) -> None:
        now_ns = time.monotonic_ns()
        phases = Phases(0, now_ns - self._began_ns, 0)
        failed = isinstance(answer, EdgeServerError)
        self._over = final = final or failed
        if final and (trace := self._job.request.trace) is not None:
            trace.mark("COMPUTE_START", self._began_ns)
            trace.mark("COMPUTE_END", now_ns)
        self._executor.statistics.responded(
            self._responses, now_ns - self._last_ns, empty=answer is None, failed=failed
        )
        self._responses += 1
        self._last_ns = now_ns
        if answer is not None:
            self._answer(answer, parameters, phases, final=final)
        elif final:
            self._count_success(phases)
            self._executor.respond(self._job, None, final=True)

    def _answer(
        self,
        answer: Tensors | EdgeServerError,
        parameters: Parameters,
        phases: Phases,
        *,
        final: bool,
    ) -> None:
        executor, job = self._executor, self._job
        if not isinstance(answer, EdgeServerError):
            try:
                if job.made is not None:
                    answer = executor.on_host(answer)
                    job.made(answer)
                response = executor.response(job, answer, parameters, phases.infer)
            except EdgeServerError as error:
                answer = error
            except Exception as error:
                log.exception("model %s: an answer of no known form", executor.config.name)
                answer = InternalError(f"model '{executor.config.name}' failed: {error!r}")
        if isinstance(answer, EdgeServerError):
            self._over = True
            executor.refuse(job, answer)
            return
        if final:
            self._count_success(phases)
        executor.respond(job, response, final=final)

    def _count_success(self, phases: Phases) -> None:
        if self._job.request.replayed:
            return
        queued_at_ns = self._job.queued_at_ns
        self._executor.statistics.succeeded(
            time.monotonic_ns() - queued_at_ns, self._began_ns - queued_at_ns, phases
        )


def _reason(error: EdgeServerError) -> FailureReason:
    if isinstance(error, Cancelled):
        return FailureReason.CANCELED
    if isinstance(error, (Unavailable, DeadlineExceeded)):
        return FailureReason.REJECTED
    return FailureReason.BACKEND


def in_shape(tensor: Tensor, shape: tuple[int, ...] | None, batch_size: int) -> Tensor:
    """`tensor` reshaped to the same number of elements; one -1 in `shape` is inferred."""
    if shape is None:
        return tensor
    full = (batch_size, *shape) if batch_size else shape
    try:
        return Tensor(tensor.array.reshape(full))  # a DeviceArray has `reshape`, too
    except ValueError as error:
        raise InternalError(f"a tensor of shape {tensor.shape} is no {list(full)}") from error
