"""The backend interface: Backend → Model → Instance.

A backend that only computes tensors writes a function and wraps it in `TensorModel`; one that
responds in its own order (Python models, decoupled models) implements `Instance`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np

from edge_server.errors import (
    EdgeServerError,
    InternalError,
    ModelConfigError,
    NotFound,
    Unavailable,
)
from edge_server.gpu.memory import UploadOnce
from edge_server.model_config.completion import PREFERRED_CONFIGS
from edge_server.model_config.parse import (
    ALLOW_INTERFACE_CHANGE,
    CONTRACT_PARAMETERS,
    IDLE_UNLOAD_S,
)
from edge_server.requests import NO_PARAMETERS, InferRequest, Parameters
from edge_server.settings.read import value_mistake
from edge_server.tensors import Tensor, shape_text

if TYPE_CHECKING:
    from pathlib import Path

    from edge_server.gpu.device import Devices
    from edge_server.model_config.config import ModelConfig, Placement
    from edge_server.model_config.files import ModelFiles
    from edge_server.requests import Respond

log = logging.getLogger(__name__)

Tensors = Mapping[str, Tensor]
Run = Callable[[Tensors, frozenset[str]], Tensors]
ProgressCallback = Callable[[str], None]
CopyDirection = Literal["to_host", "to_device"]


class NoRoom(Unavailable):
    """A load lacks memory, or space on a disk.

    Attributes:
        has_room: returns whether the next attempt is worth while; takes no time.
    """

    def __init__(self, text: str, has_room: Callable[[], bool]) -> None:
        super().__init__(text)
        self.has_room = has_room


class Copied(Protocol):
    """Counts the bytes of one copy of a tensor between host and device."""

    def __call__(self, direction: CopyDirection, n_bytes: int) -> None: ...


def not_counted(direction: CopyDirection, n_bytes: int) -> None:
    """A `Copied` for copies that belong to no model's statistics."""


def no_progress(text: str) -> None:
    """A `ProgressCallback` for a load whose progress is not shown."""


def all_on_host(tensors: Tensors, copied: Copied) -> Tensors:
    for tensor in tensors.values():
        if not isinstance(tensor.array, np.ndarray):
            return {name: on_host(tensor, copied) for name, tensor in tensors.items()}
    return tensors


def on_host(tensor: Tensor, copied: Copied) -> Tensor:
    """Return `tensor` on the host; a tensor on a device is copied and the copy counted."""
    array = tensor.on_device
    if array is None:
        return tensor
    if not isinstance(array, UploadOnce):
        copied("to_host", array.nbytes)
    return Tensor(array.on_host())


class RespondTensors(Protocol):
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
        inputs: in their full shapes, batch dimension included, with those that the scheduler adds
            (sequence controls, state). Some may be on a device: see `host_inputs`.
        models: the other models, pinned for the life of this request.
        copied: called for each copy between host and device, except those made by `host_inputs`.
        reschedule: to be called during `execute` where the request shall run again, with what is to
            be called where it will not; None where the scheduler runs each request once."""

    inputs: Tensors
    outputs: frozenset[str]
    respond: RespondTensors
    request: InferRequest
    models: ModelResolver
    copied: Copied = not_counted
    reschedule: Callable[[Callable[[], None]], None] | None = None

    def host_inputs(self) -> Tensors:
        return all_on_host(self.inputs, self.copied)


class Phases(msgspec.Struct, frozen=True, gc=False):
    """The duration of each phase of one execution, in ns."""

    input: int
    infer: int
    output: int


class Instance(Protocol):
    """Executes requests, one `execute` at a time."""

    def execute(self, requests: Sequence[ExecuteRequest]) -> Phases | None:
        """Respond to each request through its own `respond`, the last time with `final=True`.

        Response tensors may be on a device. Only a decoupled model may respond after this has
        returned; it then sends its final response in every case, even when the model ends.

        Args: requests: one, or up to the model's maximum batch, of equal shapes but for the batch
            dimension.

        Returns: The duration of each phase; None counts the whole execution as inference."""
        ...

    def close(self) -> None:
        """Release what the instance owns; nothing by default."""
        return


MetricKind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class ModelMetric:
    """One sample of a metric that the model itself defines; of a histogram the sum, and in
    `buckets` upper bound, infinity the last, → number of observations not above it."""

    name: str
    description: str
    kind: MetricKind
    labels: Mapping[str, str]
    value: float
    buckets: Mapping[float, int] = field(default_factory=dict)


# `processes` is measured: memory of the model's processes that no other shares. `file` is the size
# of its file, of which a library holds its own form within the daemon: the least that it takes.
# `contexts` is device memory for the steps between inputs and outputs, as TensorRT reports it.
# `buffers` is what the daemon has allocated for tensors, on the device and pinned on the host.
MemoryKind = Literal["processes", "file", "contexts", "buffers"]


class Model(Protocol):
    """One loaded version. A model makes instances and is closed once, after its last instance."""

    def make_instance(self, name: str, placement: Placement) -> Instance:
        """Return a new instance on `placement`."""
        ...

    def not_ready_reason(self) -> str:
        """Return why the model cannot respond at this moment (e.g. its process restarts); empty
        when the model is ready, as most always are."""
        return ""

    def degraded_reason(self) -> str:
        """Return what the model responds without, and why; empty where it runs as configured."""
        return ""

    def metrics(self) -> Sequence[ModelMetric]:
        return ()

    def memory_bytes(self) -> Mapping[MemoryKind, int]:
        """Return the memory that is known to be the model's, by what is known of it."""
        return {}

    def close(self) -> None:
        """Release what the model owns; nothing by default."""
        return


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


