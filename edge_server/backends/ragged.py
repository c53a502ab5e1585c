"""An instance that runs requests of different shapes together (Triton's ragged batching)."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.backends.contract import run_joined
from edge_server.errors import InternalError
from edge_server.model_config.ragged import BatchInputKind
from edge_server.tensors import Tensor, element_count, shape_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from edge_server.backends.contract import ExecuteRequest, Phases, Run, Tensors
    from edge_server.model_config.config import ModelConfig
    from edge_server.model_config.ragged import BatchInput, RaggedBatching


class RaggedInstance:
    """An `Instance` over a function from tensors to tensors.

    A ragged input is one list of the elements of all requests, in order; other inputs are joined
    along the batch dimension. A batch of one request is made in the same way. Batch inputs are made
    from the requests' shapes. Of a batch output each request gets as many elements as the shape of
    its source input says, of other outputs its rows.

    Args:
        config: of a model with ragged batching.
    """

    def __init__(self, run: Run, config: ModelConfig, ragged: RaggedBatching) -> None:
        self._run = run
        self._batches = config.max_batch_size > 0
        self._ragged = ragged
        shapes = {spec.name: config.model_shape(spec) for spec in config.outputs}
        batch = (-1,) if self._batches else ()
        # Batch output → the shape of a request's part, and the input that its free sizes are of.
        self._scattered = {
            name: ((*batch, *shapes[name]), output.source)
            for output in ragged.batch_outputs
            for name in output.names
        }

    def execute(self, requests: Sequence[ExecuteRequest]) -> Phases:
        def split(made: Tensors, inputs: Sequence[Tensors]) -> list[Tensors]:
            return [
                {name: part[name] for name in request.outputs if name in part}
                for request, part in zip(requests, self._parts(made, inputs), strict=True)
            ]

        return run_joined(self._run, requests, self._joined, split)

    def close(self) -> None:
        """Do nothing: the instance owns no resources."""

    def _joined(self, inputs: Sequence[Tensors]) -> dict[str, Tensor]:
        joined: dict[str, Tensor] = {}
        for name in inputs[0]:
            arrays = [each[name].array for each in inputs]
            if name in self._ragged.inputs:
                arrays = [array.reshape(-1) for array in arrays]
            joined[name] = Tensor(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
        for each in self._ragged.batch_inputs:
            shapes = [tensors[each.source].shape for tensors in inputs if each.source in tensors]
            tensor = Tensor(_batch_input(each, shapes))
            joined |= dict.fromkeys(each.names, tensor)
        return joined

    def _parts(self, made: Tensors, inputs: Sequence[Tensors]) -> list[dict[str, Tensor]]:
        """Return each request's part of the batch's outputs.

        Raises:
            InternalError: an output has other elements or rows than the requests ask for.
        """
        parts: list[dict[str, Tensor]] = [{} for _ in inputs]
        for name, tensor in made.items():
            arrays = self._scatter(name, tensor, inputs) if name in self._scattered else None
            if arrays is None:
                arrays = self._rows(name, tensor, inputs)
            for part, array in zip(parts, arrays, strict=True):
                part[name] = Tensor(array)
        return parts

    def _scatter(
        self, name: str, tensor: Tensor, inputs: Sequence[Tensors]
    ) -> list[NDArray[Any]] | None:
        shape, source = self._scattered[name]
        flat = tensor.array.reshape(-1)
        shapes = [_sized(name, shape, each[source].shape) for each in inputs if source in each]
        ends = np.cumsum([0, *map(element_count, shapes)]).tolist()
        if len(shapes) < len(inputs) or ends[-1] != flat.size:
            raise InternalError(
                f"output '{name}' has {flat.size} elements; the shapes of '{source}' ask for "
                f"{ends[-1]}"
            )
        return [
            flat[begin:end].reshape(each)
            for each, (begin, end) in zip(shapes, pairwise(ends), strict=True)
        ]

    def _rows(self, name: str, tensor: Tensor, inputs: Sequence[Tensors]) -> list[NDArray[Any]]:
        if not self._batches:
            return [tensor.array]
        ends = np.cumsum([0, *(next(iter(each.values())).shape[0] for each in inputs)]).tolist()
        if not tensor.shape or tensor.shape[0] != ends[-1]:
            raise InternalError(
                f"output '{name}' has shape {shape_text(tensor.shape)} for a batch of {ends[-1]}"
            )
        return [tensor.array[begin:end] for begin, end in pairwise(ends)]


def _sized(name: str, shape: tuple[int, ...], source: tuple[int, ...]) -> tuple[int, ...]:
    """`shape` with its free sizes taken from the same places of `source`."""
    if any(size == -1 for size in shape[len(source) :]):
        raise InternalError(
            f"output '{name}' has more dimensions than its source input has: {shape_text(source)}"
        )
    return tuple(source[place] if size == -1 else size for place, size in enumerate(shape))


def _batch_input(made: BatchInput, shapes: Sequence[tuple[int, ...]]) -> NDArray[Any]:
    """Return the batch input for requests whose source inputs have these shapes."""
    counts = [element_count(shape) for shape in shapes]
    kind, dtype = made.kind, made.datatype.numpy
    if kind is BatchInputKind.MAX_ELEMENT_COUNT_AS_SHAPE:
        # The shape is the message; Triton leaves the elements as they are.
        return np.zeros(max(counts, default=0), dtype)
    values: Mapping[BatchInputKind, Any] = {
        BatchInputKind.ELEMENT_COUNT: counts,
        BatchInputKind.ACCUMULATED_ELEMENT_COUNT: np.cumsum(counts),
        BatchInputKind.ACCUMULATED_ELEMENT_COUNT_WITH_ZERO: np.cumsum([0, *counts]),
    }
    if kind in values:
        return np.array(values[kind], dtype)
    items = np.array([shape[1:] for shape in shapes for _ in range(shape[0])], dtype)
    return items.reshape(-1) if kind is BatchInputKind.ITEM_SHAPE_FLATTEN else items
