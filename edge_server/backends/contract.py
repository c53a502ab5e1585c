"""The backend interface: Backend → Model → Instance.

A backend that only computes tensors writes `run` and wraps it in `TensorInstance`; a backend that
responds in its own order (Python models, decoupled models) implements `Instance`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np

from edge_server.errors import (
    EdgeServerError,
    InternalError,
    ModelConfigError,
    NotFound,
    Unavailable,
)
from edge_server.model_config.interface import ALLOW_INTERFACE_CHANGE
from edge_server.model_config.ragged import BatchInputKind
from edge_server.requests import NO_PARAMETERS, InferRequest, Parameters
from edge_server.settings.mistakes import value_mistake
from edge_server.tensors import Tensor, element_count, shape_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from edge_server.gpu.device import Devices
    from edge_server.model_config.config import ModelConfig, Placement
    from edge_server.model_config.files import ModelFiles
    from edge_server.model_config.ragged import BatchInput, RaggedBatching
    from edge_server.requests import InferRequest, Respond

Tensors = Mapping[str, Tensor]
Run = Callable[[Tensors, frozenset[str]], Tensors]
ProgressCallback = Callable[[str], None]
CopyDirection = Literal["to_host", "to_device"]


class Copied(Protocol):
    """Counts the bytes of one copy of a tensor between host and device."""

    def __call__(self, direction: CopyDirection, n_bytes: int) -> None: ...


def not_counted(direction: CopyDirection, n_bytes: int) -> None:
    """Discard the count: a `Copied` for copies that belong to no model's statistics."""


def no_progress(text: str) -> None:
    """Discard the text: a `ProgressCallback` for a load whose progress is not shown."""


def all_on_host(tensors: Tensors, copied: Copied) -> Tensors:
    """Return `tensors` on the host; see `on_host`."""
    for tensor in tensors.values():
        if not isinstance(tensor.array, np.ndarray):
            return {name: on_host(tensor, copied) for name, tensor in tensors.items()}
    return tensors


def on_host(tensor: Tensor, copied: Copied) -> Tensor:
    """Return `tensor` on the host; a tensor on a device is copied and the copy counted.

    Raises:
        EdgeServerError: the device failed.
    """
    array = tensor.on_device
    if array is None:
        return tensor
    copied("to_host", array.nbytes)
    return Tensor(array.on_host())


class RespondTensors(Protocol):
    """Sends the responses of one request."""

    def __call__(
        self,
        made: Tensors | EdgeServerError | None,
        /,
        final: bool,
        parameters: Parameters = NO_PARAMETERS,
    ) -> None:
        """Send one response: the tensors that the model has made, or an error, which is always the
        last; None with `final` ends the request without a further response."""
        ...


class ExecuteRequest(msgspec.Struct, frozen=True, eq=False):
    """One validated request as an instance receives it.

    Attributes:
        inputs: tensors in their full shapes, batch dimension included, with those that the
            scheduler adds (sequence controls, state). Some may be on a device: see `host_inputs`.
        outputs: names of the requested outputs.
        respond: called with the outputs or an error, and whether that was the last response.
        request: the caller's request: id, parameters, sequence, deadline, cancellation.
        models: the other models, pinned for the life of this request.
        copied: called for each copy between host and device, except those made by `host_inputs`.
        reschedule: to be called during `execute` where the request shall run again, with what is
            to be called where it will not; its `respond` stays the same in every run. None where
            the scheduler runs each request once.
    """

    inputs: Tensors
    outputs: frozenset[str]
    respond: RespondTensors
    request: InferRequest
    models: ModelResolver
    copied: Copied = not_counted
    reschedule: Callable[[Callable[[], None]], None] | None = None

    def host_inputs(self) -> Tensors:
        """Return all inputs on the host, for an instance that computes there.

        Raises:
            EdgeServerError: a device failed.
        """
        return all_on_host(self.inputs, self.copied)