class Backend(Protocol):
    """Completes and loads the models of one kind. A module can be a backend."""

    def complete(self, files: ModelFiles, version: int, config: ModelConfig) -> ModelConfig:
        """Return the configuration completed with the inputs and outputs that the model's files
        declare. Raises ModelConfigError where both disagree, or a file cannot be read."""
        ...

    def load(self, context: LoadContext) -> Model:
        """Load the version that `context` describes, ready to make instances on demand. Raises
        ModelConfigError with the file and the remedy."""
        ...


@runtime_checkable
class Prepares(Protocol):
    """A backend whose models may need a build of minutes before they can be loaded."""

    def prepare(self, context: LoadContext) -> None:
        """Build what a load of the version lacks; return at once where it lacks nothing. Raises
        EdgeServerError where nothing was built."""
        ...


class TensorInstance(Instance):
    """An `Instance` over a function from tensors to tensors. Several requests are joined along the
    batch dimension, executed once, and split again; an error goes to all of them."""

    # Whether `join` and `split` are called for one request alone, too.
    joins_one = False

    def __init__(self, run: Run) -> None:
        self._run = run

    def execute(self, requests: Sequence[ExecuteRequest]) -> Phases:
        began_ns = joined_ns = time.monotonic_ns()
        alone = len(requests) == 1 and not self.joins_one
        wanted = requests[0].outputs
        try:
            inputs = [request.host_inputs() for request in requests]
            joined = inputs[0]
            if not alone:
                wanted = wanted.union(*(request.outputs for request in requests))
                joined = self.join(inputs)
            joined_ns = time.monotonic_ns()
            made = self._run(joined, wanted)
            ran_ns = time.monotonic_ns()
            parts = [made] if alone else self.split(made, inputs)
        except EdgeServerError as error:
            for request in requests:
                request.respond(error, True)
            return Phases(joined_ns - began_ns, time.monotonic_ns() - joined_ns, 0)
        for request, part in zip(requests, parts, strict=True):
            request.respond({name: part[name] for name in request.outputs if name in part}, True)
        return Phases(joined_ns - began_ns, ran_ns - joined_ns, time.monotonic_ns() - ran_ns)

    def join(self, inputs: Sequence[Tensors]) -> Tensors:
        """Return the inputs of the run, from the inputs of each request."""
        return {
            name: Tensor(np.concatenate([each[name].array for each in inputs]))
            for name in inputs[0]
        }

    def split(self, made: Tensors, inputs: Sequence[Tensors]) -> Sequence[Tensors]:
        """Return each request's outputs, from those of the run and the inputs of each request."""
        counts = [next(iter(each.values())).shape[0] for each in inputs]
        parts = {name: rows_of(name, tensor.array, counts) for name, tensor in made.items()}
        return [
            {name: Tensor(arrays[at]) for name, arrays in parts.items()}
            for at in range(len(inputs))
        ]


