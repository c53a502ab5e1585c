"""The data-flow graph of an ensemble, checked against its members before it is published."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import ModelConfigError
from edge_server.model_config.shapes import unified
from edge_server.tensors import shape_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from edge_server.model_config.config import EnsembleStep, ModelConfig
    from edge_server.tensors import TensorSpec

    FindMember = Callable[[EnsembleStep], ModelConfig]


@dataclass(frozen=True)
class _End:
    """One end of an edge: the ensemble tensor as `model` declares it, batch dimension included."""

    model: str
    spec: TensorSpec
    shape: tuple[int, ...]


def resolve_graph(config: ModelConfig, path: Path, find_member: FindMember) -> ModelConfig:
    """Complete the ensemble's configuration from its members: decoupled steps, and labels.

    An ensemble with a decoupled member is decoupled itself.

    Args:
        config: of the ensemble.
        path: of its config.pbtxt.
        find_member: returns a step's model configuration; raises its own error without one.

    Raises:
        ModelConfigError: the first fault of the graph, in Triton's words.
    """
    members = [(step, find_member(step)) for step in config.steps]
    for fault in (
        *_mapping_faults(config, members),
        *_batch_faults(config, members),
        *_connection_faults(config),
        *_agreement_faults(config, members),
        *_decoupled_faults(config, members),
    ):
        raise ModelConfigError(f"{path}: {fault}")
    decoupled = any(member.decoupled for _, member in members)
    if decoupled and config.response_cache:
        raise ModelConfigError(
            f"{path}: Response Cache does not currently support model {config.name} with "
            "'decoupled' transaction policy. Please disable the response cache."
        )
    message = pb.ModelConfig()
    message.CopyFrom(config.message)
    if decoupled or message.HasField("model_transaction_policy"):
        message.model_transaction_policy.decoupled = decoupled
    return replace(
        config,
        steps=tuple(replace(step, decoupled=member.decoupled) for step, member in members),
        decoupled=decoupled,
        labels=_labels(config, members),
        message=message,
    )


def _labels(
    config: ModelConfig, members: list[tuple[EnsembleStep, ModelConfig]]
) -> dict[str, Sequence[str]]:
    """The members' labels for the ensemble's outputs; the ensemble's own labels override them."""
    found = {
        tensor: member.labels[name]
        for step, member in members
        for name, tensor in step.output_map.items()
        if name in member.labels
    }
    return {**found, **config.labels}


def _decoupled_faults(
    config: ModelConfig, members: list[tuple[EnsembleStep, ModelConfig]]
) -> Iterator[str]:
    """Tensors that are read together must come once per request, or per response of one model.

    The ensemble's outputs are read together too.
    """
    # Tensor → index of the decoupled step whose responses it comes with; None is once per request.
    origins: dict[str, int | None] = {spec.name: None for spec in config.inputs}
    waiting = list(enumerate(members))
    while ready := [
        entry for entry in waiting if origins.keys() >= set(entry[1][0].input_map.values())
    ]:
        for place, (step, member) in ready:
            waiting.remove((place, (step, member)))
            origin = _one_origin(origins[tensor] for tensor in step.input_map.values())
            if origin == _SEVERAL:
                yield _of_several(config, member.name)
            origin = place if member.decoupled else origin
            origins.update(dict.fromkeys(step.output_map.values(), origin))
    if _one_origin(origins.get(spec.name) for spec in config.outputs) == _SEVERAL:
        yield _of_several(config, config.name)


_SEVERAL = -1


def _one_origin(origins: Iterable[int | None]) -> int | None:
    """The only origin beside None; `_SEVERAL` for several."""
    found = {origin for origin in origins if origin is not None}
    return _SEVERAL if len(found) > 1 else next(iter(found), None)


def _of_several(config: ModelConfig, reader: str) -> str:
    return (
        f"in ensemble {config.name}, step of model '{reader}' receives inputs originated from "
        "different decoupled models"
    )


def _mapping_faults(
    config: ModelConfig, members: list[tuple[EnsembleStep, ModelConfig]]
) -> Iterator[str]:
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


