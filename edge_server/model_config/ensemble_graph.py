"""The data-flow graph of an ensemble, checked by itself and against its members."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import ModelConfigError
from edge_server.model_config.parse import unified
from edge_server.tensors import shape_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from edge_server.model_config.config import EnsembleStep, ModelConfig
    from edge_server.tensors import DataType

    FindMember = Callable[[EnsembleStep], ModelConfig]
    Members = list[tuple[EnsembleStep, ModelConfig]]
    _Shape = tuple[int, ...]

# Ensembles within ensembles multiply: 31 levels of two steps each are 2^31 runs for one request.
MOST_RUNS = 1000
# A step calls the next level's on its own stack.
_MOST_LEVELS = 32


def ensemble_faults(message: Any) -> Iterator[str]:
    """Yield the faults of an ensemble's configuration that show without its members."""
    name, steps = message.name, message.ensemble_scheduling.step
    if not message.HasField("ensemble_scheduling"):
        yield f"ensemble scheduling must be set for ensemble {name} whose platform is ensemble"
    elif not steps:
        yield f"must specify 'step' for ensemble '{name}'"
    if message.instance_group:
        yield f"instance group should not be specified for ensemble '{name}'"
    if message.HasField("optimization"):
        yield f"optimization should not be specified for ensemble '{name}'"
    if message.model_warmup:
        yield f"model_warmup can not be specified for ensemble '{name}'"
    if not message.input or not message.output:
        yield f"ensemble '{name}' must specify its 'input' and 'output' tensors"
    inputs = {tensor.name for tensor in message.input}
    written: set[str] = set()
    for index, step in enumerate(steps):
        for field in ("model_name", "input_map", "output_map"):
            if not getattr(step, field):
                yield f"must specify '{field}' in step {index} of ensemble '{name}'"
        for tensor in step.output_map.values():
            if tensor in written:
                yield (
                    f"ensemble tensor '{tensor}' can appear in an output map only once for "
                    f"ensemble '{name}' step {index}"
                )
            if tensor in inputs:
                yield (
                    f"ensemble tensor '{tensor}' is an input of ensemble '{name}', so it cannot "
                    f"appear in the output map of step {index}"
                )
            written.add(tensor)


def resolve_graph(config: ModelConfig, path: Path, find_member: FindMember) -> ModelConfig:
    """Complete the ensemble's configuration from its members: decoupled steps (one makes the
    ensemble decoupled), labels, steps on a GPU, and how many steps a request runs. `find_member`
    returns a step's model configuration, or raises its own error. Raises ModelConfigError in
    Triton's words."""
    members = [(step, find_member(step)) for step in config.steps]
    for fault in _graph_faults(config, members):
        raise ModelConfigError(f"{path}: {fault}")
    decoupled = any(member.decoupled for _, member in members)
    batched = {each.max_batch_size > 0 for each in (config, *(member for _, member in members))}
    message = pb.ModelConfig()
    message.CopyFrom(config.message)
    message.model_transaction_policy.decoupled = decoupled
    return replace(
        config,
        steps=tuple(
            replace(
                step,
                decoupled=member.decoupled,
                full_shapes={spec.name: member.full_shape(spec) for spec in member.inputs}
                if len(batched) > 1
                else {},
                runs=1 + member.runs,
                depth=1 + member.depth,
                on_gpu=member.on_gpu,
            )
            for step, member in members
        ),
        decoupled=decoupled,
        # The ensemble's own labels override those of its members.
        labels={
            **{
                tensor: member.labels[name]
                for step, member in members
                for name, tensor in step.output_map.items()
                if name in member.labels
            },
            **config.labels,
        },
        message=message,
    )


def _graph_faults(config: ModelConfig, members: Members) -> Iterator[str]:
    if (runs := sum(1 + member.runs for _, member in members)) > MOST_RUNS:
        yield (
            f"ensemble '{config.name}' runs {runs} steps for one request, those of the ensembles "
            f"within included; {MOST_RUNS} are the most: use fewer steps"
        )
    if (levels := 1 + max((member.depth for _, member in members), default=0)) > _MOST_LEVELS:
        yield (
            f"ensemble '{config.name}' has {levels} levels of ensembles within each other; "
            f"{_MOST_LEVELS} are the most: let it call the innermost models itself"
        )
    yield from _mapping_faults(config, members)
    order = _run_order(config)
    yield from _connection_faults(config, order)
    yield from _agreement_faults(config, members)
    yield from _decoupled_faults(config, [members[index] for index in order])
    if config.response_cache and any(member.decoupled for _, member in members):
        yield (
            f"Response Cache does not currently support model {config.name} with 'decoupled' "
            "transaction policy. Please disable the response cache."
        )


def _mapping_faults(config: ModelConfig, members: Members) -> Iterator[str]:
    where = f"in ensemble {config.name}"
    for step, member in members:
        inputs = {spec.name for spec in member.inputs}
        required = {spec.name for spec in member.inputs if not spec.optional}
        outputs = {spec.name for spec in member.outputs}
        for name, tensor in step.input_map.items():
            if name not in inputs:
                yield (
                    f"{where}, ensemble tensor {tensor} is mapping to non-existing input {name} "
                    f"in model {member.name}"
                )
        for name, tensor in step.output_map.items():
            if name not in outputs:
                yield (
                    f"{where}, ensemble tensor {tensor} is mapped from non-existing output {name} "
                    f"in model {member.name}"
                )
        for name in sorted(required - step.input_map.keys()):
            yield (
                f"{where}, input {name} in model {member.name} is not mapped to any "
                "ensemble tensors"
            )
    for _, member in members:
        if 0 < member.max_batch_size < config.max_batch_size:
            yield (
                f"ensemble {config.name} allows maximum batch size {config.max_batch_size}, but "
                f"it contains model {member.name} which only allows maximum batch size to be "
                f"{member.max_batch_size}"
            )


