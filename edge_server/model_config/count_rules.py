"""Limits on every list of a configuration, and on the sizes that its numbers ask for.

A configuration comes from the repository, and with `load_model` from a client. A page of text
must not make the server allocate until its memory is exhausted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.model_config.fields import fields_of
from edge_server.tensors import DataType, element_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MOST_ENTRIES = 1024
# numpy's own limit is 32, and one is the batch.
MOST_DIMS = 31
# Resources exist per instance.
_MOST_RESOURCES = 64
# A graph holds device memory for as long as the model is loaded.
_MOST_GRAPHS = 64
_MOST_SAMPLES = 64
_MOST_RUNS_OF_A_SAMPLE = 10_000
MOST_SAMPLE_BYTES = 1 << 30
MOST_STATE_BYTES = 1 << 28
# A Python object of `bytes` and the reference to it.
_TEXT_BYTES = 64

_GRAPH = "optimization.cuda.graph_spec"
_MOST_ENTRIES_OF = {
    **dict.fromkeys(
        (
            "input.dims",
            "output.dims",
            "input.reshape.shape",
            "output.reshape.shape",
            "sequence_batching.state.dims",
            "sequence_batching.state.initial_state.dims",
            "model_warmup.inputs.dims",
            f"{_GRAPH}.input.dim",
            f"{_GRAPH}.graph_lower_bound.input.dim",
        ),
        MOST_DIMS,
    ),
    "instance_group.rate_limiter.resources": _MOST_RESOURCES,
    _GRAPH: _MOST_GRAPHS,
    "model_warmup": _MOST_SAMPLES,
}


def list_faults(message: Any) -> Iterator[str]:
    """Yield the lists that are too long; the other rules iterate over them."""
    for path, shown, descriptor, value in fields_of(message):
        if descriptor.is_repeated:
            most = _MOST_ENTRIES_OF.get(path, MOST_ENTRIES)
            if len(value) > most:
                yield f"field '{shown}' has {len(value)} entries; at most {most} can be"


def size_faults(message: Any) -> Iterator[str]:
    """Yield samples and states that need too much time or memory; lists are checked before."""
    name = message.name
    for sample in message.model_warmup:
        if sample.count > _MOST_RUNS_OF_A_SAMPLE:
            yield (
                f"warm-up sample '{sample.name}' for {name} has count {sample.count}; at most "
                f"{_MOST_RUNS_OF_A_SAMPLE} can be"
            )
    sample_bytes = sum(
        max(1, sample.batch_size) * _bytes(tensor.data_type, tensor.dims)
        for sample in message.model_warmup
        for tensor in sample.inputs.values()
    )
    if sample_bytes > MOST_SAMPLE_BYTES:
        yield (
            f"the warm-up samples for {name} take {sample_bytes} bytes; together they can have "
            f"{MOST_SAMPLE_BYTES}; make their dims or batch_size smaller"
        )
    state_bytes = sum(
        max(
            _bytes(state.data_type, dims)
            for dims in (state.dims, *(initial.dims for initial in state.initial_state))
        )
        for state in message.sequence_batching.state
    )
    if state_bytes > MOST_STATE_BYTES:
        yield (
            f"the sequence batching states for {name} take {state_bytes} bytes; together they can "
            f"have {MOST_STATE_BYTES}; make their dims smaller"
        )


def _bytes(data_type: int, dims: Iterable[int]) -> int:
    """The minimum size of a tensor; one that other rules refuse counts as small."""
    known = data_type in pb.DataType.values()
    datatype = DataType.from_config(pb.DataType.Name(data_type)) if known else None
    if datatype is None:
        return 0
    item_bytes = _TEXT_BYTES if datatype is DataType.BYTES else datatype.numpy.itemsize
    return item_bytes * element_count([max(dim, 1) for dim in dims])
