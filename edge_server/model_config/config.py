"""ModelConfig: the completed, frozen configuration from config.pbtxt and the model's files."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.model_config.files import is_file_name
from edge_server.model_config.parse import FIRST_RESPONSE, IDLE_UNLOAD_S, datatype_of
from edge_server.model_config.scheduling import (
    DynamicBatching,
    SequenceBatching,
    Warmup,
    dynamic_batching_of,
    sequence_batching_of,
    valid_datatype,
    warmups_of,
)
from edge_server.settings import Python
from edge_server.tensors import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from edge_server.tensors import DataType

_PROGRAM = "model.py"
# An ONNX model gets the requests in one tensor; a Python model gets each request by itself.
_RAGGED_BACKENDS = frozenset({"onnxruntime", "python"})


class BatchInputKind(Enum):
    """What a batch input says of the requests of a batch; the names are Triton's."""

    ELEMENT_COUNT = "BATCH_ELEMENT_COUNT"
    ACCUMULATED_ELEMENT_COUNT = "BATCH_ACCUMULATED_ELEMENT_COUNT"
    ACCUMULATED_ELEMENT_COUNT_WITH_ZERO = "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO"
    MAX_ELEMENT_COUNT_AS_SHAPE = "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE"
    ITEM_SHAPE = "BATCH_ITEM_SHAPE"
    ITEM_SHAPE_FLATTEN = "BATCH_ITEM_SHAPE_FLATTEN"


@dataclass(frozen=True)
class BatchInput:
    """Tensors that are made for each batch from the shapes of `source`, a request's input."""

    kind: BatchInputKind
    names: tuple[str, ...]
    datatype: DataType
    source: str


@dataclass(frozen=True)
class BatchOutput:
    """Outputs of a whole batch; each request gets as many elements as its input `source` says."""

    names: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class RaggedBatching:
    """How requests of different shapes become one batch: the model gets those of `inputs` as one
    list of elements."""

    inputs: frozenset[str]
    batch_inputs: tuple[BatchInput, ...]
    batch_outputs: tuple[BatchOutput, ...]

    @property
    def batch_input_types(self) -> dict[str, DataType]:
        """The tensors that requests do not carry, by name."""
        return {name: each.datatype for each in self.batch_inputs for name in each.names}

    @property
    def batch_output_names(self) -> frozenset[str]:
        return frozenset(name for each in self.batch_outputs for name in each.names)


def ragged_batching_of(message: Any) -> RaggedBatching | None:
    """The ragged batching of a valid `inference.ModelConfig`, where it has some."""
    inputs = frozenset(tensor.name for tensor in message.input if tensor.allow_ragged_batch)
    if not (inputs or message.batch_input or message.batch_output):
        return None
    return RaggedBatching(
        inputs,
        tuple(map(_batch_input, message.batch_input)),
        tuple(
            BatchOutput(tuple(each.target_name), each.source_input[0])
            for each in message.batch_output
        ),
    )


def ragged_faults(message: Any) -> Iterator[str]:
    backend = message.backend
    if message.platform == "ensemble" or backend in _RAGGED_BACKENDS:
        return
    for tensor in message.input:
        if tensor.allow_ragged_batch:
            yield (
                f"model input '{tensor.name}' has 'allow_ragged_batch', which backend '{backend}' "
                f"does not support, for {message.name}; remove it, and pad the input"
            )
    for name in ("batch_input", "batch_output"):
        if getattr(message, name):
            yield (
                f"backend '{backend}' does not support '{name}', for {message.name}; remove it, "
                "or load the model as ONNX"
            )


def _batch_input(message: Any) -> BatchInput:
    kind = BatchInputKind(pb.BatchInput.Kind.Name(message.kind))
    datatype = valid_datatype(message.data_type)
    return BatchInput(kind, tuple(message.target_name), datatype, message.source_input[0])


# Triton's own buckets.
_FIRST_RESPONSE_BOUNDS_MS = (100.0, 500.0, 2000.0, 5000.0)


@dataclass(frozen=True)
class EnsembleStep:
    """One node of an ensemble's data-flow graph; `model_version` -1 is the latest, and the maps
    lead from the model's names to the ensemble's tensors.

    Attributes, set once the graph is resolved:
        decoupled, on_gpu: of the model.
        full_shapes: the model's inputs with their full shapes (see `ModelConfig.full_shape`), where
            a batch dimension of 1 comes or goes between models.
        runs, depth: the step itself and, where its model is an ensemble, the steps and the levels
            in it."""

    model_name: str
    model_version: int
    input_map: Mapping[str, str]
    output_map: Mapping[str, str]
    decoupled: bool = False
    full_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    runs: int = 1
    depth: int = 1
    on_gpu: bool = False


@dataclass(frozen=True)
class RateLimitResource:
    """A resource that an instance holds while it runs; `per_device` ones exist per device."""

    name: str
    count: int
    per_device: bool


@dataclass(frozen=True)
class Placement:
    """The device of one instance: `kind` is `CPU`, `GPU` or `MODEL`, `gpu` its number, `dla_core`
    the NVDLA core beside it that runs the layers it can, and `profiles` the TensorRT optimisation
    profiles that it may use; none means the first."""

    kind: str = "CPU"
    gpu: int | None = None
    dla_core: int | None = None
    profiles: tuple[int, ...] = ()