class Phases(NamedTuple):
    """The duration of each phase of one execution, in ns."""

    input: int
    infer: int
    output: int


class Instance(Protocol):
    """Executes requests, one `execute` at a time."""

    def execute(self, requests: Sequence[ExecuteRequest]) -> Phases | None:
        """Respond to each request through its own `respond`, the last time with `final=True`.

        Response tensors may be on a device; a caller that cannot take device tensors gets host
        copies.

        Only a decoupled model may respond after this has returned; the model then sends its final
        response in every case, even when the model ends.

        Args:
            requests: one request, or up to the model's maximum batch, of equal shapes except for
                the batch dimension.

        Returns:
            The duration of each phase; None counts the whole execution as inference.
        """
        ...

    def close(self) -> None: ...


MetricKind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class ModelMetric:
    """One sample of a metric that the model itself defines.

    Attributes:
        value: for a histogram, the sum of the observed values.
        buckets: for a histogram: upper bound → number of observations not above that bound; the
            last bound is infinity.
    """

    name: str
    description: str
    kind: MetricKind
    labels: Mapping[str, str]
    value: float
    buckets: Mapping[float, int] = field(default_factory=dict)


class Model(Protocol):
    """One loaded version. A model makes instances and is closed once, after its last instance."""

    def make_instance(self, name: str, placement: Placement) -> Instance:
        """Return a new instance on `placement`.

        Raises:
            EdgeServerError: the instance cannot be made there; the text gives the reason.
        """
        ...

    def not_ready_reason(self) -> str:
        """Return why the model cannot respond at this moment (e.g. its process restarts); empty
        when the model is ready."""
        ...

    def metrics(self) -> Sequence[ModelMetric]:
        """Return the metrics that the model itself defines."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Interruptible(Protocol):
    """A model whose runs another thread can end; few backends can do that."""

    def interrupt(self, before: float) -> None:
        """End the runs that began before `before` (`time.monotonic()`); infinity ends those to
        come, too. Their requests get an error soon after."""
        ...


def interrupt(model: Model | None, before: float = inf) -> bool:
    """See `Interruptible.interrupt`; False where the runs of `model` cannot be ended."""
    if not isinstance(model, Interruptible):
        return False
    model.interrupt(before)
    return True


@dataclass(frozen=True)
class LoadContext:
    """One version of a model to load, and what of the daemon its backend may use.

    Attributes:
        directory: the version directory.
        config: the model's complete configuration.
        devices: the GPUs that instances may use.
        progress: reports the progress of a load that takes minutes, as one line: the text is the
            model's reason in the repository index until the next call; an empty text clears the
            reason. The backend may call it on any thread, and while instances are made; a call
            outside a load of the model has no effect. A backend that loads at once ignores it.
        server: for a model that sends requests to other models or loads them.
    """

    directory: Path
    config: ModelConfig
    devices: Devices
    progress: ProgressCallback
    server: ServerContext


class Backend(Protocol):
    """Completes and loads the models of one kind. A module can be a backend."""

    def complete(self, files: ModelFiles, version: int, config: ModelConfig) -> ModelConfig:
        """Return the configuration completed with the inputs and outputs that the model's files
        declare.

        Raises:
            ModelConfigError: files and configuration disagree, or a file cannot be read.
        """
        ...

    def load(self, context: LoadContext) -> Model:
        """Load the version that `context` describes, ready to make instances on demand.

        Raises:
            ModelConfigError: the model cannot be loaded; the text names the file and the remedy.
        """
        ...


def run_joined(
    run: Run,
    requests: Sequence[ExecuteRequest],
    join: Callable[[Sequence[Tensors]], Tensors],
    split: Callable[[Tensors, Sequence[Tensors]], Sequence[Tensors]],
) -> Phases:
    """Run `requests` as one, and respond to each; an error goes to all of them.

    Args:
        run: the function from tensors to tensors.
        requests: of one model.
        join: returns the inputs of the run, from the inputs of each request.
        split: returns each request's outputs, from those of the run and the inputs of each request.
    """
    began = joined_at = time.monotonic_ns()
    wanted = frozenset().union(*(request.outputs for request in requests))
    try:
        inputs = [request.host_inputs() for request in requests]
        joined = join(inputs)
        joined_at = time.monotonic_ns()
        made = run(joined, wanted)
        ran_at = time.monotonic_ns()
        parts = split(made, inputs)
    except EdgeServerError as error:
        for request in requests:
            request.respond(error, True)
        return Phases(joined_at - began, time.monotonic_ns() - joined_at, 0)
    for request, part in zip(requests, parts, strict=True):
        request.respond(part, True)
    return Phases(joined_at - began, ran_at - joined_at, time.monotonic_ns() - ran_at)


class TensorInstance:
    """An `Instance` over a function from tensors to tensors.

    Several requests are joined along the batch dimension, executed once, and split again.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def execute(self, requests: Sequence[ExecuteRequest]) -> Phases | None:
        if len(requests) > 1:
            return run_joined(self._run, requests, _join, lambda made, _: _split(made, requests))
        (request,) = requests
        made: Tensors | EdgeServerError
        try:
            made = self._run(request.host_inputs(), request.outputs)
        except EdgeServerError as error:
            made = error
        request.respond(made, True)
        return None

    def close(self) -> None:
        """Do nothing: the instance owns no resources."""


