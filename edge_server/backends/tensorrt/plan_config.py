"""What a configuration says of a plan: options of its runs, and agreement with its tensors."""

from __future__ import annotations

import logging
from collections.abc import Mapping  # noqa: TC003 - read by msgspec
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends.contract import BackendParameters
from edge_server.backends.tensorrt.plan_options import PlanTensor, Range
from edge_server.board.board import NVDLA_SUPPORT
from edge_server.errors import InvalidRequest, ModelConfigError
from edge_server.model_config.completion import complete_from
from edge_server.model_config.files import is_file_name
from edge_server.tensors import DataType, Signature, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import numpy as np

    from edge_server.backends.tensorrt.plan_options import PlanTensor, Shapes
    from edge_server.model_config.config import ModelConfig
    from edge_server.model_config.files import ModelFiles

_PRIORITIES: dict[int, Literal["max", "min"]] = {
    pb.ModelOptimizationPolicy.PRIORITY_MAX: "max",
    pb.ModelOptimizationPolicy.PRIORITY_MIN: "min",
}
# Triton's text.
NOT_ON_A_GPU = "unable to load model '{model}', TensorRT backend supports only GPU device"


class TensorRtParameters(BackendParameters, frozen=True):
    dla_fallback: Literal["", "gpu"] = ""
    mapped_memory: bool = True
    auto_build: bool = False
    cuda_graphs: bool = True


def plan_name(config: ModelConfig, compute_capability: str) -> str:
    """Return the plan's file for a GPU of that capability, `8.7`: `cc_model_filenames` may name
    one."""
    names = config.message.cc_model_filenames
    found: str = names.get(compute_capability) or config.default_model_filename
    if not is_file_name(found):
        raise ModelConfigError(
            f"model '{config.name}': cc_model_filenames: '{found}' leaves the version directory; "
            "give a plain file name"
        )
    return found


def on_gpu_alone(plan: Path) -> Path:
    """Return `model.gpu.plan`, which replaces `model.plan` on a device without its NVDLA core."""
    return plan.with_suffix(f".gpu{plan.suffix}")


def no_such_core(core: int, cores: int, tensorrt: str) -> str:
    """Return the text for a missing core; its first part is Triton's."""
    return (
        f"unable to create TensorRT runtime with DLA Core ID: {core}, available number of DLA "
        f"cores: {cores}; TensorRT {tensorrt}. {NVDLA_SUPPORT}. Take secondary_devices out of the "
        "instance_group and build the plan for the GPU, or allow that with the parameter "
        "dla_fallback"
    )


@dataclass(frozen=True)
class Options:
    """Execution options of one model's instances.

    Attributes:
        mapped: inputs and outputs lie in host memory that the GPU accesses, where it can.
        pinned_inputs, pinned_outputs: copies go through pinned memory.
        graphs: batches of many shapes run as CUDA graphs, where possible.
        graph_if_fixed: so does a plan of fixed shapes, by default.
        busy_wait: a thread that waits for the GPU busy-waits instead of sleeping.
        priority: of the runs among all work of the GPU; recorded runs always have the default.
        copy_stream: outputs are copied to the host on a separate stream."""

    mapped: bool = True
    pinned_inputs: bool = True
    pinned_outputs: bool = True
    graphs: bool = False
    graph_if_fixed: bool = True
    busy_wait: bool = False
    priority: Literal["", "max", "min"] = ""
    copy_stream: bool = False
    batched: bool = False

    @staticmethod
    def of(config: ModelConfig, parameters: TensorRtParameters) -> Options:
        optimization = config.message.optimization
        priority: Literal["", "max", "min"] = _PRIORITIES.get(optimization.priority, "")
        return Options(
            mapped=parameters.mapped_memory,
            pinned_inputs=optimization.input_pinned_memory.enable,
            pinned_outputs=optimization.output_pinned_memory.enable,
            graphs=parameters.cuda_graphs and optimization.cuda.graphs,
            graph_if_fixed=parameters.cuda_graphs and not priority,
            busy_wait=optimization.cuda.busy_wait_events,
            priority=priority,
            copy_stream=optimization.cuda.output_copy_stream,
            batched=config.max_batch_size > 0,
        )


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlanIO:
    """The tensors of a plan in its order, and of each optimisation profile input → its range; only
    of inputs with a free dimension, and those that hold a shape, whose values the range bounds."""

    tensors: tuple[PlanTensor, ...]
    profiles: tuple[Mapping[str, Range], ...] = ()

    @cached_property
    def inputs(self) -> tuple[PlanTensor, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.is_input)

    @cached_property
    def outputs(self) -> tuple[PlanTensor, ...]:
        return tuple(tensor for tensor in self.tensors if not tensor.is_input)

    @property
    def profile_count(self) -> int:
        """The number of profiles; a plan of fixed shapes has one empty profile."""
        return max(1, len(self.profiles))

    @property
    def is_fixed(self) -> bool:
        return not any(-1 in t.shape or t.holds_shape for t in self.tensors)

    def ranges(self, profile: int) -> Mapping[str, Range]:
        return self.profiles[profile] if self.profiles else {}

    def bounds(self, tensor: PlanTensor, profile: int) -> Range:
        """Return the input's range of shapes in `profile`; for a fixed shape all three are
        equal."""
        found = self.ranges(profile).get(tensor.name)
        if found is None or tensor.holds_shape:
            return Range(tensor.shape, tensor.shape, tensor.shape)
        return found


