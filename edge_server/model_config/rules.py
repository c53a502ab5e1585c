"""The rules for `sequence_batching`; the texts are Triton's where it has one."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.model_config.fields import datatype_of
from edge_server.model_config.files import INITIAL_STATE_DIRECTORY, WARMUP_DIRECTORY, outside
from edge_server.tensors import DataType, element_count, shape_fits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from edge_server.model_config.files import ModelFiles

# Backends whose modules define all tensors.
_FIXED_TENSORS = frozenset({"image_preprocess", "lane_decode"})
_MOST_RUNS_OF_A_SAMPLE = 10_000
_MOST_SAMPLE_BYTES = 1 << 30
_MOST_STATE_BYTES = 1 << 28
# A Python object of `bytes` and the reference to it.
_TEXT_BYTES = 64


def io_faults(message: Any, *, complete: bool) -> Iterator[str]:
    """Yield the faults of the configuration's inputs and outputs.

    Args:
        complete: every tensor must have its type and its dims; else a backend may fill them in.
    """
    model = message.name
    for kind in ("input", "output"):
        names: set[str] = set()
        for tensor in getattr(message, kind):
            where = f"model {kind} '{tensor.name}'"
            if tensor.name and tensor.name in names:
                yield f"{where} is given more than once for {model}"
            for fault in _tensor_faults(message, tensor, kind):
                yield f"{fault} for {model}"
            if complete and tensor.data_type == pb.TYPE_INVALID:
                yield f"{where} must specify 'data_type' for {model}; for example TYPE_FP32"
            if complete and not tensor.dims:
                yield f"{where} must specify 'dims' for {model}"
            given = {descriptor.name for descriptor, _ in tensor.ListFields()}
            fixed = message.backend in _FIXED_TENSORS
            for field in sorted(given & {"reshape", "optional"}) if fixed else ():
                yield (
                    f"{where} has '{field}', which backend '{message.backend}' does not support, "
                    f"for {model}; remove it"
                )
            names.add(tensor.name)
    reshaped = {tensor.name: _reshape(tensor) for tensor in message.input}
    for tensor in message.output:
        if reshaped.get(tensor.name, _reshape(tensor)) != _reshape(tensor):
            yield (
                f"model output '{tensor.name}' has another 'reshape' than the input of that name "
                f"for {model}; give one of them another name"
            )


def batch_io_faults(message: Any) -> Iterator[str]:
    inputs = {tensor.name for tensor in message.input}
    outputs = {tensor.name for tensor in message.output}
    kinds = pb.BatchInput.Kind
    written: set[str] = set()
    for batch_input in message.batch_input:
        if batch_input.kind not in kinds.values():
            yield f"unknown batch input kind '{batch_input.kind}'"
        elif len(batch_input.source_input) != 1:
            yield (
                f"batch input kind '{kinds.Name(batch_input.kind)}' expects 1 source input, got "
                f"{len(batch_input.source_input)}"
            )
        if batch_input.data_type not in {pb.TYPE_INT32, pb.TYPE_FP32}:
            yield "batch input data type must be TYPE_INT32 or TYPE_FP32"
        yield from _unknown_sources(batch_input, inputs)
    for batch_output in message.batch_output:
        if batch_output.kind not in pb.BatchOutput.Kind.values():
            yield f"unknown batch output kind '{batch_output.kind}'"
        elif len(batch_output.source_input) != 1:
            yield (
                f"batch output kind '{pb.BatchOutput.Kind.Name(batch_output.kind)}' expects 1 "
                f"source input, got {len(batch_output.source_input)}"
            )
        yield from _unknown_sources(batch_output, inputs)
        for name in batch_output.target_name:
            if name not in outputs:
                yield f"unknown target output name '{name}'"
            if name in written:
                yield f"target output name '{name}' can only be specified once"
            written.add(name)


def _unknown_sources(tensor: Any, inputs: set[str]) -> Iterator[str]:
    for name in tensor.source_input:
        if name not in inputs:
            yield f"unknown source input name '{name}'"


def _tensor_faults(message: Any, tensor: Any, kind: str) -> Iterator[str]:
    where, dims = f"model {kind} '{tensor.name}'", tensor.dims
    if not tensor.name:
        yield f"model {kind} must specify 'name'"
    if not are_dims(dims):
        yield f"{where} dimension must be integer >= 1, or -1 to indicate a variable-size dimension"
    elif tensor.HasField("reshape") and (
        fault := _reshape_fault(list(dims), list(tensor.reshape.shape), message)
    ):
        yield f"{where} {fault}"
    if kind == "input" and tensor.format and len(dims) != 3:
        yield "model input NHWC/NCHW require 3 dims"
    plan = message.platform == "tensorrt_plan"
    if tensor.is_shape_tensor and not plan:
        yield "shape tensors are only supported for TensorRT platform"
    if tensor.is_non_linear_format_io and not plan:
        yield "Non-linear IO format is only supported for the TensorRT platform"
    elif tensor.is_non_linear_format_io and len(dims) != 3:
        yield f"Non-linear IO format {kind} requires 3 dims"


def _reshape_fault(dims: list[int], reshape: list[int], message: Any) -> str:
    if not are_dims(reshape):
        return (
            "reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension"
        )
    if not reshape and message.max_batch_size == 0:
        return (
            "cannot have empty reshape for non-batching model as scalar tensors are not supported"
        )
    if dims.count(-1) != reshape.count(-1):
        return "has different number of variable-size dimensions for dims and reshape"
    if _counts_between_free(dims) != _counts_between_free(reshape):
        return "has different size for dims and reshape"
    if reshape.count(-1) > 1:
        return "has a reshape with more than one variable-size dimension, which is not supported"
    return ""


def _counts_between_free(shape: Sequence[int]) -> list[int]:
    """Elements before, between and after the free dimensions: a reshape moves none across."""
    counts = [1]
    for free, sizes in groupby(shape, lambda size: size == -1):
        if free:
            counts += [1 for _ in sizes]
        else:
            counts[-1] = element_count(sizes)
    return counts


def are_dims(dims: Sequence[int]) -> bool:
    return all(dim >= 1 or dim == -1 for dim in dims)


def _reshape(tensor: Any) -> tuple[int, ...] | None:
    return tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None


def warmup_faults(message: Any, files: ModelFiles) -> Iterator[str]:
    """Yield the faults of a model's samples; whether they fit its inputs shows in their runs."""
    expects = "warmup setting expects"
    for sample in message.model_warmup:
        of = f"in sample '{sample.name}' for {message.name}"
        for name, tensor in sorted(sample.inputs.items()):
            if any(dim < 0 for dim in tensor.dims):
                yield (
                    f"{expects} all variable-size dimensions are specified for input '{name}'; {of}"
                )
            if tensor.data_type == pb.TYPE_INVALID:
                yield f"{expects} 'data_type' for input '{name}' {of}"
            choice = tensor.WhichOneof("input_data_type")
            if choice is None:
                yield (
                    f"{expects} 'zero_data', 'random_data' or 'input_data_file' for input "
                    f"'{name}' {of}"
                )
            directory = files.directory / WARMUP_DIRECTORY
            if choice == "input_data_file" and outside(directory, tensor.input_data_file):
                yield (
                    f"{expects} the data of input '{name}' in {directory}, where "
                    f"'{tensor.input_data_file}' is not, {of}"
                )