def _join(inputs: Sequence[Tensors]) -> Tensors:
    return {
        name: Tensor(np.concatenate([each[name].array for each in inputs])) for name in inputs[0]
    }


def _split(made: Tensors, requests: Sequence[ExecuteRequest]) -> list[Tensors]:
    """Return each request's rows of the batch's outputs.

    Raises:
        InternalError: an output has a different number of rows than the inputs.
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
    """A `Model` whose instances share one function and own no resources."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def make_instance(self, name: str, placement: Placement) -> Instance:
        del name, placement  # all instances are alike
        return TensorInstance(self._run)

    def not_ready_reason(self) -> str:
        return ""

    def metrics(self) -> Sequence[ModelMetric]:
        return ()

    def close(self) -> None:
        """Do nothing: the model owns no resources."""


class ModelResolver(Protocol):
    """The other loaded models, as one request may use them."""

    def submit(self, request: InferRequest, respond: Respond) -> None:
        """Submit a request to another model; `respond` is called before or after this returns.

        Raises:
            EdgeServerError: the request is refused; `respond` is not called.
        """
        ...

    def model_ready(self, name: str, version: str) -> bool:
        """Return whether that version of the model is ready.

        Raises:
            InvalidRequest: `version` is not a version number.
        """
        ...


class ServerContext(Protocol):
    """The other models, including those that a request does not pin, and the means to load them."""

    @property
    def models(self) -> ModelResolver:
        """The models as they are at the moment of each call."""
        ...

    def load(
        self, name: str, *, config: str | None, files: Mapping[str, bytes], within: str
    ) -> None:
        """Load or reload model `name`; return when the load is complete.

        Args:
            name: the model to load.
            config: a ModelConfig in protobuf's JSON form, instead of the one on disk.
            files: `file:<version>/<name>` → content, instead of the model's directory.
            within: the calling model, which may itself be loading.

        Raises:
            EdgeServerError: the load failed; the text is Triton's where Triton has one.
        """
        ...

    def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Stop new requests to model `name`; return at once.

        Args:
            name: the model to unload.
            unload_dependents: also unload the models that `name` depends on.

        Raises:
            EdgeServerError: the control mode does not allow unloading.
        """
        ...


class Alone:
    """A ServerContext with no other models, in which no model can be loaded."""

    @property
    def models(self) -> Alone:
        return self

    def submit(self, request: InferRequest, respond: Respond) -> None:
        del respond
        raise NotFound(f"Request for unknown model: '{request.model_name}' is not found")

    def model_ready(self, name: str, version: str) -> bool:
        del name, version
        return False

    def load(
        self, name: str, *, config: str | None, files: Mapping[str, bytes], within: str
    ) -> None:
        del config, files, within
        raise Unavailable(f"model '{name}': there is no server here that could load it")

    def unload(self, name: str, *, unload_dependents: bool) -> None:
        del unload_dependents
        raise Unavailable(f"model '{name}': there is no server here that could unload it")


STANDALONE = Alone()

# Valid for every model, whatever its backend: the limit on the median latency of the model's golden
# requests; a slower version is not published.
GOLDEN_MAX_LATENCY_MS = "golden_max_latency_ms"

OF_EVERY_MODEL = frozenset({GOLDEN_MAX_LATENCY_MS, ALLOW_INTERFACE_CHANGE})


class BackendParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The names, types and defaults of a backend's parameters."""


