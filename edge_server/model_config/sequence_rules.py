"""The rules for `sequence_batching`; the texts are Triton's where it has one."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.model_config.fields import datatype_of
from edge_server.model_config.files import INITIAL_STATE_DIRECTORY, outside
from edge_server.model_config.tensor_rules import are_dims
from edge_server.tensors import element_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from edge_server.model_config.files import ModelFiles

_CORRID_TYPES = frozenset(
    {pb.TYPE_UINT64, pb.TYPE_INT64, pb.TYPE_UINT32, pb.TYPE_INT32, pb.TYPE_STRING}
)
_VALUES = ("int32_false_true", "fp32_false_true", "bool_false_true")


def sequence_faults(message: Any, files: ModelFiles) -> Iterator[str]:
    """Yield the faults of a completed configuration's sequence batcher, where it has one."""
    if not message.HasField("sequence_batching"):
        return
    model, batching = message.name, message.sequence_batching
    if batching.HasField("oldest"):
        what = "sequence batching preferred batch size"
        yield from preferred_size_faults(what, batching.oldest.preferred_batch_size, message)
        if batching.oldest.max_candidate_sequences < 1:
            yield f"sequence batching max candidate sequences must be positive for {model}"
    # The default, 0, stands for a value that was not given.
    elif not 0.0 <= batching.direct.minimum_slot_utilization <= 1.0:
        yield f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {model}"
    yield from _control_faults(batching, model)
    own = {tensor.name for tensor in batching.control_input}
    own |= {state.input_name for state in batching.state}
    for tensor in message.input:
        if tensor.name in own:
            yield (
                f"model input '{tensor.name}' is the sequence batcher's to fill in for {model}; "
                "remove it from 'input'"
            )
    yield from _state_faults(batching, model, files)


def preferred_size_faults(what: str, sizes: Sequence[int], message: Any) -> Iterator[str]:
    """Yield the faults of a batcher's preferred batch sizes, which `what` names."""
    if any(size < 1 for size in sizes):
        yield f"{what} must be positive for {message.name}"
    if any(size > message.max_batch_size for size in sizes):
        yield f"{what} must be <= max batch size for {message.name}"


def _control_faults(batching: Any, model: str) -> Iterator[str]:
    tensors = Counter(control_input.name for control_input in batching.control_input)
    for control_input in batching.control_input:
        name = control_input.name
        if not name:
            yield f"sequence batching control tensor must have a name for {model}"
        elif not control_input.control:
            yield f"sequence batching control tensor '{name}' specifies no control for {model}"
        elif tensors[name] > 1 or len(control_input.control) > 1:
            yield (
                f"sequence batching control tensor '{name}' is specified for multiple control "
                f"kinds for {model}"
            )
    controls = [control for tensor in batching.control_input for control in tensor.control]
    for kind, count in Counter(control.kind for control in controls).items():
        if count > 1:
            yield f"sequence batching specifies multiple {_kind(kind)} tensors for {model}"
    for control in controls:
        yield from _value_faults(control, model)


def _value_faults(control: Any, model: str) -> Iterator[str]:
    kind = _kind(control.kind)
    if control.kind == pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_CORRID:
        if control.data_type not in _CORRID_TYPES:
            yield (
                f"unexpected data type for control {kind} for {model}. Allowed data types are "
                "TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
            )
        return
    given = [field for field in _VALUES if getattr(control, field)]
    fields = "'int32_false_true', 'fp32_false_true' {} 'bool_false_true'"
    if not given:
        yield f"sequence batching must specify either {fields.format('or')} for {kind} for {model}"
    elif len(given) > 1:
        yield (
            f"sequence batching specifies more than one from {fields.format('and')} for {kind} for "
            f"{model}"
        )
    for field in given:
        if len(getattr(control, field)) != 2:
            yield (
                f"sequence batching control '{field}' must have exactly 2 entries for {kind} for "
                f"{model}"
            )


def _kind(number: int) -> str:
    kinds = pb.ModelSequenceBatching.Control.Kind
    return str(kinds.Name(number)) if number in kinds.values() else str(number)


def _state_faults(batching: Any, model: str, files: ModelFiles) -> Iterator[str]:
    taken: set[tuple[str, str]] = set()
    for state in batching.state:
        where = f"sequence batching state '{state.input_name}'"
        if not state.input_name or not state.output_name:
            yield f"sequence batching state must have 'input_name' and 'output_name' for {model}"
        for side, name in (("input", state.input_name), ("output", state.output_name)):
            if (side, name) in taken:
                yield f"{where}: {side} '{name}' is another state's already for {model}"
            taken.add((side, name))
        if datatype_of(state.data_type) is None:
            yield f"{where} must specify 'data_type' for {model}"
        if not state.dims or not are_dims(state.dims):
            yield (
                f"{where} must specify 'dims', integers >= 1, or -1 to indicate a variable-size "
                f"dimension for {model}"
            )
        yield from _initial_state_faults(state, where, model, files)


def _initial_state_faults(state: Any, where: str, model: str, files: ModelFiles) -> Iterator[str]:
    if len(state.initial_state) > 1:
        yield f"{where} has more than one 'initial_state' for {model}"
    for initial in state.initial_state:
        if initial.data_type != state.data_type:
            yield f"{where} and its 'initial_state' have different 'data_type' for {model}"
        if not _fits(tuple(initial.dims), tuple(state.dims)):
            yield (
                f"{where}: 'initial_state' must have the state's 'dims', with every variable-size "
                f"dimension specified, for {model}"
            )
        choice = initial.WhichOneof("state_data")
        if choice is None:
            yield f"{where}: 'initial_state' must have 'zero_data' or 'data_file' for {model}"
        elif choice == "data_file":
            directory = files.directory / INITIAL_STATE_DIRECTORY
            if outside(directory, initial.data_file):
                yield (
                    f"{where}: 'data_file' '{initial.data_file}' is outside {directory} for {model}"
                )


def _fits(shape: tuple[int, ...], spec: tuple[int, ...]) -> bool:
    return (
        len(shape) == len(spec)
        and all(size >= 1 and want in (-1, size) for size, want in zip(shape, spec, strict=True))
        and element_count(shape) > 0
    )
