"""The interface of a model towards its callers, and whether a new configuration breaks it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.tensors import shape_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from edge_server.model_config.config import ModelConfig
    from edge_server.tensors import TensorSpec

# A key of `parameters` in config.pbtxt: "true" declares that the callers know of the change.
ALLOW_INTERFACE_CHANGE = "allow_interface_change"


def interface_break(old: ModelConfig, new: ModelConfig) -> str:
    """Why callers of `old` would break if `new` replaced it; empty where they would not.

    Extensions are allowed: another output, another optional input, an input that becomes optional,
    a dimension that becomes -1, larger batches.
    """
    return next(_breaks(old, new), "")


def tensor_break(old: ModelConfig, new: ModelConfig, names: Collection[str]) -> str:
    """As `interface_break`, for these tensors only, and for other inputs that `new` requires."""
    return next((text for text in _tensor_breaks(old, new, names)), "")


def _breaks(old: ModelConfig, new: ModelConfig) -> Iterator[str]:
    yield from _tensor_breaks(old, new, old.input_names | old.output_names)
    if 0 < new.max_batch_size < old.max_batch_size:
        yield f"max_batch_size is {new.max_batch_size}, was {old.max_batch_size}"
    if new.decoupled and not old.decoupled:
        yield "it is decoupled now, which only streams can call"
    if new.sequence_batching is not None and old.sequence_batching is None:
        yield "its requests need a correlation id now"


def _tensor_breaks(old: ModelConfig, new: ModelConfig, names: Collection[str]) -> Iterator[str]:
    inputs = {spec.name: spec for spec in new.inputs}
    outputs = {spec.name: spec for spec in new.outputs}
    for was in old.inputs:
        if was.name in names:
            yield from _input_breaks(old, new, was, inputs.get(was.name))
    for spec in new.inputs:
        if spec.name not in old.input_names and not spec.optional:
            yield f"input '{spec.name}' is new and not optional"
    for was in old.outputs:
        if was.name in names:
            yield from _output_breaks(old, new, was, outputs.get(was.name))


def _input_breaks(
    old: ModelConfig, new: ModelConfig, was: TensorSpec, now: TensorSpec | None
) -> Iterator[str]:
    title = f"input '{was.name}'"
    if now is None:
        yield f"{title} is gone"
        return
    yield from _type_breaks(title, was, now)
    if was.optional and not now.optional:
        yield f"{title} is not optional any more"
    before, after = old.full_shape(was), new.full_shape(now)
    fits = len(before) == len(after) and all(
        a in (b, -1) for b, a in zip(before, after, strict=True)
    )
    if fits and new.max_batch_size > 0 and old.max_batch_size == 0:
        # The former free first dimension becomes the batch, which is limited.
        fits = 1 <= before[0] <= new.max_batch_size
    if not fits:
        yield f"{title} has shape {shape_text(after)}, had {shape_text(before)}"


def _output_breaks(
    old: ModelConfig, new: ModelConfig, was: TensorSpec, now: TensorSpec | None
) -> Iterator[str]:
    title = f"output '{was.name}'"
    if now is None:
        yield f"{title} is gone"
        return
    yield from _type_breaks(title, was, now)
    before, after = old.full_shape(was), new.full_shape(now)
    # A caller that accepts any size accepts one; -1 may still be the former size.
    fits = len(before) == len(after) and all(
        a == b or -1 in (a, b) for b, a in zip(before, after, strict=True)
    )
    if not fits:
        yield f"{title} has shape {shape_text(after)}, had {shape_text(before)}"


def _type_breaks(title: str, was: TensorSpec, now: TensorSpec) -> Iterator[str]:
    if was.datatype is not now.datatype:
        yield f"{title} is {now.datatype.value}, was {was.datatype.value}"