def free_over_profiles(
    tensors: Sequence[PlanTensor], profiles: Sequence[Mapping[str, Range]]
) -> tuple[PlanTensor, ...]:
    """Return `tensors` with -1 where profiles, with ranges of every input, differ: TensorRT 8.6
    tells the shapes of the first profile, with 1 for a batch that this one fixes. Of outputs the
    batch alone is known."""

    def shape(tensor: PlanTensor) -> tuple[int, ...]:
        if tensor.name not in profiles[0]:
            return (-1, *tensor.shape[1:]) if tensor.shape[:1] in batches else tensor.shape
        ranges = [profile[tensor.name] for profile in profiles]
        sizes = zip(*(sizes for each in ranges for sizes in (each.min, each.max)), strict=True)
        return tuple(size[0] if len(set(size)) == 1 else -1 for size in sizes)

    first = profiles[0].items()
    free = {name for name, _ in first if len({p[name].max[:1] for p in profiles}) > 1}
    batches = {r.max[:1] for name, r in first if name in free and r.min[:1] == r.max[:1]}
    return tuple(replace(tensor, shape=shape(tensor)) for tensor in tensors)


def datatype_of(tensor: PlanTensor) -> DataType | None:
    try:
        return DataType(tensor.datatype)
    except ValueError:
        return None


def numpy_of(tensor: PlanTensor) -> np.dtype[Any]:
    datatype = datatype_of(tensor)
    assert datatype is not None  # noqa: S101 - the configuration was checked against the plan
    return datatype.numpy


def nearest_profile(io: PlanIO, allowed: Sequence[int], sizes: Shapes, instance: str) -> int:
    """Return the allowed profile whose optimal shapes are nearest to `sizes` (input → shape, or the
    values of one that holds a shape), by the sum of the differences; the first of equally near
    profiles. Raises InvalidRequest where none accepts them."""
    ranges = [(index, io.ranges(index)) for index in allowed]
    fitting = [(_distance(r, sizes), index) for index, r in ranges if _misfit(r, sizes) is None]
    if fitting:
        return min(fitting)[1]
    if len(ranges) > 1:
        log.warning(
            "failed to find any Optimization Profile among [ %s] to support the requested "
            "dimensions (or shape values), proceeding with first profile.",
            "".join(f"{index} " for index, _ in ranges),
        )
    name, why = _misfit(ranges[0][1], sizes) or ("", "")
    raise InvalidRequest(
        f"request specifies invalid shape for input '{name}' for {instance}. Error details: model "
        f"expected {why}"
    )


def _distance(ranges: Mapping[str, Range], sizes: Shapes) -> int:
    return sum(
        abs(size - best)
        for name, found in ranges.items()
        for size, best in zip(sizes.get(name, found.opt), found.opt, strict=False)
    )


def _misfit(ranges: Mapping[str, Range], sizes: Shapes) -> tuple[str, str] | None:
    for name, found in ranges.items():
        shape = sizes.get(name, found.opt)
        if len(shape) != len(found.opt):
            return name, f"{len(found.opt)} dimensions but received {len(shape)}"
        for at, (size, least, most) in enumerate(zip(shape, found.min, found.max, strict=True)):
            if not least <= size <= most:
                return name, (
                    f"the shape of dimension {at} to be between {least} and {most} but received "
                    f"{size}"
                )
    return None