P = TypeVar("P", bound=BackendParameters)


def check_parameters(files: ModelFiles, config: ModelConfig, kind: type[BackendParameters]) -> None:
    """Check the configuration's parameters against `kind`, so that `read_parameters` succeeds.

    Raises:
        ModelConfigError: a parameter is unknown, or its value does not fit its type; the text names
            the file.
    """
    try:
        read_parameters(config, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_encode_fields__) or "none"
        mistake = value_mistake(str(error), config.parameters)
        raise ModelConfigError(
            f"{files.config_path}: parameters: {mistake}; backend '{config.backend}' knows: {known}"
        ) from error


def ours(config: ModelConfig, kind: type[BackendParameters]) -> ModelConfig:
    """Return the configuration without the parameters of others, which `kind` does not know: other
    backends, the plan builder, clients."""
    known = kind.__struct_encode_fields__
    return replace(config, parameters={k: v for k, v in config.parameters.items() if k in known})


def read_parameters(config: ModelConfig, kind: type[P]) -> P:
    """Return the configuration's parameters as `kind`; `check_parameters` has validated them."""
    own = {k: v for k, v in config.parameters.items() if k not in OF_EVERY_MODEL}
    return msgspec.convert(own, kind, strict=False)


def own_parameters(config: ModelConfig, kind: type[P]) -> P:
    """Return the parameters that `kind` knows; all others belong to somebody else."""
    return read_parameters(ours(config, kind), kind)


