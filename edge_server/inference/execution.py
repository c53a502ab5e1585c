"""The executor: runs jobs on an instance, counts them and gives each its response."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import msgspec

from edge_server.backends.contract import ExecuteRequest, Phases, all_on_host
from edge_server.errors import (
    Cancelled,
    DeadlineExceeded,
    EdgeServerError,
    InternalError,
    Unavailable,
)
from edge_server.inference.job import in_shape
from edge_server.inference.statistics import FailureReason
from edge_server.requests import NO_PARAMETERS, InferResponse, StepTiming

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_server.backends.contract import Instance, RespondTensors, Tensors
    from edge_server.inference.job import Job
    from edge_server.inference.statistics import ModelStatistics
    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import Parameters, ResponseCallback

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

    def infer(self, instance: Instance, job: Job) -> InferResponse:
        """Run `job` of a model that is not decoupled, and return its response.

        Raises:
            EdgeServerError: the model responded with it, or failed.
        """
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
        """Return the execution of `job`: that of its last run, where it runs again."""
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
        """Run `requests` together; return why the run failed, and its phases."""
        try:
            phases = instance.execute(requests)
        except Exception as error:
            log.exception("model %s: an instance raised", self.config.name)
            failure = InternalError(f"model '{self.config.name}' failed: {error!r}")
            return failure, Phases(0, time.monotonic_ns() - began_ns, 0)
        return None, phases or Phases(0, time.monotonic_ns() - began_ns, 0)

    def _request(self, job: Job, respond: RespondTensors) -> ExecuteRequest:
        """Return `job` as its instance takes it, with the inputs in the model's own shapes."""
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
        """Return the response of an ended execution, which is traced and counted before."""
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
        """Return the caller's response for the model's outputs; a model may omit outputs.

        An error is returned: the model's own, or that of an output that cannot be used.
        """
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

    The response is kept until the run has ended, so that the statistics count it before the caller
    gets it.
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
        """Take no further response; return the one that came."""
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
