"""A job is one checked request on its way to an instance; the executor runs jobs, counts them and
gives each its response.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from edge_server.backends.contract import ExecuteRequest, Phases, all_on_host, on_host
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
    from collections.abc import Callable, Sequence

    from edge_server.backends.contract import Instance, Tensors
    from edge_server.inference.registry import Snapshot
    from edge_server.inference.statistics import ModelStatistics
    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import InferRequest, Parameters, Respond, ResponseCallback

log = logging.getLogger(__name__)


def no_respond(response: ResponseCallback, final: bool) -> None:
    """The `respond` of a job whose response is returned; see `Executor.infer`."""


class Job(msgspec.Struct, eq=False):
    """One checked request on its way to an instance, which responds by calling the job;
    `Executor.job` makes it. The response of a model that is not decoupled is kept until the run is
    counted; each of a decoupled model goes to the caller at once.

    Attributes:
        inputs, outputs: of the model; a scheduler may add its own to the request's.
        batch_size: 0 where the model does not batch.
        on_outputs: called with all outputs before the caller gets its response; its error replaces
            it.
        padding: the job only fills a row of a batch: it has no response and is not counted.
        iterative: the model may have the job run again, `turn_ns` after it queued for that.
        began_ns: when its first run began; 0 before.
        responses, last_ns: the number of a decoupled model's responses, and when the last one came.
        ended, over: the model may not respond any more; the caller has the last response."""

    executor: Executor
    request: InferRequest
    snapshot: Snapshot
    respond: Respond
    inputs: Tensors
    outputs: frozenset[str]
    batch_size: int
    queued_at_ns: int
    turn_ns: int
    on_outputs: Callable[[Tensors], None] | None = None
    padding: bool = False
    iterative: bool = False
    over: bool = False
    ended: bool = False
    began_ns: int = 0
    last_ns: int = 0
    responses: int = 0
    made: Tensors | EdgeServerError | None = None
    parameters: Parameters = NO_PARAMETERS
    _again: bool = False
    _forget: Callable[[], None] | None = None

    def __call__(
        self,
        made: Tensors | EdgeServerError | None,
        final: bool,
        parameters: Parameters = NO_PARAMETERS,
    ) -> None:
        if self.ended:
            if not self.padding:
                log.warning("model %s: a response after the last one", self.executor.config.name)
        elif self.executor.config.decoupled:
            self.executor.pass_on(self, made, parameters, final=final)
        elif made is not None:
            self.made, self.parameters = made, parameters

    def reschedule(self, forget: Callable[[], None]) -> None:
        """Have the job run again; `forget` is called where it will not."""
        self._again, self._forget = True, forget

    @property
    def runs_again(self) -> bool:
        return self._again and not self.over

    def queue_again(self, request: InferRequest) -> None:
        self._again = False
        self.request, self.turn_ns = request, time.monotonic_ns()

    def abandon(self) -> None:
        self.over, self.made = True, None
        forget, self._forget = self._forget, None
        if forget is not None:
            forget()

    def death(self) -> EdgeServerError | None:
        """Why the job need not run: it is over, failed between two runs, or is `gone`."""
        if self.over:
            return Cancelled("")
        return self.made if isinstance(self.made, EdgeServerError) else self.gone()

    def gone(self) -> EdgeServerError | None:
        """The error of a cancelled or overdue request; None while its caller waits."""
        request = self.request
        if request.cancelled:
            return Cancelled("")
        if request.deadline is not None and time.monotonic() >= request.deadline:
            return DeadlineExceeded("the request's deadline passed before an instance was idle")
        return None


def in_shape(tensor: Tensor, shape: tuple[int, ...] | None, batch_size: int) -> Tensor:
    """`tensor` reshaped to the same number of elements; one -1 in `shape` is inferred."""
    if shape is None:
        return tensor
    full = (batch_size, *shape) if batch_size else shape
    try:
        return Tensor(tensor.array.reshape(full))  # a DeviceArray has `reshape`, too
    except ValueError as error:
        raise InternalError(f"a tensor of shape {tensor.shape} is no {list(full)}") from error


def in_rank(tensor: Tensor, full_shape: tuple[int, ...]) -> Tensor:
    """`tensor` with a batch dimension of 1 added, or taken off, where that gives it the rank of
    `full_shape`.
    """
    shape, rank = tensor.shape, len(full_shape)
    if len(shape) == rank - 1 and full_shape[0] == -1:
        return Tensor(tensor.array.reshape((1, *shape)))
    if len(shape) == rank + 1 and shape[0] == 1:
        return Tensor(tensor.array.reshape(shape[1:]))
    return tensor


def stopping(request: InferRequest) -> Unavailable:
    return Unavailable(
        f"{request.log_prefix}Server is stopping, scheduler for model has stopped accepting new "
        "inference requests"
    )


class Executor:
    """Runs jobs of one model version on its instances. Every job gets its response, however the
    instance and the callers of the other jobs fail, and is counted before its response."""

    def __init__(self, config: ModelConfig, version: int, statistics: ModelStatistics) -> None:
        self.config = config
        self.statistics = statistics
        self._version = str(version)
        self._output_names = tuple(spec.name for spec in config.outputs)
        self._model_shapes = config.reshapes
        self._client_shapes = {
            spec.name: spec.shape for spec in config.outputs if spec.name in config.reshapes
        }

    def job(self, request: InferRequest, snapshot: Snapshot, respond: Respond = no_respond) -> Job:
        config = self.config
        inputs, batch_size = request.inputs, 0
        outputs = frozenset(request.outputs) if request.outputs else config.output_names
        if config.max_batch_size and inputs:
            batch_size = next(iter(inputs.values())).array.shape[0]
        now_ns = time.monotonic_ns()
        if request.trace is not None:
            request.trace.mark("QUEUE_START", now_ns)
        return Job(self, request, snapshot, respond, inputs, outputs, batch_size, now_ns, now_ns)

    def infer(self, instance: Instance, job: Job) -> InferResponse:
        """Run `job` of a model that is not decoupled; return its response or raise its error."""
        failure, phases = self._execute(instance, (job,))
        response = self._result(job, failure, phases, 0 if failure else job.batch_size or 1)
        if isinstance(response, EdgeServerError):
            raise response
        return response

    def run(self, instance: Instance, jobs: Sequence[Job]) -> None:
        """Run `jobs` as one batch; all but decoupled ones have their response on return."""
        # A decoupled request may get its last response, and so lose its lease, while the model is
        # still inside `execute`.
        decoupled = self.config.decoupled
        leases = [job.snapshot.retain() for job in jobs] if decoupled else ()
        try:
            failure, phases = self._execute(instance, jobs)
            if failure is None and not all(job.request.replayed for job in jobs):
                batch_size = max(1, sum(job.batch_size for job in jobs))
                self.statistics.executed(batch_size, phases, sum(job.padding for job in jobs))
            for job in jobs:
                if job.padding or job.over:
                    continue
                if not decoupled and (failure is not None or not job.runs_again):
                    self.respond(job, self._result(job, failure, phases), final=True)
                elif decoupled and failure is not None:
                    job.ended = True
                    self.refuse(job, failure)
        finally:
            for lease in leases:
                if lease is not None:
                    lease.release()

    def _execute(
        self, instance: Instance, jobs: Sequence[Job]
    ) -> tuple[InternalError | None, Phases]:
        """Run `jobs` together; return why the run failed, and its phases."""
        began_ns = time.monotonic_ns()
        for job in jobs:
            if not job.began_ns:
                job.began_ns = job.last_ns = began_ns
        try:
            requests = [
                ExecuteRequest(
                    self._shaped(job) if self._model_shapes else job.inputs,
                    job.outputs,
                    job,
                    job.request,
                    job.snapshot,
                    self.statistics.copied,
                    job.reschedule if job.iterative else None,
                )
                for job in jobs
            ]
            phases = instance.execute(requests)
        except Exception as error:
            log.exception("model %s: an instance raised", self.config.name)
            failure = InternalError(f"model '{self.config.name}' failed: {error!r}")
            return failure, Phases(0, time.monotonic_ns() - began_ns, 0)
        return None, phases or Phases(0, time.monotonic_ns() - began_ns, 0)

    def _shaped(self, job: Job) -> Tensors:
        shapes = self._model_shapes
        return {
            name: in_shape(tensor, shapes.get(name), job.batch_size)
            for name, tensor in job.inputs.items()
        }

    def _result(
        self, job: Job, failure: InternalError | None, phases: Phases, alone: int = 0
    ) -> InferResponse | EdgeServerError:
        """Trace and count an ended job, and return its response; `alone` is the batch size of a run
        that was the job's alone and is still to be counted.
        """
        if (trace := job.request.trace) is not None:
            # As in the statistics: phases that the instance did not measure count as inference.
            at_ns = job.began_ns
            trace.mark("COMPUTE_START", at_ns)
            trace.mark("COMPUTE_INPUT_END", at_ns := at_ns + phases.input)
            trace.mark("COMPUTE_OUTPUT_START", at_ns := at_ns + phases.infer)
            trace.mark("COMPUTE_END", at_ns + phases.output)
        job.ended = True
        made = job.made
        if made is None:
            made = failure or InternalError(f"model '{self.config.name}' ended without a response")
        response = self._response(job, made, job.parameters, phases.infer)
        if isinstance(response, EdgeServerError):
            if alone and not job.request.replayed:
                self.statistics.executed(alone, phases)
            self.count_failure(job, response)
        elif not job.request.replayed:
            total_ns = time.monotonic_ns() - job.queued_at_ns
            queue_ns = job.began_ns - job.queued_at_ns
            self.statistics.succeeded(total_ns, queue_ns, phases, alone)
        return response

    def pass_on(
        self,
        job: Job,
        made: Tensors | EdgeServerError | None,
        parameters: Parameters,
        *,
        final: bool,
    ) -> None:
        if job.padding:
            return
        now_ns = time.monotonic_ns()
        phases = Phases(0, now_ns - job.began_ns, 0)
        failed = isinstance(made, EdgeServerError)
        job.ended = final = final or failed
        if final and (trace := job.request.trace) is not None:
            trace.mark("COMPUTE_START", job.began_ns)
            trace.mark("COMPUTE_END", now_ns)
        self.statistics.responded(
            job.responses, now_ns - job.last_ns, empty=made is None, failed=failed
        )
        if job.responses == 0:
            self.statistics.first_responded(now_ns - job.queued_at_ns)
        job.responses += 1
        job.last_ns = now_ns
        if made is None and not final:
            return
        response: ResponseCallback = None
        if made is not None:
            response = self._response(job, made, parameters, phases.infer)
        if isinstance(response, EdgeServerError):
            job.ended = True
            self.refuse(job, response)
            return
        if final and not job.request.replayed:
            total_ns = time.monotonic_ns() - job.queued_at_ns
            self.statistics.succeeded(total_ns, job.began_ns - job.queued_at_ns, phases)
        self.respond(job, response, final=final)

    def refuse(self, job: Job, error: EdgeServerError) -> None:
        """Respond with `error` to a job that will not run or has failed, unless it has its last
        response.
        """
        if job.over:
            return
        job.abandon()
        self.count_failure(job, error)
        self.respond(job, error, final=True)

    def respond(self, job: Job, response: ResponseCallback, *, final: bool) -> None:
        """Pass a response to the caller; log what the callback raises, so other jobs go on."""
        if final:
            job.over, job.made = True, None
        try:
            job.respond(response, final)
        except Exception:
            log.exception("model %s: a response could not be given", self.config.name)

    def count_failure(self, job: Job, error: EdgeServerError) -> None:
        if not job.request.replayed:
            self.statistics.failed(_reason(error), time.monotonic_ns() - job.queued_at_ns)

    def _response(
        self, job: Job, made: Tensors | EdgeServerError, parameters: Parameters, infer_ns: int
    ) -> InferResponse | EdgeServerError:
        """The caller's response for the model's outputs, of which it may omit some; or the
        error."""
        if isinstance(made, EdgeServerError):
            return made
        request = job.request
        try:
            if job.on_outputs is not None:
                made = all_on_host(made, self.statistics.copied)
                job.on_outputs(made)
            names = request.outputs or self._output_names
            outputs: dict[str, Tensor] = {}
            for name in names:
                if name in made:
                    tensor = made[name]
                    if not (request.on_device or isinstance(tensor.array, np.ndarray)):
                        tensor = on_host(tensor, self.statistics.copied)
                    outputs[name] = tensor
            if shapes := self._client_shapes:
                outputs = {
                    name: in_shape(tensor, shapes.get(name), job.batch_size)
                    for name, tensor in outputs.items()
                }
        except EdgeServerError as error:
            return error
        except Exception as error:
            log.exception("model %s: a response of no known form", self.config.name)
            return InternalError(f"model '{self.config.name}' failed: {error!r}")
        config = self.config
        timing = StepTiming(config.name, config.backend, infer_ns)
        return InferResponse(config.name, self._version, request.id, outputs, (timing,), parameters)


def _reason(error: EdgeServerError) -> FailureReason:
    if isinstance(error, Cancelled):
        return FailureReason.CANCELED
    if isinstance(error, (Unavailable, DeadlineExceeded)):
        return FailureReason.REJECTED
    return FailureReason.BACKEND