ON_CPU = Placement()


@dataclass(frozen=True)
class InstanceGroup:
    """The number of instances of a model (per GPU of `gpus`, where there are some), and their
    device.

    Attributes:
        resources: amounts that the rate limiter reserves for a run.
        priority: an instance of priority n gets 1/n of the chances; 0 counts as 1.
        passive: the instances hold their resources and never run."""

    name: str
    kind: str
    count: int
    resources: tuple[RateLimitResource, ...] = ()
    priority: int = 1
    passive: bool = False
    gpus: tuple[int, ...] = ()
    dla_core: int | None = None
    profiles: tuple[int, ...] = ()

    @property
    def placements(self) -> list[Placement]:
        return [
            Placement(self.kind, gpu, self.dla_core, self.profiles)
            for gpu in self.gpus or (None,)
            for _ in range(self.count)
        ]


@dataclass(frozen=True)
class Completion:
    """Settings for a backend's completion of a configuration.

    Attributes:
        auto: the backend fills in missing inputs, outputs and `max_batch_size`; else it only
            checks.
        config_name: models that have `configs/<config_name>.pbtxt` are configured by it.
        default_max_batch_size: for a model that batches whose configuration gives none.
        gpus, no_gpu: number of GPUs, numbered from 0, and why there is none.
        python: limits of the process that completes a Python model and then runs it.
        jetson: this machine is built for its GPU: what would use it by default does not run on the
            CPU instead, and what prefers it runs there degraded."""

    auto: bool = True
    default_max_batch_size: int = 4
    gpus: int = 0
    no_gpu: str = ""
    python: Python = field(default_factory=Python)
    config_name: str = ""
    jetson: bool = False


USUAL_COMPLETION = Completion()


def python_backend(message: Any, completion: Completion) -> str:
    """Return the directory of the backend whose `model.py` runs the model of `message`; empty where
    it has no such backend."""
    parent, name = completion.python.backends, message.backend
    if not (parent and name and is_file_name(name)):
        return ""
    directory = Path(parent).absolute() / name
    return str(directory) if (directory / _PROGRAM).is_file() else ""