class RaggedInstance:
    """An `Instance` over a function from tensors to tensors.

    A ragged input is one list of the elements of all requests, in order; other inputs are joined
    along the batch dimension. A batch of one request is made in the same way. Batch inputs are made
    from the requests' shapes. Of a batch output each request gets as many elements as the shape of
    its source input says, of other outputs its rows.

    Args:
        config: of a model with ragged batching.
    """

    def __init__(self, run: Run, config: ModelConfig, ragged: RaggedBatching) -> None:
        self._run = run
        self._batches = config.max_batch_size > 0
        self._ragged = ragged
        shapes = {spec.name: config.model_shape(spec) for spec in config.outputs}
        batch = (-1,) if self._batches else ()
        # Batch output → the shape of a request's part, and the input that its free sizes are of.
        self._scattered = {
            name: ((*batch, *shapes[name]), output.source)
            for output in ragged.batch_outputs
            for name in output.names
        }

    def execute(self, requests: Sequence[ExecuteRequest]) -> Phases:
        def split(made: Tensors, inputs: Sequence[Tensors]) -> list[Tensors]:
            return [
                {name: part[name] for name in request.outputs if name in part}
                for request, part in zip(requests, self._parts(made, inputs), strict=True)
            ]

        return run_joined(self._run, requests, self._joined, split)

    def close(self) -> None:
        """Do nothing: the instance owns no resources."""

    def _joined(self, inputs: Sequence[Tensors]) -> dict[str, Tensor]:
        joined: dict[str, Tensor] = {}
        for name in inputs[0]:
            arrays = [each[name].array for each in inputs]
            if name in self._ragged.inputs:
                arrays = [array.reshape(-1) for array in arrays]
            joined[name] = Tensor(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
        for each in self._ragged.batch_inputs:
            shapes = [tensors[each.source].shape for tensors in inputs if each.source in tensors]
            tensor = Tensor(_batch_input(each, shapes))
            joined |= dict.fromkeys(each.names, tensor)
        return joined

    def _parts(self, made: Tensors, inputs: Sequence[Tensors]) -> list[dict[str, Tensor]]:
        """Return each request's part of the batch's outputs.

        Raises:
            InternalError: an output has other elements or rows than the requests ask for.
        """
        parts: list[dict[str, Tensor]] = [{} for _ in inputs]
        for name, tensor in made.items():
            arrays = self._scatter(name, tensor, inputs) if name in self._scattered else None
            if arrays is None:
                arrays = self._rows(name, tensor, inputs)
            for part, array in zip(parts, arrays, strict=True):
                part[name] = Tensor(array)
        return parts

    def _scatter(
        self, name: str, tensor: Tensor, inputs: Sequence[Tensors]
    ) -> list[NDArray[Any]] | None:
        shape, source = self._scattered[name]
        flat = tensor.array.reshape(-1)
        shapes = [_sized(name, shape, each[source].shape) for each in inputs if source in each]
        ends = np.cumsum([0, *map(element_count, shapes)]).tolist()
        if len(shapes) < len(inputs) or ends[-1] != flat.size:
            raise InternalError(
                f"output '{name}' has {flat.size} elements; the shapes of '{source}' ask for "
                f"{ends[-1]}"
            )
        return [
            flat[begin:end].reshape(each)
            for each, (begin, end) in zip(shapes, pairwise(ends), strict=True)
        ]

    def _rows(self, name: str, tensor: Tensor, inputs: Sequence[Tensors]) -> list[NDArray[Any]]:
        if not self._batches:
            return [tensor.array]
        ends = np.cumsum([0, *(next(iter(each.values())).shape[0] for each in inputs)]).tolist()
        if not tensor.shape or tensor.shape[0] != ends[-1]:
            raise InternalError(
                f"output '{name}' has shape {shape_text(tensor.shape)} for a batch of {ends[-1]}"
            )
        return [tensor.array[begin:end] for begin, end in pairwise(ends)]


def _sized(name: str, shape: tuple[int, ...], source: tuple[int, ...]) -> tuple[int, ...]:
    """`shape` with its free sizes taken from the same places of `source`."""
    if any(size == -1 for size in shape[len(source) :]):
        raise InternalError(
            f"output '{name}' has more dimensions than its source input has: {shape_text(source)}"
        )
    return tuple(source[place] if size == -1 else size for place, size in enumerate(shape))


def _batch_input(made: BatchInput, shapes: Sequence[tuple[int, ...]]) -> NDArray[Any]:
    """Return the batch input for requests whose source inputs have these shapes."""
    counts = [element_count(shape) for shape in shapes]
    kind, dtype = made.kind, made.datatype.numpy
    if kind is BatchInputKind.MAX_ELEMENT_COUNT_AS_SHAPE:
        # The shape is the message; Triton leaves the elements as they are.
        return np.zeros(max(counts, default=0), dtype)
    values: Mapping[BatchInputKind, Any] = {
        BatchInputKind.ELEMENT_COUNT: counts,
        BatchInputKind.ACCUMULATED_ELEMENT_COUNT: np.cumsum(counts),
        BatchInputKind.ACCUMULATED_ELEMENT_COUNT_WITH_ZERO: np.cumsum([0, *counts]),
    }
    if kind in values:
        return np.array(values[kind], dtype)
    items = np.array([shape[1:] for shape in shapes for _ in range(shape[0])], dtype)
    return items.reshape(-1) if kind is BatchInputKind.ITEM_SHAPE_FLATTEN else items
