"""Complete and check a model's configuration by its plan; the texts are Triton's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends.tensorrt.plan_io import datatype_of
from edge_server.errors import ModelConfigError
from edge_server.model_config.agreement import Signature, complete_from
from edge_server.tensors import DataType, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from edge_server.backends.tensorrt.plan_build.side_car import PlanTensor
    from edge_server.backends.tensorrt.plan_io import PlanIO
    from edge_server.model_config.config import ModelConfig
    from edge_server.model_config.files import ModelFiles


def agreed(files: ModelFiles, config: ModelConfig, io: PlanIO) -> ModelConfig:
    """Return `config` completed from the plan, with the given fields checked against the plan.

    A plan supports batches where the first dimension of each of its tensors is free; a model
    without `max_batch_size` then gets the largest batch among the profiles of its instances.

    Raises:
        ModelConfigError: plan and configuration disagree, or the plan has an unsupported feature.
    """
    return _PlanCheck(files, config, io).config()


def profiles_of(config: ModelConfig) -> tuple[int, ...]:
    """Return the profiles that any instance of the model may use, ascending; at least one."""
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
    """Return `config` with the tensors that hold shapes marked as shape tensors."""
    names = {tensor.name for tensor in io.tensors if tensor.holds_shape}
    if not names:
        return config
    message = pb.ModelConfig()
    message.CopyFrom(config.message)
    for tensor in (*message.input, *message.output):
        tensor.is_shape_tensor = tensor.is_shape_tensor or tensor.name in names
    return replace(config, message=message)
