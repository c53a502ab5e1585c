"""A job is one checked request on its way to an instance; the executor runs jobs, counts them and
gives each its response.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from edge_server.backends.contract import ExecuteRequest, Phases, all_on_host
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

    from edge_server.backends.contract import Instance, RespondTensors, Tensors
    from edge_server.inference.registry import Snapshot
    from edge_server.inference.statistics import ModelStatistics
    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import InferRequest, Parameters, Respond, ResponseCallback

log = logging.getLogger(__name__)


def no_respond(response: ResponseCallback, final: bool) -> None:
    """The `respond` of a job whose response is returned; see `Executor.infer`."""


class Execution(Protocol):
    """A job's run, and those after it."""

    @property
    def failure(self) -> EdgeServerError | None:
        """The error that the model gave."""
        ...


class Job:
    """One checked request on its way to an instance.

    Attributes:
        inputs: of the model; a scheduler may add its own tensors to the request's.
        outputs: names of those wanted from the model; a scheduler may add its own.
        batch_size: 0 where the model does not batch.
        made: called with all outputs of the model before the caller gets its response; an
            `EdgeServerError` that it raises becomes the response.
        padding: the job only fills a row of a batch: it has no response and is not counted.
        iterative: the model may have the job run again.
        execution: the job's run; it goes on in the next run of an iterative job.
        turn_ns: when the job queued for its next run.
        over: the caller has the last response.
    """

    __slots__ = (
        "_again",
        "_forget",
        "batch_size",
        "execution",
        "inputs",
        "iterative",
        "made",
        "outputs",
        "over",
        "padding",
        "queued_at_ns",
        "request",
        "respond",
        "snapshot",
        "turn_ns",
    )

    def __init__(
        self,
        config: ModelConfig,
        request: InferRequest,
        snapshot: Snapshot,
        respond: Respond = no_respond,
    ) -> None:
        self.request = request
        self.snapshot = snapshot
        self.respond = respond
        self.inputs: Tensors = request.inputs
        self.outputs = frozenset(request.outputs) if request.outputs else config.output_names
        self.batch_size = batch_size_of(config, request) if config.max_batch_size else 0
        self.queued_at_ns = time.monotonic_ns()
        if request.trace is not None:
            request.trace.mark("QUEUE_START", self.queued_at_ns)
        self.made: Callable[[Tensors], None] | None = None
        self.padding = self.iterative = self.over = self._again = False
        self.turn_ns = self.queued_at_ns
        self.execution: Execution | None = None
        self._forget: Callable[[], None] | None = None

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
        """End the job: it will not run again."""
        self.over, self.execution = True, None
        forget, self._forget = self._forget, None
        if forget is not None:
            forget()

    def death(self) -> EdgeServerError | None:
        """Why the job need not run: it is over, its model failed between two runs, or see `gone`;
        None while it shall run."""
        if self.over:
            return Cancelled("")
        failure = None if self.execution is None else self.execution.failure
        return failure or self.gone()

    def gone(self) -> EdgeServerError | None:
        """The error of a cancelled or overdue request; None while its caller waits."""
        request = self.request
        if request.cancelled:
            return Cancelled("")
        if request.deadline is not None and time.monotonic() >= request.deadline:
            return DeadlineExceeded("the request's deadline passed before an instance was idle")
        return None


def batch_size_of(config: ModelConfig, request: InferRequest) -> int:
    """The number of rows of a checked request; 0 where the model does not batch."""
    batched = config.max_batch_size > 0 and request.inputs
    return next(iter(request.inputs.values())).shape[0] if batched else 0


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
    """`tensor` with a batch dimension of 1 added, or taken off, where `full_shape` has one
    dimension more or less; any other tensor as it is."""
    shape, rank = tensor.shape, len(full_shape)
    if len(shape) == rank - 1 and full_shape[0] == -1:
        return Tensor(tensor.array.reshape((1, *shape)))
    if len(shape) == rank + 1 and shape[0] == 1:
        return Tensor(tensor.array.reshape(shape[1:]))
    return tensor


