"""Ragged batches: requests of different shapes that run together, and the tensors that tell the
model where each of them begins."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.model_config.fields import datatype_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_server.tensors import DataType

# An ONNX model gets the requests in one tensor; a Python model gets each request by itself.
_RAGGED_BACKENDS = frozenset({"onnxruntime", "python"})


class BatchInputKind(Enum):
    """What a batch input says of the requests of a batch; the names are Triton's."""

    ELEMENT_COUNT = "BATCH_ELEMENT_COUNT"
    ACCUMULATED_ELEMENT_COUNT = "BATCH_ACCUMULATED_ELEMENT_COUNT"
    ACCUMULATED_ELEMENT_COUNT_WITH_ZERO = "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO"
    MAX_ELEMENT_COUNT_AS_SHAPE = "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE"
    ITEM_SHAPE = "BATCH_ITEM_SHAPE"
    ITEM_SHAPE_FLATTEN = "BATCH_ITEM_SHAPE_FLATTEN"


@dataclass(frozen=True)
class BatchInput:
    """Tensors that are made for each batch from the shapes of `source`, a request's input."""

    kind: BatchInputKind
    names: tuple[str, ...]
    datatype: DataType
    source: str


@dataclass(frozen=True)
class BatchOutput:
    """Outputs of a whole batch; each request gets as many elements as its input `source` says."""

    names: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class RaggedBatching:
    """How requests of different shapes become one batch.

    Attributes:
        inputs: names of those whose shapes may differ; the model gets them as one list of elements.
    """

    inputs: frozenset[str]
    batch_inputs: tuple[BatchInput, ...]
    batch_outputs: tuple[BatchOutput, ...]

    @property
    def batch_input_types(self) -> dict[str, DataType]:
        """The tensors that requests do not carry, by name."""
        return {name: each.datatype for each in self.batch_inputs for name in each.names}

    @property
    def batch_output_names(self) -> frozenset[str]:
        return frozenset(name for each in self.batch_outputs for name in each.names)


def ragged_batching_of(message: Any) -> RaggedBatching | None:
    """The ragged batching of a valid `inference.ModelConfig`, where it has some."""
    inputs = frozenset(tensor.name for tensor in message.input if tensor.allow_ragged_batch)
    if not (inputs or message.batch_input or message.batch_output):
        return None
    return RaggedBatching(
        inputs,
        tuple(map(_batch_input, message.batch_input)),
        tuple(
            BatchOutput(tuple(each.target_name), each.source_input[0])
            for each in message.batch_output
        ),
    )


def ragged_faults(message: Any) -> Iterator[str]:
    """Yield the ragged tensors that the backend of a configuration cannot take."""
    backend = message.backend
    if message.platform == "ensemble" or backend in _RAGGED_BACKENDS:
        return
    for tensor in message.input:
        if tensor.allow_ragged_batch:
            yield (
                f"model input '{tensor.name}' has 'allow_ragged_batch', which backend '{backend}' "
                f"does not support, for {message.name}; remove it, and pad the input"
            )
    for field in ("batch_input", "batch_output"):
        if getattr(message, field):
            yield (
                f"backend '{backend}' does not support '{field}', for {message.name}; remove it, "
                "or load the model as ONNX"
            )


def _batch_input(message: Any) -> BatchInput:
    datatype = datatype_of(message.data_type)
    if datatype is None:
        raise AssertionError(f"{message.data_type}: validation lets no such data type through")
    kind = BatchInputKind(pb.BatchInput.Kind.Name(message.kind))
    return BatchInput(kind, tuple(message.target_name), datatype, message.source_input[0])
