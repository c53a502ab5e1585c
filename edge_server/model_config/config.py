"""ModelConfig: what config.pbtxt and the model's files say together, completed and frozen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.tensors import DataType, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True)
class EnsembleStep:
    """One node of an ensemble's data-flow graph.

    Attributes:
        model_version: -1 is the latest.
        input_map: the model's input → the ensemble's tensor.
        output_map: the model's output → the ensemble's tensor.
    """

    model_name: str
    model_version: int
    input_map: Mapping[str, str]
    output_map: Mapping[str, str]


@dataclass(frozen=True)
class InstanceGroup:
    """How many instances of a model run, and on what (`CPU`, `GPU`, `MODEL`)."""

    name: str
    kind: str
    count: int


@dataclass(frozen=True)
class ModelConfig:
    """A completed configuration; `message` is the same in the protocol's own form.

    Attributes:
        max_batch_size: 0 means that the model's shapes have no batch dimension.
        inputs: shapes without the batch dimension.
        steps: of an ensemble; empty for every other model.
    """

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
    message: Any = field(repr=False, compare=False)

    @staticmethod
    def of(message: Any) -> ModelConfig:
        """The frozen view of a completed `inference.ModelConfig` message."""
        return ModelConfig(
            name=message.name,
            platform=message.platform,
            backend=message.backend,
            max_batch_size=message.max_batch_size,
            inputs=_specs(message.input),
            outputs=_specs(message.output),
            instance_groups=tuple(
                InstanceGroup(
                    group.name,
                    pb.ModelInstanceGroup.Kind.Name(group.kind).removeprefix("KIND_"),
                    group.count,
                )
                for group in message.instance_group
            ),
            default_model_filename=message.default_model_filename,
            parameters={k: v.string_value for k, v in message.parameters.items()},
            steps=tuple(
                EnsembleStep(
                    step.model_name,
                    step.model_version,
                    dict(step.input_map),
                    dict(step.output_map),
                )
                for step in message.ensemble_scheduling.step
            ),
            message=message,
        )

    @property
    def is_ensemble(self) -> bool:
        return self.platform == "ensemble"

    @property
    def kind(self) -> str:
        """What metadata calls the platform: `platform`, or the backend where there is none."""
        return self.platform or self.backend

    def with_io(self, inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]) -> ModelConfig:
        """The same configuration with these inputs and outputs, in both forms.

        What else the configuration says of a tensor of the same name (labels, format) is kept.
        """
        message = pb.ModelConfig()
        message.CopyFrom(self.message)
        _rewrite(message.input, self.message.input, inputs)
        _rewrite(message.output, self.message.output, outputs)
        return ModelConfig.of(message)

    def full_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """The shape that requests carry: with -1 for the batch in front where there is one."""
        return (-1, *spec.shape) if self.max_batch_size > 0 else spec.shape


def _rewrite(target: Any, source: Any, specs: Iterable[TensorSpec]) -> None:
    said = {tensor.name: tensor for tensor in source}
    del target[:]
    for spec in specs:
        tensor = target.add()
        if spec.name in said:
            tensor.CopyFrom(said[spec.name])
        tensor.name = spec.name
        tensor.data_type = pb.DataType.Value(spec.datatype.config_name)
        tensor.dims[:] = spec.shape


def _specs(tensors: Iterable[Any]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(tensor.name, datatype, tuple(tensor.dims))
        for tensor in tensors
        if (datatype := DataType.from_config(pb.DataType.Name(tensor.data_type))) is not None
    )
