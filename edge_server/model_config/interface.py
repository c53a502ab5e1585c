"""What callers of a model rely on, and whether another configuration still gives it to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.tensors import shape_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from edge_server.model_config.config import ModelConfig
    from edge_server.tensors import TensorSpec

# In `parameters` of config.pbtxt: "true" says that callers know of what changes.
ALLOW_INTERFACE_CHANGE = "allow_interface_change"


def interface_break(old: ModelConfig, new: ModelConfig) -> str:
    """What would break those who call `old` if `new` answered them; empty where nothing would.

    More is allowed: another output, another optional input, an input that need not be given any
    more, a dimension that becomes -1, larger batches.
    """
    return next(_breaks(old, new), "")


def tensor_break(old: ModelConfig, new: ModelConfig, names: Collection[str]) -> str:
    """As `interface_break`, of these tensors only, and of inputs that `new` needs beside them."""
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
        # What was any dimension of a request is a batch, which is limited.
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
    # A caller who copes with any size copes with one; -1 may still be what it was.
    fits = len(before) == len(after) and all(
        a == b or -1 in (a, b) for b, a in zip(before, after, strict=True)
    )
    if not fits:
        yield f"{title} has shape {shape_text(after)}, had {shape_text(before)}"


def _type_breaks(title: str, was: TensorSpec, now: TensorSpec) -> Iterator[str]:
    if was.datatype is not now.datatype:
        yield f"{title} is {now.datatype.value}, was {was.datatype.value}"