def rows_of(name: str, array: Any, counts: Sequence[int]) -> list[Any]:
    """Split output `name` of a batch into parts of `counts` rows."""
    ends = np.cumsum([0, *counts]).tolist()
    if array.shape[:1] != (ends[-1],):
        raise InternalError(
            f"output '{name}' has shape {shape_text(array.shape)} for a batch of {ends[-1]}"
        )
    return [array[begin:end] for begin, end in pairwise(ends)]


class TensorModel(Model):
    """A `Model` whose instances share one function and own no resources."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def make_instance(self, name: str, placement: Placement) -> Instance:
        del name, placement  # all instances are alike
        return TensorInstance(self._run)


class ModelResolver(Protocol):
    """The other loaded models, as one request may use them."""

    def submit(self, request: InferRequest, respond: Respond) -> None:
        """Submit a request to another model; `respond` is called before or after this returns, and
        not at all where it raises an EdgeServerError."""
        ...

    def model_ready(self, name: str, version: str) -> bool:
        """Return whether that version of the model is ready. Raises InvalidRequest for no version
        number."""
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
        """Load or reload model `name`; return when the load is complete. Raises EdgeServerError,
        with Triton's text where Triton has one.

        Args:
            config: a ModelConfig in protobuf's JSON form, instead of the one on disk.
            files: `file:<version>/<name>` → content, instead of the model's directory.
            within: the calling model, which may itself be loading."""
        ...

    def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Stop new requests to model `name`, and with `unload_dependents` to what it depends on, at
        once."""
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


@dataclass(frozen=True)
class LoadContext:
    """One version of a model to load, and what of the daemon its backend may use.

    Attributes:
        progress: reports the progress of a load that takes minutes, as one line: the model's reason
            in the index until the next call; an empty text clears it. It may be called on any
            thread, and while instances are made; a call outside a load of the model has no effect.
        server: for a model that sends requests to other models or loads them.
        builds: the load may build for minutes what it lacks; otherwise it fails, see `Prepares`."""

    directory: Path
    config: ModelConfig
    devices: Devices
    progress: ProgressCallback = no_progress
    server: ServerContext = STANDALONE
    builds: bool = True


# Valid for every model, whatever its backend: the limit on the median latency of the model's golden
# requests; a slower version is not published.
GOLDEN_MAX_LATENCY_MS = "golden_max_latency_ms"

OF_EVERY_MODEL = CONTRACT_PARAMETERS | {
    GOLDEN_MAX_LATENCY_MS,
    ALLOW_INTERFACE_CHANGE,
    PREFERRED_CONFIGS,
    IDLE_UNLOAD_S,
}


class BackendParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The names, types and defaults of a backend's parameters."""


P = TypeVar("P", bound=BackendParameters)


def check_parameters(
    files: ModelFiles, config: ModelConfig, kind: type[P], *, others: bool = False
) -> P:
    """Return the configuration's parameters that `kind` knows; with `others` it may have more: of
    other backends, the plan builder, clients. Raises ModelConfigError where one is unknown, or its
    value does not fit its type."""
    known = kind.__struct_encode_fields__
    theirs = OF_EVERY_MODEL - set(known)
    own = {
        name: value
        for name, value in config.parameters.items()
        if (name in known if others else name not in theirs)
    }
    try:
        return msgspec.convert(own, kind, strict=False)
    except msgspec.ValidationError as error:
        mistake = value_mistake(str(error), own)
        raise ModelConfigError(
            f"{files.config_path}: parameters: {mistake}; backend '{config.backend}' knows: "
            f"{', '.join(known) or 'none'}"
        ) from error


def log_unknown_parameters(config: ModelConfig, known: Collection[str], shown: str) -> None:
    """Log each parameter that is neither of `known`, nor of every model; `shown` are the known ones
    for the text."""
    for name in sorted(config.parameters.keys() - {*known} - OF_EVERY_MODEL):
        log.warning(
            "model %s: parameter '%s' has no effect here: backend '%s' knows: %s",
            config.name,
            name,
            config.backend,
            shown,
        )


def parameters_of(config: ModelConfig, kind: type[P]) -> P:
    """Return the parameters that `kind` knows; `check_parameters` has validated them."""
    known = kind.__struct_encode_fields__
    own = {name: value for name, value in config.parameters.items() if name in known}
    return msgspec.convert(own, kind, strict=False)