def agreed(files: ModelFiles, config: ModelConfig, io: PlanIO) -> ModelConfig:
    """Return `config` completed from the plan, with the given fields checked against the plan. A
    plan supports batches where the first dimension of each of its tensors is free; a model without
    `max_batch_size` then gets the largest batch among the profiles of its instances. Raises
    ModelConfigError where both disagree, or the plan has an unsupported feature."""
    return _PlanCheck(files, config, io).config()


def profiles_of(config: ModelConfig) -> tuple[int, ...]:
    found = {index for group in config.instance_groups for index in group.profiles or (0,)}
    return tuple(sorted(found)) or (0,)


class _PlanCheck:
    def __init__(self, files: ModelFiles, config: ModelConfig, io: PlanIO) -> None:
        self._files = files
        self._config = config
        self._io = io
        group = next(iter(config.instance_groups), None)
        self._instance = f"{group.name if group else config.name}_0"

    def config(self) -> ModelConfig:
        config, message = self._config, self._config.message
        self._check_profiles()
        self._check_names("input", message.input, self._io.inputs)
        self._check_names("output", message.output, self._io.outputs)
        for kind, tensors in (("input", self._io.inputs), ("output", self._io.outputs)):
            for tensor in tensors:
                self._check_tensor(kind, tensor)
        self._check_batching()
        most = self._most_batches()
        usual = replace(config, completion=replace(config.completion, default_max_batch_size=most))
        completed = complete_from(self._files, usual, self._signature())
        return _marked(replace(completed, completion=config.completion), self._io)

    def _check_profiles(self) -> None:
        count = self._io.profile_count
        for index in profiles_of(self._config):
            if index >= count:
                # The blank before the full stop is Triton's.
                raise self._fault(
                    f"unable to autofill for '{self._config.name}', configuration specified "
                    f"invalid profile {index} . Number of profiles supported by TensorRT engine: "
                    f"{count}"
                )

    def _check_names(self, kind: str, specs: Sequence[Any], real: Sequence[PlanTensor]) -> None:
        names = [tensor.name for tensor in real]
        for tensor in specs:
            if tensor.name not in names:
                raise self._fault(
                    f"unexpected inference {kind} '{tensor.name}', allowed {kind}s are: "
                    f"{', '.join(names)}"
                )
        if len(specs) > len(names):
            raise self._fault(
                f"unable to load model '{self._config.name}', configuration expects {len(specs)} "
                f"{kind}s, model provides at most {len(names)}"
            )
        configured = {tensor.name for tensor in specs} | self._batchers()
        for name in () if self._config.completion.auto else names:
            if name not in configured:
                raise self._fault(
                    f"expected configuration for {kind} '{name}' for {self._instance}"
                )

    def _batchers(self) -> set[str]:
        """Names of the tensors that the sequence batcher fills: controls and states."""
        batching = self._config.sequence_batching
        if batching is None:
            return set()
        names = {control.input_name for control in batching.controls}
        for state in batching.states:
            names |= {state.input_name, state.output_name}
        return names

    def _check_tensor(self, kind: str, tensor: PlanTensor) -> None:
        name, datatype = tensor.name, datatype_of(tensor)
        which = f"{kind} '{name}' for model '{self._config.name}'"
        if datatype is None:
            raise self._fault(f"unsupported datatype {tensor.datatype} for {which}")
        specs = getattr(self._config.message, kind)
        spec = next((spec for spec in specs if spec.name == name), None)
        if spec is None:
            return
        if spec.data_type != pb.TYPE_INVALID:
            wanted = pb.DataType.Name(spec.data_type)
            if DataType.from_config(wanted) is not datatype:
                raise self._fault(
                    f"unexpected datatype {datatype.config_name} for inference {kind} '{name}', "
                    f"expecting {wanted} for {self._instance}"
                )
        if tensor.holds_shape and not spec.is_shape_tensor and not self._config.completion.auto:
            raise self._fault(
                f"{which} is a shape tensor but the model configuration doesn't mark it as a shape "
                "tensor."
            )
        if spec.is_shape_tensor and not tensor.holds_shape:
            raise self._fault(
                f"{which} is not a shape tensor but the model configuration marks it as a shape "
                "tensor."
            )
        linear, marked = is_linear(tensor), spec.is_non_linear_format_io
        if linear == marked:
            raise self._fault(
                f"{which} uses a {'linear' if linear else 'non-linear'} IO format, but "
                f"'is_non_linear_format_io' is incorrectly set to {str(marked).lower()} in the "
                "model configuration."
            )
        if not linear:
            raise self._fault(
                f"{which} has the format {tensor.format}, which this server does not take apart; "
                "build the plan with linear inputs and outputs, as `edge-server plan build` does"
            )

    def _check_batching(self) -> None:
        config, model = self._config, self._config.name
        shapes = {t.name: t.shape for t in self._io.tensors if not t.holds_shape}
        scalar = next((name for name, shape in shapes.items() if not shape), None)
        if config.max_batch_size > 0:
            if holder := next((t.name for t in self._io.tensors if t.holds_shape), None):
                raise self._fault(
                    f"model '{model}': tensor '{holder}' holds a shape, which a model that batches "
                    "cannot have here; set max_batch_size to 0 and give every tensor's dims in full"
                )
            if scalar is not None:
                raise self._fault(
                    f"model '{model}', tensor '{scalar}': for the model to support batching the "
                    "shape should have at least 1 dimension; but shape expected by the model is []"
                )
            if config.max_batch_size > self._most_batches():
                raise self._fault(
                    f"autofill failed for model '{model}': configuration specified max-batch "
                    f"{config.max_batch_size} but TensorRT engine only supports max-batch "
                    f"{self._most_batches()}"
                )
            return
        hints = set(self._hints())
        if len(hints) > 1:
            raise self._fault(
                f"unable to autofill for '{model}', model tensor configurations are contradicting "
                "each other in terms of whether batching is supported"
            )
        if hints == {True} and any(shape[:1] != (-1,) for shape in shapes.values()):
            raise self._fault(
                f"autofill failed for model '{model}': model tensor shape configuration hints for "
                "dynamic batching but the underlying engine doesn't support batching."
            )

    def _hints(self) -> Iterator[bool]:
        """Yield, for each tensor with dims, whether the dims leave out the batch dimension."""
        message = self._config.message
        ranks = {tensor.name: len(tensor.shape) for tensor in self._io.tensors}
        for tensor in (*message.input, *message.output):
            dims = tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims
            if tensor.dims and tensor.name in ranks and abs(ranks[tensor.name] - len(dims)) <= 1:
                yield ranks[tensor.name] == len(dims) + 1

    def _most_batches(self) -> int:
        """Return the largest batch of any profile, or the inputs' first dimension if no profile
        bounds it."""
        inputs = [tensor for tensor in self._io.inputs if not tensor.holds_shape and tensor.shape]
        return max(
            min((self._io.bounds(tensor, profile).max[0] for tensor in inputs), default=0)
            for profile in profiles_of(self._config)
        )

    def _signature(self) -> Signature:
        return Signature(
            tuple(_spec(tensor) for tensor in self._io.inputs),
            tuple(_spec(tensor) for tensor in self._io.outputs),
        )

    def _fault(self, text: str) -> ModelConfigError:
        return ModelConfigError(f"{self._files.config_path}: {text}")


def is_linear(tensor: PlanTensor) -> bool:
    """Return whether TensorRT describes the tensor as linear: `Row-major linear FP32 format`;
    TensorRT reports no format without a device."""
    return not tensor.format or "linear" in tensor.format.lower()


def _spec(tensor: PlanTensor) -> TensorSpec:
    datatype = datatype_of(tensor)
    assert datatype is not None  # noqa: S101 - checked before
    return TensorSpec(tensor.name, datatype, tensor.shape)


def _marked(config: ModelConfig, io: PlanIO) -> ModelConfig:
    names = {tensor.name for tensor in io.tensors if tensor.holds_shape}
    if not names:
        return config
    message = pb.ModelConfig()
    message.CopyFrom(config.message)
    for tensor in (*message.input, *message.output):
        tensor.is_shape_tensor = tensor.is_shape_tensor or tensor.name in names
    return replace(config, message=message)