def _run_order(config: ModelConfig) -> list[int]:
    """The indices of the steps that can run, each after those that write its inputs."""
    order: list[int] = []
    written = {spec.name for spec in config.inputs}
    waiting = dict(enumerate(config.steps))
    while ready := [
        i for i, step in waiting.items() if written.issuperset(step.input_map.values())
    ]:
        for index in ready:
            written.update(waiting.pop(index).output_map.values())
        order += ready
    return order


def _connection_faults(config: ModelConfig, order: list[int]) -> Iterator[str]:
    name, steps = config.name, config.steps
    read = {tensor for step in steps for tensor in step.input_map.values()}
    outputs = {spec.name for spec in config.outputs}
    written = {spec.name for spec in config.inputs}
    written |= {tensor for index in order for tensor in steps[index].output_map.values()}
    # The steps that can never run, and the first tensor that each of them misses.
    stuck = [
        (step, min(set(step.input_map.values()) - written))
        for index, step in enumerate(steps)
        if index not in order
    ]
    for spec in config.inputs:
        if spec.name not in read:
            yield f"ensemble input '{spec.name}' for ensemble {name}' is not used"
    for spec in config.outputs:
        if spec.name in written:
            continue
        missing = [tensor for step, tensor in stuck if spec.name in step.output_map.values()]
        reason = (
            f": at least one of its depending tensors, '{missing[0]}', is not connected"
            if missing
            else ""
        )
        yield f"output '{spec.name}' for ensemble '{name}' is not written{reason}"
    for step, tensor in stuck:
        yield (
            f"ensemble '{name}': step of model '{step.model_name}' can never run, no step and no "
            f"input gives tensor '{tensor}'"
        )
    for step in steps:
        for tensor in step.output_map.values():
            if tensor not in read and tensor not in outputs:
                yield f"ensemble tensor '{tensor}' is unused in ensemble '{name}'"


def _agreement_faults(config: ModelConfig, members: Members) -> Iterator[str]:
    """All declarations of an ensemble tensor must agree pairwise on the type, and on the shape
    either without or with the batch dimension: -1 fits any one size."""
    # Tensor → type, dims and full shape → the first model that declares the tensor so.
    declared: dict[str, dict[tuple[DataType, _Shape, _Shape], str]] = {}
    for tensor, model, datatype, dims, shape in _declarations(config, members):
        others = declared.setdefault(tensor, {})
        if (datatype, dims, shape) in others:
            continue
        for (old_type, old_dims, old_shape), old_model in others.items():
            where = f"in ensemble {config.name}, ensemble tensor {tensor}"
            if old_type is not datatype:
                yield (
                    f"{where}: inconsistent data type: {old_type.config_name} is inferred from "
                    f"model {old_model} while {datatype.config_name} is inferred from model {model}"
                )
            elif unified(old_dims, dims) is None and unified(old_shape, shape) is None:
                yield (
                    f"{where}: inconsistent shape: {shape_text(old_shape)} is inferred from model "
                    f"{old_model} while {shape_text(shape)} is inferred from model {model}"
                )
        others[datatype, dims, shape] = model


def _declarations(
    config: ModelConfig, members: Members
) -> Iterator[tuple[str, str, DataType, _Shape, _Shape]]:
    """Yield each declaration of an ensemble tensor: the tensor, the model that declares it, type,
    dims, and the shape with the batch dimension."""
    for spec in (*config.inputs, *config.outputs):
        # The steps get the ensemble's own tensors in their reshaped form.
        inside = replace(spec, shape=config.model_shape(spec))
        yield spec.name, config.name, spec.datatype, inside.shape, config.full_shape(inside)
    for step, member in members:
        for specs, tensors in ((member.outputs, step.output_map), (member.inputs, step.input_map)):
            for spec in specs:
                if spec.name in tensors:
                    shape = member.full_shape(spec)
                    yield tensors[spec.name], member.name, spec.datatype, spec.shape, shape


def _decoupled_faults(config: ModelConfig, members: Members) -> Iterator[str]:
    """Tensors that are read together must come once per request, or per response of one model.

    The ensemble's outputs are read together too.

    Args:
        members: in the order in which they can run.
    """
    # Tensor → index of the decoupled step whose responses it comes with; None is once per request.
    origins: dict[str, int | None] = {spec.name: None for spec in config.inputs}
    readers: list[tuple[str, Iterable[str]]] = [
        (member.name, step.input_map.values()) for step, member in members
    ]
    readers.append((config.name, [spec.name for spec in config.outputs]))
    for index, (reader, tensors) in enumerate(readers):
        found = {origins.get(tensor) for tensor in tensors} - {None}
        if len(found) > 1:
            yield (
                f"in ensemble {config.name}, step of model '{reader}' receives inputs originated "
                "from different decoupled models"
            )
        if index < len(members):
            step, member = members[index]
            origin = index if member.decoupled else next(iter(found), None)
            origins.update(dict.fromkeys(step.output_map.values(), origin))