def stopping(request: InferRequest) -> Unavailable:
    """The error of a request to a scheduler that is closed (Triton's text)."""
    return Unavailable(
        f"{request.log_prefix}Server is stopping, scheduler for model has stopped accepting new "
        "inference requests"
    )


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

    def infer(self, instance: Instance, job: Job) -> InferResponse:
        """Run `job` of a model that is not decoupled; return its response or raise its error."""
        began_ns = time.monotonic_ns()
        execution = _Execution(job, self.config.name, began_ns)
        failure, phases = self._execute(instance, [self._request(job, execution)], began_ns)
        if failure is None and not job.request.replayed:
            self.statistics.executed(job.batch_size or 1, phases)
        response = self._result(execution, failure, phases)
        if isinstance(response, EdgeServerError):
            raise response
        return response

    def run(self, instance: Instance, jobs: Sequence[Job]) -> None:
        """Run `jobs` as one batch; all but decoupled ones have their response on return."""
        if self.config.decoupled:
            self._run_decoupled(instance, jobs)
            return
        began_ns = time.monotonic_ns()
        executions = [self._begun(job, began_ns) for job in jobs]
        failure, phases = self._execute_batch(instance, jobs, executions, began_ns)
        for execution in executions:
            job = execution.job
            if not (job.padding or job.over or (failure is None and job.runs_again)):
                result = self._result(execution, failure, phases)
                self.respond(job, result, final=True)

    def _begun(self, job: Job, began_ns: int) -> _Execution:
        if not isinstance(job.execution, _Execution):
            job.execution = _Execution(job, self.config.name, began_ns)
        return job.execution

    def _run_decoupled(self, instance: Instance, jobs: Sequence[Job]) -> None:
        # A request may get its last response, and so lose its lease, while the model is still
        # inside `execute`.
        leases = [job.snapshot.retain() for job in jobs]
        try:
            began_ns = time.monotonic_ns()
            executions = [self._decoupled(job, began_ns) for job in jobs]
            failure, _ = self._execute_batch(instance, jobs, executions, began_ns)
            for execution in executions:
                execution.end(failure)
        finally:
            for lease in leases:
                if lease is not None:
                    lease.release()

    def _decoupled(self, job: Job, began_ns: int) -> _DecoupledExecution:
        if not isinstance(job.execution, _DecoupledExecution):
            job.execution = _DecoupledExecution(self, job, began_ns)
        return job.execution

    def _execute_batch(
        self,
        instance: Instance,
        jobs: Sequence[Job],
        responds: Sequence[RespondTensors],
        began_ns: int,
    ) -> tuple[InternalError | None, Phases]:
        """Run `jobs` as one batch and count the run; return why it failed, and its phases."""
        failure, phases = self._execute(
            instance,
            [self._request(job, respond) for job, respond in zip(jobs, responds, strict=True)],
            began_ns,
        )
        if failure is None and not all(job.request.replayed for job in jobs):
            batch_size = sum(job.batch_size for job in jobs)
            padding = sum(job.padding for job in jobs)
            self.statistics.executed(max(1, batch_size), phases, padding)
        return failure, phases

    def _execute(
        self, instance: Instance, requests: Sequence[ExecuteRequest], began_ns: int
    ) -> tuple[InternalError | None, Phases]:
        try:
            phases = instance.execute(requests)
        except Exception as error:
            log.exception("model %s: an instance raised", self.config.name)
            failure = InternalError(f"model '{self.config.name}' failed: {error!r}")
            return failure, Phases(0, time.monotonic_ns() - began_ns, 0)
        return None, phases or Phases(0, time.monotonic_ns() - began_ns, 0)

    def _request(self, job: Job, respond: RespondTensors) -> ExecuteRequest:
        """`job` as its instance takes it, with the inputs in the model's own shapes."""
        inputs = job.inputs
        if shapes := self._model_shapes:
            inputs = {
                name: in_shape(tensor, shapes.get(name), job.batch_size)
                for name, tensor in inputs.items()
            }
        return ExecuteRequest(
            inputs,
            job.outputs,
            respond,
            job.request,
            job.snapshot,
            self.statistics.copied,
            job.reschedule if job.iterative else None,
        )

    def _result(
        self, execution: _Execution, failure: InternalError | None, phases: Phases
    ) -> InferResponse | EdgeServerError:
        """Trace and count an ended execution, and return its response."""
        job = execution.job
        if (trace := job.request.trace) is not None:
            # As in the statistics: phases that the instance did not measure count as inference.
            at_ns = execution.began_ns
            trace.mark("COMPUTE_START", at_ns)
            trace.mark("COMPUTE_INPUT_END", at_ns := at_ns + phases.input)
            trace.mark("COMPUTE_OUTPUT_START", at_ns := at_ns + phases.infer)
            trace.mark("COMPUTE_END", at_ns + phases.output)
        made = execution.end()
        if made is None:
            made = failure or InternalError(f"model '{self.config.name}' ended without a response")
        response = self.response(job, made, execution.parameters, phases.infer)
        if isinstance(response, EdgeServerError):
            self.count_failure(job, response)
        else:
            self.count_success(job, execution.began_ns, phases)
        return response

    def refuse(self, job: Job, error: EdgeServerError) -> None:
        """Respond with `error` to a job that will not run or has failed, and count it; without
        effect where the job has its last response."""
        if job.over:
            return
        job.abandon()
        self.count_failure(job, error)
        self.respond(job, error, final=True)

    def respond(self, job: Job, response: ResponseCallback, *, final: bool) -> None:
        """Pass a response to the caller; log what the callback raises, so other jobs go on."""
        if final:
            # The execution has the job: a cycle would keep the request's tensors for the collector.
            job.over, job.execution = True, None
        try:
            job.respond(response, final)
        except Exception:
            log.exception("model %s: a response could not be given", self.config.name)

    def count_success(self, job: Job, began_ns: int, phases: Phases) -> None:
        if not job.request.replayed:
            total_ns = time.monotonic_ns() - job.queued_at_ns
            self.statistics.succeeded(total_ns, began_ns - job.queued_at_ns, phases)

    def count_failure(self, job: Job, error: EdgeServerError) -> None:
        if not job.request.replayed:
            self.statistics.failed(_reason(error), time.monotonic_ns() - job.queued_at_ns)

    def response(
        self, job: Job, made: Tensors | EdgeServerError, parameters: Parameters, infer_ns: int
    ) -> InferResponse | EdgeServerError:
        """The caller's response for the model's outputs, of which it may omit some; or the error:
        the model's own, or that of an output that cannot be used."""
        if isinstance(made, EdgeServerError):
            return made
        request = job.request
        try:
            if job.made is not None:
                made = all_on_host(made, self.statistics.copied)
                job.made(made)
            names = request.outputs or self._output_names
            outputs: Tensors = {name: made[name] for name in names if name in made}
            if not request.on_device:
                outputs = all_on_host(outputs, self.statistics.copied)
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