@dataclass(frozen=True)
class ModelConfig:
    """A completed configuration; `message` is the same in the protocol's own form.

    Attributes:
        max_batch_size: 0 means that the model's shapes have no batch dimension.
        inputs, outputs: shapes without the batch dimension.
        max_inflight_requests: of an ensemble: how many requests a step may have running and waiting
            before the steps that feed it are held back; 0 is unlimited.
        reshapes: tensor name → the model's own shape, where it differs from the clients' shape.
        ragged: how requests of different shapes run together; None where they never do.
        first_response_bounds_ms: the buckets of the histogram of a decoupled model's first
            response.
        labels: output name → the names of its classes, by index; an ensemble's also of its members.
        program: see `python_backend`; `backend` is `python` then."""

    name: str
    platform: str
    backend: str
    max_batch_size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    instance_groups: tuple[InstanceGroup, ...]
    default_model_filename: str
    parameters: Mapping[str, str]
    steps: tuple[EnsembleStep, ...]
    max_inflight_requests: int
    dynamic_batching: DynamicBatching | None
    sequence_batching: SequenceBatching | None
    reshapes: Mapping[str, tuple[int, ...]]
    decoupled: bool
    response_cache: bool
    warmups: tuple[Warmup, ...]
    message: Any = field(repr=False, compare=False)
    completion: Completion = field(default=USUAL_COMPLETION, repr=False, compare=False)
    ragged: RaggedBatching | None = None
    first_response_bounds_ms: tuple[float, ...] = _FIRST_RESPONSE_BOUNDS_MS
    metric_tags: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict, repr=False, compare=False)
    program: str = ""

    @staticmethod
    def of(message: Any, completion: Completion = USUAL_COMPLETION) -> ModelConfig:
        """Build the frozen view of a completed and valid `inference.ModelConfig` message. Inputs
        and outputs whose type the backend has yet to fill in are in `message` alone."""
        program = python_backend(message, completion)
        return ModelConfig(
            name=message.name,
            platform=message.platform,
            backend="python" if program else message.backend,
            max_batch_size=message.max_batch_size,
            inputs=_specs(message.input),
            outputs=_specs(message.output),
            instance_groups=tuple(
                InstanceGroup(
                    group.name,
                    pb.ModelInstanceGroup.Kind.Name(group.kind).removeprefix("KIND_"),
                    group.count,
                    tuple(
                        RateLimitResource(r.name, r.count, per_device=not getattr(r, "global"))
                        for r in group.rate_limiter.resources
                    ),
                    group.rate_limiter.priority or 1,
                    group.passive,
                    tuple(group.gpus),
                    next((device.device_id for device in group.secondary_devices), None),
                    tuple(int(profile) for profile in group.profile),
                )
                for group in message.instance_group
            ),
            default_model_filename=_PROGRAM if program else message.default_model_filename,
            parameters={k: v.string_value for k, v in message.parameters.items()},
            steps=tuple(
                EnsembleStep(s.model_name, s.model_version, dict(s.input_map), dict(s.output_map))
                for s in message.ensemble_scheduling.step
            ),
            max_inflight_requests=message.ensemble_scheduling.max_inflight_requests,
            dynamic_batching=dynamic_batching_of(message),
            sequence_batching=sequence_batching_of(message),
            reshapes={
                tensor.name: tuple(tensor.reshape.shape)
                for tensor in (*message.input, *message.output)
                if tensor.HasField("reshape")
            },
            decoupled=message.model_transaction_policy.decoupled,
            response_cache=message.response_cache.enable,
            warmups=warmups_of(message),
            message=message,
            completion=completion,
            ragged=ragged_batching_of(message),
            first_response_bounds_ms=_first_response_bounds_ms(message),
            metric_tags={f"_{tag}": value for tag, value in message.metric_tags.items()},
            program=program,
        )

    @property
    def is_ensemble(self) -> bool:
        return self.platform == "ensemble"

    @cached_property
    def input_names(self) -> frozenset[str]:
        return frozenset(spec.name for spec in self.inputs)

    @cached_property
    def output_names(self) -> frozenset[str]:
        return frozenset(spec.name for spec in self.outputs)

    @cached_property
    def full_inputs(
        self,
    ) -> Mapping[str, tuple[DataType, tuple[int, ...], tuple[tuple[int, int], ...]]]:
        """Input → its type, its full shape, and the dimensions of fixed size in it."""
        shapes = {spec: self.full_shape(spec) for spec in self.inputs}
        return {
            spec.name: (spec.datatype, shape, tuple(d for d in enumerate(shape) if d[1] != -1))
            for spec, shape in shapes.items()
        }

    @property
    def runs(self) -> int:
        """The steps that one request to the resolved ensemble runs, those of ensembles within
        included; 0 of another model."""
        return sum(step.runs for step in self.steps)

    @property
    def depth(self) -> int:
        """How many ensembles lie within each other, this one included; 0 for another model."""
        return max((step.depth for step in self.steps), default=0)

    @property
    def on_gpu(self) -> bool:
        """Whether the model, or one of the resolved ensemble, takes tensors where a GPU has left
        them."""
        return any(group.gpus for group in self.instance_groups) or any(
            step.on_gpu for step in self.steps
        )

    @cached_property
    def mixes_batching(self) -> bool:
        """Whether models with and without a batch dimension meet in the resolved ensemble."""
        return any(step.full_shapes for step in self.steps)

    @cached_property
    def ragged_inputs(self) -> frozenset[str]:
        """The inputs whose shapes may differ within a batch."""
        return frozenset() if self.ragged is None else self.ragged.inputs

    @cached_property
    def idle_unload_s(self) -> float:
        """After how many seconds without a request the model is unloaded; 0 is never."""
        return float(self.parameters.get(IDLE_UNLOAD_S, 0.0))

    @property
    def kind(self) -> str:
        """The platform in the model's metadata: `platform`, or the backend where it is empty."""
        return self.platform or self.backend

    def with_io(self, inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]) -> ModelConfig:
        """Return this configuration with other inputs and outputs, in both forms; other settings of
        a tensor (labels, format) are kept. One of one number per batch element has dims [1],
        reshaped to none."""
        message = pb.ModelConfig()
        message.CopyFrom(self.message)
        _rewrite(message.input, self.message.input, inputs)
        _rewrite(message.output, self.message.output, outputs)
        if self.max_batch_size > 0:
            for tensor in (*message.input, *message.output):
                if not tensor.dims:
                    tensor.dims.append(1)
                    tensor.reshape.SetInParent()
        return ModelConfig.of(message, self.completion)

    def model_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """The model's own shape of a tensor, without the batch dimension."""
        return self.reshapes.get(spec.name, spec.shape)

    def full_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """The shape in requests: with -1 for the batch in front where the model batches."""
        return (-1, *spec.shape) if self.max_batch_size > 0 else spec.shape


def _first_response_bounds_ms(message: Any) -> tuple[float, ...]:
    for control in message.model_metrics.metric_control:
        if control.metric_identifier.family == FIRST_RESPONSE:
            return tuple(control.histogram_options.buckets)
    return _FIRST_RESPONSE_BOUNDS_MS


def _rewrite(target: Any, source: Any, specs: Iterable[TensorSpec]) -> None:
    configured = {tensor.name: tensor for tensor in source}
    del target[:]
    for spec in specs:
        tensor = target.add()
        if spec.name in configured:
            tensor.CopyFrom(configured[spec.name])
        tensor.name = spec.name
        tensor.data_type = pb.DataType.Value(spec.datatype.config_name)
        tensor.dims[:] = spec.shape
        if spec.optional:
            tensor.optional = True


def _specs(tensors: Iterable[Any]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(tensor.name, datatype, tuple(tensor.dims), getattr(tensor, "optional", False))
        for tensor in tensors
        if (datatype := datatype_of(tensor.data_type)) is not None
    )
