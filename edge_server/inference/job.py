"""A job: one checked request on its way to an instance, and the forms of its tensors."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from edge_server.errors import (
    Cancelled,
    DeadlineExceeded,
    EdgeServerError,
    InternalError,
    Unavailable,
)
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.backends.contract import Tensors
    from edge_server.inference.snapshot import Snapshot
    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import InferRequest, Respond, ResponseCallback


def no_respond(response: ResponseCallback, final: bool) -> None:
    """The `respond` of a job whose response is returned; see `Executor.infer`."""


class Execution(Protocol):
    """What becomes of a job's run, and of those after it."""

    @property
    def failure(self) -> EdgeServerError | None:
        """The error that the model gave; None without one."""
        ...


class Job:
    """One checked request on its way to an instance.

    Attributes:
        inputs: the model's inputs; a scheduler may add its own tensors to the request's.
        outputs: names of the outputs wanted from the model; a scheduler may add its own.
        batch_size: 0 where the model does not batch.
        queued_at_ns: `time.monotonic_ns()`.
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
        """Whether the model wants another run."""
        return self._again and not self.over

    def queue_again(self, request: InferRequest) -> None:
        """Queue for another run, as `request`."""
        self._again = False
        self.request, self.turn_ns = request, time.monotonic_ns()

    def abandon(self) -> None:
        """End the job: it will not run again."""
        self.over, self.execution = True, None
        forget, self._forget = self._forget, None
        if forget is not None:
            forget()

    def death(self) -> EdgeServerError | None:
        """Return why the job need not run: it is over, its model failed between two runs, or see
        `gone`; None while it shall run."""
        if self.over:
            return Cancelled("")
        failure = None if self.execution is None else self.execution.failure
        return failure or self.gone()

    def gone(self) -> EdgeServerError | None:
        """Return the error of a cancelled or overdue request; None while its caller waits."""
        request = self.request
        if request.cancelled:
            return Cancelled("")
        if request.deadline is not None and time.monotonic() >= request.deadline:
            return DeadlineExceeded("the request's deadline passed before an instance was idle")
        return None


def batch_size_of(config: ModelConfig, request: InferRequest) -> int:
    """Return the number of rows of a checked request; 0 where the model does not batch."""
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
    """Return the error of a request to a scheduler that is closed (Triton's text)."""
    return Unavailable(
        f"{request.log_prefix}Server is stopping, scheduler for model has stopped accepting new "
        "inference requests"
    )
