"""What a backend is: Backend → Model → Instance.

A backend that only knows tensors writes `run` and wraps it with `TensorInstance`; one that
answers requests in its own order (Python models, decoupled models) implements `Instance`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from edge_server.errors import EdgeServerError, InternalError
from edge_server.requests import NO_PARAMETERS, InferRequest, Parameters, Respond
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from pathlib import Path

    from edge_server.backends.server_context import ServerContext
    from edge_server.gpu.devices import Devices
    from edge_server.model_config.config import ModelConfig, Placement
    from edge_server.model_config.files import ModelFiles

Tensors = Mapping[str, Tensor]
Run = Callable[[Tensors, frozenset[str]], Tensors]
ProgressCallback = Callable[[str], None]
CopyDirection = Literal["to_host", "to_device"]


class Copied(Protocol):
    """Counts a tensor's copy between host and device."""

    def __call__(self, direction: CopyDirection, n_bytes: int) -> None: ...


def not_counted(direction: CopyDirection, n_bytes: int) -> None:
    """A `Copied` for what no model's statistics shall show."""


def no_progress(text: str) -> None:
    """A `ProgressCallback` for a load that nobody watches."""


def on_host(tensor: Tensor, copied: Copied) -> Tensor:
    """`tensor` as numpy's; copied, and the copy counted, where it is on a device.

    Raises:
        EdgeServerError: the device failed.
    """
    array = tensor.on_device
    if array is None:
        return tensor
    copied("to_host", array.nbytes)
    return Tensor(array.on_host())


class RespondTensors(Protocol):
    """How an instance answers one request."""

    def __call__(
        self,
        answer: Tensors | EdgeServerError | None,
        final: bool,
        parameters: Parameters = NO_PARAMETERS,
    ) -> None:
        """Give one answer; an error is always the last, None is the end without an answer."""
        ...


class ModelResolver(Protocol):
    """The models beside the one that runs, as its request sees them."""

    def submit(self, request: InferRequest, respond: Respond) -> None:
        """Ask another model; `respond` hears its answers, before or after this returns.

        Raises:
            EdgeServerError: the request cannot be taken; `respond` hears nothing.
        """
        ...

    def model_ready(self, name: str, version: str) -> bool:
        """Raises: InvalidRequest: `version` is not a version number."""
        ...


class ExecuteRequest(msgspec.Struct, frozen=True, eq=False):
    """One request as an instance sees it: checked inputs, and a way to answer.

    Attributes:
        inputs: full shapes, batch dimension included; with what the scheduler adds (sequence
            controls, state). Some may be on a device: see `host_inputs`.
        outputs: the names that are wanted.
        respond: called with the outputs or an error, and whether that was the last response.
        request: as the caller made it: id, parameters, sequence, deadline, cancellation.
        world: the other models, pinned for the life of this request.
        copied: to be told of each copy between host and device, but for those of `host_inputs`.
    """

    inputs: Tensors
    outputs: frozenset[str]
    respond: RespondTensors
    request: InferRequest
    world: ModelResolver
    copied: Copied = not_counted

    def host_inputs(self) -> Tensors:
        """The inputs, all on the host: for an instance that works there.

        Raises:
            EdgeServerError: a device failed.
        """
        inputs = self.inputs
        if not any(tensor.on_device for tensor in inputs.values()):
            return inputs
        return {name: on_host(tensor, self.copied) for name, tensor in inputs.items()}


class Phases(NamedTuple):
    """Where the time of one execution went, in ns."""

    input: int
    infer: int
    output: int


class Instance(Protocol):
    """Runs requests, one `execute` at a time."""

    def execute(self, requests: Sequence[ExecuteRequest]) -> Phases | None:
        """Answer each request through its own `respond`, the last time with `final=True`.

        Tensors of an answer may be on a device; who did not ask for such ones gets copies.

        Only a decoupled model may answer after this has returned; it then answers whatever
        happens, even if it ends.

        Args:
            requests: one, or as many as the model's batch holds, of equal shapes but for the
                batch dimension.

        Returns:
            Where the time went; None is all inference.
        """
        ...

    def close(self) -> None: ...


MetricKind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class ModelMetric:
    """One metric of a model's own, at one moment.

    Attributes:
        value: of a histogram, the sum of what it observed.
        buckets: of a histogram: upper bound → how many observations are not above it; the last
            bound is infinity.
    """

    name: str
    description: str
    kind: MetricKind
    labels: Mapping[str, str]
    value: float
    buckets: Mapping[float, int] = field(default_factory=dict)