class _Execution(msgspec.Struct, eq=False):
    """One running job of a model that is not decoupled: its instance responds here, once.

    The response is kept until the run has ended and is counted.
    """

    job: Job
    model_name: str
    began_ns: int
    parameters: Parameters = NO_PARAMETERS
    _made: Tensors | EdgeServerError | None = None
    _over: bool = False

    def __call__(
        self,
        made: Tensors | EdgeServerError | None,
        final: bool,  # noqa: ARG002 - there is one response
        parameters: Parameters = NO_PARAMETERS,
    ) -> None:
        if self._over:
            if not self.job.padding:
                log.warning("model %s: a response after the last one", self.model_name)
        elif made is not None:
            self._made, self.parameters = made, parameters

    @property
    def failure(self) -> EdgeServerError | None:
        return self._made if isinstance(self._made, EdgeServerError) else None

    def end(self) -> Tensors | EdgeServerError | None:
        self._over = True
        return self._made


class _DecoupledExecution:
    """One running job of a decoupled model: each response goes to the caller at once."""

    __slots__ = ("_began_ns", "_executor", "_job", "_last_ns", "_over", "_responses")

    def __init__(self, executor: Executor, job: Job, began_ns: int) -> None:
        self._executor = executor
        self._job = job
        self._began_ns = self._last_ns = began_ns
        self._responses = 0
        self._over = False

    def __call__(
        self,
        made: Tensors | EdgeServerError | None,
        final: bool,
        parameters: Parameters = NO_PARAMETERS,
    ) -> None:
        executor, job = self._executor, self._job
        if job.padding:
            return
        if self._over:
            log.warning("model %s: a response after the last one", executor.config.name)
            return
        now_ns = time.monotonic_ns()
        phases = Phases(0, now_ns - self._began_ns, 0)
        failed = isinstance(made, EdgeServerError)
        self._over = final = final or failed
        if final and (trace := job.request.trace) is not None:
            trace.mark("COMPUTE_START", self._began_ns)
            trace.mark("COMPUTE_END", now_ns)
        executor.statistics.responded(
            self._responses, now_ns - self._last_ns, empty=made is None, failed=failed
        )
        if self._responses == 0:
            executor.statistics.first_responded(now_ns - job.queued_at_ns)
        self._responses += 1
        self._last_ns = now_ns
        if made is None and not final:
            return
        response: ResponseCallback = None
        if made is not None:
            response = executor.response(job, made, parameters, phases.infer)
        if isinstance(response, EdgeServerError):
            self._over = True
            executor.refuse(job, response)
            return
        if final:
            executor.count_success(job, self._began_ns, phases)
        executor.respond(job, response, final=final)

    @property
    def failure(self) -> None:
        """None: an error goes to the caller at once."""
        return

    def end(self, failure: InternalError | None) -> None:
        """End the job where its instance has failed; otherwise further responses may come."""
        if failure is not None and not self._over and not self._job.padding:
            self._over = True
            self._executor.refuse(self._job, failure)


def _reason(error: EdgeServerError) -> FailureReason:
    if isinstance(error, Cancelled):
        return FailureReason.CANCELED
    if isinstance(error, (Unavailable, DeadlineExceeded)):
        return FailureReason.REJECTED
    return FailureReason.BACKEND
