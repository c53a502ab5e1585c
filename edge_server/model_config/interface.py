"""Two declarations of a model's tensors: whether they agree, and whether one breaks callers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.tensors import shape_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_server.model_config.config import ModelConfig

# A key of `parameters` in config.pbtxt: "true" declares that the callers know of the change.
ALLOW_INTERFACE_CHANGE = "allow_interface_change"


def interface_break(old: ModelConfig, new: ModelConfig) -> str:
    """Why callers of `old` would break if `new` replaced it; empty where they would not.

    Extensions are allowed: another output, another optional input, an input that becomes optional,
    a dimension that becomes -1, larger batches.
    """
    return next(_breaks(old, new), "")


def _breaks(old: ModelConfig, new: ModelConfig) -> Iterator[str]:
    yield from _tensor_breaks(old, new)
    if 0 < new.max_batch_size < old.max_batch_size:
        yield f"max_batch_size is {new.max_batch_size}, was {old.max_batch_size}"
    if new.decoupled and not old.decoupled:
        yield "it is decoupled now, which only streams can call"
    if new.sequence_batching is not None and old.sequence_batching is None:
        yield "its requests need a correlation id now"


def _tensor_breaks(old: ModelConfig, new: ModelConfig) -> Iterator[str]:
    for kind, before, after in (
        ("input", old.inputs, new.inputs),
        ("output", old.outputs, new.outputs),
    ):
        present = {spec.name: spec for spec in after}
        for was in before:
            now = present.get(was.name)
            if now is None:
                yield f"{kind} '{was.name}' is gone"
                continue
            if was.datatype is not now.datatype:
                yield (f"{kind} '{was.name}' is {now.datatype.value}, was {was.datatype.value}")
            if was.optional and not now.optional:
                yield f"{kind} '{was.name}' is not optional any more"
            old_shape, new_shape = old.full_shape(was), new.full_shape(now)
            if not _accepted(kind, old, new, old_shape, new_shape):
                yield (
                    f"{kind} '{was.name}' has shape {shape_text(new_shape)}, had "
                    f"{shape_text(old_shape)}"
                )
        if kind == "input":
            for spec in after:
                if spec.name not in old.input_names and not spec.optional:
                    yield f"input '{spec.name}' is new and not optional"


def _accepted(
    kind: str,
    old: ModelConfig,
    new: ModelConfig,
    old_shape: tuple[int, ...],
    new_shape: tuple[int, ...],
) -> bool:
    """Whether callers of `old` can send, or take, the new shape."""
    if len(old_shape) != len(new_shape):
        return False
    pairs = list(zip(old_shape, new_shape, strict=True))
    if kind == "output":
        # A caller that accepts any size accepts one; -1 may still be the former size.
        return all(now == was or -1 in (now, was) for was, now in pairs)
    # The former free first dimension may become the batch, which is limited.
    unlimited = new.max_batch_size == 0 or old.max_batch_size > 0
    fits = unlimited or 1 <= old_shape[0] <= new.max_batch_size
    return fits and all(now in (was, -1) for was, now in pairs)


def unified(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that satisfies both declarations, a fixed size before -1, which is any size; None
    where they disagree."""
    if len(a) != len(b) or any(-1 not in (x, y) and x != y for x, y in zip(a, b, strict=True)):
        return None
    return tuple(max(x, y) for x, y in zip(a, b, strict=True))
