"""The rules for `input` and `output`; the texts are Triton's."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.tensors import element_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Backends whose modules define all tensors.
_FIXED_TENSORS = frozenset({"image_preprocess", "lane_decode"})


def io_faults(message: Any, *, complete: bool) -> Iterator[str]:
    """Yield the faults of the configuration's inputs and outputs.

    Args:
        complete: every tensor must have its type and its dims; else a backend may fill them in.
    """
    for kind in ("input", "output"):
        names: set[str] = set()
        for tensor in getattr(message, kind):
            yield from _name_faults(tensor, kind, names, message.name)
            yield from _tensor_faults(message, tensor, kind, complete=complete)
            names.add(tensor.name)
    reshaped = {t.name: _reshape(t) for t in message.input}
    for tensor in message.output:
        if reshaped.get(tensor.name, _reshape(tensor)) != _reshape(tensor):
            yield (
                f"model output '{tensor.name}' has another 'reshape' than the input of that name "
                f"for {message.name}; give one of them another name"
            )


def _name_faults(tensor: Any, kind: str, names: set[str], model: str) -> Iterator[str]:
    if not tensor.name:
        yield f"model {kind} must specify 'name' for {model}"
    elif tensor.name in names:
        yield f"model {kind} '{tensor.name}' is given more than once for {model}"


def _tensor_faults(message: Any, tensor: Any, kind: str, *, complete: bool) -> Iterator[str]:
    model, where = message.name, f"model {kind} '{tensor.name}'"
    if complete and tensor.data_type == pb.TYPE_INVALID:
        yield f"{where} must specify 'data_type' for {model}; for example TYPE_FP32"
    if complete and not tensor.dims:
        yield f"{where} must specify 'dims' for {model}"
    if not _are_dims(tensor.dims):
        yield (
            f"{where} dimension must be integer >= 1, or -1 to indicate a variable-size "
            f"dimension for {model}"
        )
    elif tensor.HasField("reshape"):
        for fault in _reshape_faults(message, tensor):
            yield f"{where} {fault} for {model}"
    if kind == "input" and tensor.format and len(tensor.dims) != 3:
        yield f"model input NHWC/NCHW require 3 dims for {model}"
    yield from _platform_faults(message, tensor, kind)


def _platform_faults(message: Any, tensor: Any, kind: str) -> Iterator[str]:
    model = message.name
    if tensor.is_shape_tensor and message.platform != "tensorrt_plan":
        yield f"shape tensors are only supported for TensorRT platform for {model}"
    if tensor.is_non_linear_format_io:
        if message.platform != "tensorrt_plan":
            yield f"Non-linear IO format is only supported for the TensorRT platform for {model}"
        elif len(tensor.dims) != 3:
            yield f"Non-linear IO format {kind} requires 3 dims for {model}"
    if message.backend in _FIXED_TENSORS:
        for field in ("reshape", "optional"):
            if any(descriptor.name == field for descriptor, _ in tensor.ListFields()):
                yield (
                    f"model {kind} '{tensor.name}' has '{field}', which backend "
                    f"'{message.backend}' does not support, for {model}; remove it"
                )


def _reshape_faults(message: Any, tensor: Any) -> Iterator[str]:
    dims, reshape = list(tensor.dims), list(tensor.reshape.shape)
    if not _are_dims(reshape):
        yield (
            "reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension"
        )
    elif not reshape and message.max_batch_size == 0:
        yield (
            "cannot have empty reshape for non-batching model as scalar tensors are not supported"
        )
    elif dims.count(-1) != reshape.count(-1):
        yield "has different number of variable-size dimensions for dims and reshape"
    elif _counts_between_free(dims) != _counts_between_free(reshape):
        yield "has different size for dims and reshape"
    elif reshape.count(-1) > 1:
        yield "has a reshape with more than one variable-size dimension, which is not supported"


def _counts_between_free(shape: Sequence[int]) -> list[int]:
    """Elements before, between and after the free dimensions: a reshape moves none across."""
    counts = [1]
    for free, sizes in groupby(shape, lambda size: size == -1):
        if free:
            counts += [1 for _ in sizes]
        else:
            counts[-1] = element_count(sizes)
    return counts


def _are_dims(dims: Sequence[int]) -> bool:
    return all(dim >= 1 or dim == -1 for dim in dims)


def _reshape(tensor: Any) -> tuple[int, ...] | None:
    return tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None