def _batch_faults(
    config: ModelConfig, members: list[tuple[EnsembleStep, ModelConfig]]
) -> Iterator[str]:
    for _, member in members:
        if 0 < member.max_batch_size < config.max_batch_size:
            yield (
                f"ensemble {config.name} allows maximum batch size {config.max_batch_size}, but "
                f"it contains model {member.name} which only allows maximum batch size to be "
                f"{member.max_batch_size}"
            )


def _connection_faults(config: ModelConfig) -> Iterator[str]:
    name = config.name
    read = {tensor for step in config.steps for tensor in step.input_map.values()}
    outputs = {spec.name for spec in config.outputs}
    for spec in config.inputs:
        if spec.name not in read:
            yield f"ensemble input '{spec.name}' for ensemble {name}' is not used"
    # The computable tensors: the inputs, then every output of a step with computable inputs.
    written = {spec.name for spec in config.inputs}
    waiting = list(config.steps)
    while ready := [step for step in waiting if written.issuperset(step.input_map.values())]:
        for step in ready:
            written.update(step.output_map.values())
            waiting.remove(step)
    for spec in config.outputs:
        if spec.name not in written:
            yield (
                f"output '{spec.name}' for ensemble '{name}' is not written"
                f"{_missing_source(spec.name, waiting, written)}"
            )
    for step in waiting:
        missing = sorted(set(step.input_map.values()) - written)
        yield (
            f"ensemble '{name}': step of model '{step.model_name}' can never run, no step and no "
            f"input gives tensor '{missing[0]}'"
        )
    for step in config.steps:
        for tensor in step.output_map.values():
            if tensor not in read and tensor not in outputs:
                yield f"ensemble tensor '{tensor}' is unused in ensemble '{name}'"


def _missing_source(output: str, waiting: list[EnsembleStep], written: set[str]) -> str:
    for step in waiting:
        if output in step.output_map.values():
            missing = sorted(set(step.input_map.values()) - written)
            return (
                f": at least one of its depending tensors, '{missing[0]}', is not connected"
                if missing
                else ""
            )
    return ""


def _agreement_faults(
    config: ModelConfig, members: list[tuple[EnsembleStep, ModelConfig]]
) -> Iterator[str]:
    """All ends of an edge must agree on type and shape, pairwise: -1 fits any one size."""
    ends: dict[str, list[_End]] = {}
    seen = set()
    for tensor, new in _ends(config, members):
        said = (tensor, new.spec.datatype, new.shape)
        if said in seen:
            # The same declaration as the end before, which was compared with the others.
            continue
        seen.add(said)
        for old in ends.setdefault(tensor, []):
            where = f"in ensemble {config.name}, ensemble tensor {tensor}"
            if old.spec.datatype != new.spec.datatype:
                yield (
                    f"{where}: inconsistent data type: {old.spec.datatype.config_name} is "
                    f"inferred from model {old.model} while {new.spec.datatype.config_name} is "
                    f"inferred from model {new.model}"
                )
            elif unified(old.shape, new.shape) is None:
                yield (
                    f"{where}: inconsistent shape: {shape_text(old.shape)} is inferred from "
                    f"model {old.model} while {shape_text(new.shape)} is inferred from "
                    f"model {new.model}"
                )
        ends[tensor].append(new)


def _ends(
    config: ModelConfig, members: list[tuple[EnsembleStep, ModelConfig]]
) -> Iterator[tuple[str, _End]]:
    """Yield every end of every edge, with the name of its ensemble tensor."""
    for spec in (*config.inputs, *config.outputs):
        # The steps get the ensemble's own tensors in their reshaped form.
        inside = replace(spec, shape=config.reshapes.get(spec.name, spec.shape))
        yield spec.name, _End(config.name, inside, config.full_shape(inside))
    for step, member in members:
        for specs, tensors in ((member.outputs, step.output_map), (member.inputs, step.input_map)):
            for spec in specs:
                if spec.name in tensors:
                    yield tensors[spec.name], _End(member.name, spec, member.full_shape(spec))