class Model(Protocol):
    """One loaded version; it makes instances and is closed once, after the last of them."""

    def make_instance(self, name: str, placement: Placement) -> Instance:
        """One more of it, there.

        Raises:
            EdgeServerError: it cannot be made there; the text says why.
        """
        ...

    def not_ready_reason(self) -> str:
        """Why it cannot answer at this moment (a model process that restarts); empty where it
        can."""
        ...

    def metrics(self) -> Sequence[ModelMetric]:
        """What it measures of its own accord."""
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    """How one kind of model is completed and loaded. A module is a fine backend."""

    def complete(self, files: ModelFiles, version: int, config: ModelConfig) -> ModelConfig:
        """The configuration with what the model's own files say of its inputs and outputs.

        Raises:
            ModelConfigError: files and configuration disagree, or the file cannot be read.
        """
        ...

    def load(
        self,
        directory: Path,
        config: ModelConfig,
        devices: Devices,
        tell: ProgressCallback,
        server_context: ServerContext,
    ) -> Model:
        """The model in the version directory, ready to make instances where it is asked to.

        Args:
            tell: shows what a load that takes minutes is at, in one line: it is the model's reason
                on the index until the next text; empty is nothing more to tell. It may be called
                on any thread, and while instances are made; where no load of the model is under
                way, it has no effect. Whoever loads at once ignores it.
            surroundings: for a model that asks or loads others of its own accord.

        Raises:
            ModelConfigError: the model cannot be loaded; the text names the file and the remedy.
        """
        ...


class TensorInstance:
    """An `Instance` over a function from tensors to tensors.

    Several requests are joined along the batch dimension, run once, and split again.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def execute(self, requests: Sequence[ExecuteRequest]) -> Phases | None:
        if len(requests) > 1:
            return self._execute_batch(requests)
        (request,) = requests
        answer: Tensors | EdgeServerError
        try:
            answer = self._run(request.host_inputs(), request.outputs)
        except EdgeServerError as error:
            answer = error
        request.respond(answer, True)
        return None

    def _execute_batch(self, requests: Sequence[ExecuteRequest]) -> Phases:
        began = joined_at = time.monotonic_ns()
        wanted = frozenset().union(*(request.outputs for request in requests))
        try:
            inputs = [request.host_inputs() for request in requests]
            joined = {
                name: Tensor(np.concatenate([each[name].array for each in inputs]))
                for name in inputs[0]
            }
            joined_at = time.monotonic_ns()
            made = self._run(joined, wanted)
            ran_at = time.monotonic_ns()
            answers = _split(made, requests)
        except EdgeServerError as error:
            for request in requests:
                request.respond(error, True)
            return Phases(joined_at - began, time.monotonic_ns() - joined_at, 0)
        for request, answer in zip(requests, answers, strict=True):
            request.respond(answer, True)
        return Phases(joined_at - began, ran_at - joined_at, time.monotonic_ns() - ran_at)

    def close(self) -> None:
        """Nothing of its own to release."""


def _split(made: Tensors, requests: Sequence[ExecuteRequest]) -> list[Tensors]:
    """Each request's rows of what the batch made.

    Raises:
        InternalError: an output has another number of rows than the inputs had.
    """
    ends = np.cumsum([_rows(request) for request in requests]).tolist()
    for name, tensor in made.items():
        if not tensor.shape or tensor.shape[0] != ends[-1]:
            raise InternalError(
                f"output '{name}' has shape {list(tensor.shape)} for a batch of {ends[-1]}"
            )
    return [
        {name: Tensor(made[name].array[begin:end]) for name in request.outputs}
        for request, begin, end in zip(requests, [0, *ends], ends, strict=False)
    ]


def _rows(request: ExecuteRequest) -> int:
    return next(iter(request.inputs.values())).shape[0]


class TensorModel:
    """A `Model` whose instances share one function and hold nothing else."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def make_instance(self, name: str, placement: Placement) -> TensorInstance:
        del name, placement  # all of them are alike
        return TensorInstance(self._run)

    def not_ready_reason(self) -> str:
        return ""

    def metrics(self) -> Sequence[ModelMetric]:
        return ()

    def close(self) -> None:
        """Nothing to release."""