def size_faults(message: Any) -> Iterator[str]:
    """Yield samples and states that need too much time or memory: a page of text must not make the
    server allocate until its memory is exhausted."""
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
    if sample_bytes > _MOST_SAMPLE_BYTES:
        yield (
            f"the warm-up samples for {name} take {sample_bytes} bytes; together they can have "
            f"{_MOST_SAMPLE_BYTES}; make their dims or batch_size smaller"
        )
    state_bytes = sum(
        max(_bytes(state.data_type, each.dims) for each in (state, *state.initial_state))
        for state in message.sequence_batching.state
    )
    if state_bytes > _MOST_STATE_BYTES:
        yield (
            f"the sequence batching states for {name} take {state_bytes} bytes; together they can "
            f"have {_MOST_STATE_BYTES}; make their dims smaller"
        )


def _bytes(data_type: int, dims: Iterable[int]) -> int:
    """The minimum size of a tensor; one that other rules refuse counts as small."""
    datatype = datatype_of(data_type)
    if datatype is None:
        return 0
    item_bytes = _TEXT_BYTES if datatype is DataType.BYTES else datatype.numpy.itemsize
    return item_bytes * element_count([max(dim, 1) for dim in dims])


_CORRID = pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_CORRID
_CORRID_TYPES = frozenset(
    {pb.TYPE_UINT64, pb.TYPE_INT64, pb.TYPE_UINT32, pb.TYPE_INT32, pb.TYPE_STRING}
)
_VALUES = ("int32_false_true", "fp32_false_true", "bool_false_true")


def sequence_faults(message: Any, files: ModelFiles) -> Iterator[str]:
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
