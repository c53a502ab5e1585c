"""The rules for `sequence_batching`; the texts are Triton's where it has one."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.model_config.fields import datatype_of
from edge_server.model_config.files import INITIAL_STATE_DIRECTORY, outside
from edge_server.model_config.tensor_rules import are_dims
from edge_server.tensors import shape_fits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from edge_server.model_config.files import ModelFiles

_CORRID = pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_CORRID
_CORRID_TYPES = frozenset(
    {pb.TYPE_UINT64, pb.TYPE_INT64, pb.TYPE_UINT32, pb.TYPE_INT32, pb.TYPE_STRING}
)
_VALUES = ("int32_false_true", "fp32_false_true", "bool_false_true")


def sequence_faults(message: Any, files: ModelFiles) -> Iterator[str]:
    """Yield the faults of a completed configuration's sequence batcher, where it has one."""
    if not message.HasField("sequence_batching"):
        return
    batching = message.sequence_batching
    own = {tensor.name for tensor in batching.control_input}
    own |= {state.input_name for state in batching.state}
    for fault in (
        *_strategy_faults(batching, message.max_batch_size),
        *_control_faults(batching),
        *_state_faults(batching, files.directory / INITIAL_STATE_DIRECTORY),
    ):
        yield f"{fault} for {message.name}"
    for tensor in batching.control_input:
        for control in tensor.control:
            if control.kind == _CORRID and control.data_type not in _CORRID_TYPES:
                yield (
                    f"unexpected data type for control {_kind(_CORRID)} for {message.name}. "
                    "Allowed data types are TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and "
                    "TYPE_STRING"
                )
    for tensor in message.input:
        if tensor.name in own:
            yield (
                f"model input '{tensor.name}' is the sequence batcher's to fill in for "
                f"{message.name}; remove it from 'input'"
            )


def preferred_size_faults(what: str, sizes: Sequence[int], max_batch_size: int) -> Iterator[str]:
    """Yield the faults of a batcher's preferred batch sizes, which `what` names."""
    if any(size < 1 for size in sizes):
        yield f"{what} must be positive"
    if any(size > max_batch_size for size in sizes):
        yield f"{what} must be <= max batch size"


def _strategy_faults(batching: Any, max_batch_size: int) -> Iterator[str]:
    oldest = batching.oldest
    if batching.HasField("oldest"):
        what = "sequence batching preferred batch size"
        yield from preferred_size_faults(what, oldest.preferred_batch_size, max_batch_size)
        if oldest.max_candidate_sequences < 1:
            yield "sequence batching max candidate sequences must be positive"
    # The default, 0, stands for a value that was not given.
    elif not 0.0 <= batching.direct.minimum_slot_utilization <= 1.0:
        yield "sequence batching minimum slot utilization must be in range (0.0, 1.0]"


def _control_faults(batching: Any) -> Iterator[str]:
    tensors = Counter(tensor.name for tensor in batching.control_input)
    for tensor in batching.control_input:
        where = f"sequence batching control tensor '{tensor.name}'"
        if not tensor.name:
            yield "sequence batching control tensor must have a name"
        elif not tensor.control:
            yield f"{where} specifies no control"
        elif tensors[tensor.name] > 1 or len(tensor.control) > 1:
            yield f"{where} is specified for multiple control kinds"
    controls = [control for tensor in batching.control_input for control in tensor.control]
    for kind, count in Counter(control.kind for control in controls).items():
        if count > 1:
            yield f"sequence batching specifies multiple {_kind(kind)} tensors"
    for control in controls:
        yield from _value_faults(control)


def _value_faults(control: Any) -> Iterator[str]:
    kind = _kind(control.kind)
    if control.kind == _CORRID:
        return
    given = [field for field in _VALUES if getattr(control, field)]
    fields = "'int32_false_true', 'fp32_false_true' {} 'bool_false_true'"
    if not given:
        yield f"sequence batching must specify either {fields.format('or')} for {kind}"
    elif len(given) > 1:
        yield f"sequence batching specifies more than one from {fields.format('and')} for {kind}"
    for field in given:
        if len(getattr(control, field)) != 2:
            yield f"sequence batching control '{field}' must have exactly 2 entries for {kind}"


def _kind(number: int) -> str:
    kinds = pb.ModelSequenceBatching.Control.Kind
    return str(kinds.Name(number)) if number in kinds.values() else str(number)


def _state_faults(batching: Any, directory: Path) -> Iterator[str]:
    taken: set[tuple[str, str]] = set()
    for state in batching.state:
        where = f"sequence batching state '{state.input_name}'"
        if not state.input_name or not state.output_name:
            yield "sequence batching state must have 'input_name' and 'output_name'"
        for side, name in (("input", state.input_name), ("output", state.output_name)):
            if (side, name) in taken:
                yield f"{where}: {side} '{name}' is another state's already"
            taken.add((side, name))
        if datatype_of(state.data_type) is None:
            yield f"{where} must specify 'data_type'"
        if not state.dims or not are_dims(state.dims):
            yield (
                f"{where} must specify 'dims', integers >= 1, or -1 to indicate a variable-size "
                "dimension"
            )
        if len(state.initial_state) > 1:
            yield f"{where} has more than one 'initial_state'"
        for initial in state.initial_state:
            yield from _initial_state_faults(state, initial, where, directory)


def _initial_state_faults(state: Any, initial: Any, where: str, directory: Path) -> Iterator[str]:
    shape = tuple(initial.dims)
    if initial.data_type != state.data_type:
        yield f"{where} and its 'initial_state' have different 'data_type'"
    if not (all(size >= 1 for size in shape) and shape_fits(shape, tuple(state.dims))):
        yield (
            f"{where}: 'initial_state' must have the state's 'dims', with every variable-size "
            "dimension specified,"
        )
    choice = initial.WhichOneof("state_data")
    if choice is None:
        yield f"{where}: 'initial_state' must have 'zero_data' or 'data_file'"
    elif choice == "data_file" and outside(directory, initial.data_file):
        yield f"{where}: 'data_file' '{initial.data_file}' is outside {directory}"
