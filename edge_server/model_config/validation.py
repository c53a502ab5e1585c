"""The validation of a configuration; the texts are Triton's, file and remedy are ours."""

from __future__ import annotations

import math
import re
from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import ModelConfigError, ModelLoadError
from edge_server.model_config.completion import BACKEND_BY_PLATFORM, GPU_BACKENDS
from edge_server.model_config.config import (
    USUAL_COMPLETION,
    Completion,
    python_backend,
    ragged_faults,
)
from edge_server.model_config.ensemble_graph import ensemble_faults
from edge_server.model_config.files import (
    INITIAL_STATE_DIRECTORY,
    WARMUP_DIRECTORY,
    is_file_name,
    outside,
    read_labels,
)
from edge_server.model_config.parse import (
    IDLE_UNLOAD_S,
    PROCESS_BACKENDS,
    datatype_of,
    field_faults,
    list_faults,
)
from edge_server.tensors import DataType, element_count, shape_fits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """Yield the faults of the configuration's inputs and outputs; only if `complete` must every
    tensor have its type and its dims."""
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
    written: set[str] = set()
    for batch_input in message.batch_input:
        yield from _source_faults("input", batch_input, pb.BatchInput.Kind, inputs)
        if batch_input.data_type not in {pb.TYPE_INT32, pb.TYPE_FP32}:
            yield "batch input data type must be TYPE_INT32 or TYPE_FP32"
    for batch_output in message.batch_output:
        yield from _source_faults("output", batch_output, pb.BatchOutput.Kind, inputs)
        for name in batch_output.target_name:
            if name not in outputs:
                yield f"unknown target output name '{name}'"
            if name in written:
                yield f"target output name '{name}' can only be specified once"
            written.add(name)


def _source_faults(what: str, tensor: Any, kinds: Any, inputs: set[str]) -> Iterator[str]:
    if tensor.kind not in kinds.values():
        yield f"unknown batch {what} kind '{tensor.kind}'"
    elif len(tensor.source_input) != 1:
        yield (
            f"batch {what} kind '{kinds.Name(tensor.kind)}' expects 1 source input, got "
            f"{len(tensor.source_input)}"
        )
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


_LABEL = re.compile(r"[a-zA-Z0-9_]+")
# Readable at once; the text goes to every client that reads the index.
_MOST_FAULTS = 32
# Backends that complete inputs and outputs from the model's file.
_COMPLETES_IO = PROCESS_BACKENDS | {"onnxruntime", "tensorrt"}
# Each instance holds a thread, a process or a copy of the model; a higher number is a typing error.
MAX_INSTANCES = 1024
# A process has an interpreter of its own, of some 30 MB.
_MAX_PROCESSES = 64


def validate(
    message: Any,
    files: ModelFiles,
    known_backends: frozenset[str],
    completion: Completion = USUAL_COMPLETION,
) -> Mapping[str, tuple[str, ...]]:
    """Validate a completed configuration and return its labels, see `read_labels`. Raises
    ModelConfigError: all faults with their remedies, one per line."""
    if too_long := list(list_faults(message)):
        raise ModelConfigError(_text(files, too_long))
    backend = "python" if python_backend(message, completion) else message.backend
    by_backend = completion.auto and backend in _COMPLETES_IO
    faults = [
        *field_faults(message),
        *_general_faults(message, files, known_backends),
        *io_faults(message, complete=not by_backend),
        *batch_io_faults(message),
        *ragged_faults(message),
        *(f"{fault} for {message.name}" for fault in _batching_faults(message)),
        *sequence_faults(message, files),
        *_cache_faults(message),
        *size_faults(message),
        *_metric_faults(message),
        *_idle_faults(message),
    ]
    if message.platform == "ensemble":
        faults += ensemble_faults(message)
    else:
        faults += _instance_group_faults(message, backend, completion)
        faults += warmup_faults(message, files)
    absent = list(_absent_gpus(message, completion))
    if faults:
        raise ModelConfigError(_text(files, [*faults, *absent]))
    if absent:
        # The driver may come up later.
        raise ModelLoadError(_text(files, absent))
    return read_labels(message, files)


def _text(files: ModelFiles, faults: Sequence[str]) -> str:
    shown = list(faults[:_MOST_FAULTS])
    if len(faults) > _MOST_FAULTS:
        shown.append(f"{len(faults) - _MOST_FAULTS} more faults of the same configuration")
    return "\n".join(f"{files.config_path}: {fault}" for fault in shown)


def _general_faults(
    message: Any, files: ModelFiles, known_backends: frozenset[str]
) -> Iterator[str]:
    name, platform, backend = message.name, message.platform, message.backend
    if name != files.name:
        yield (
            f"unexpected directory name '{files.name}' for model '{name}', directory name must "
            "equal model name; rename one of them"
        )
    if message.max_batch_size < 0:
        yield f"'max_batch_size' must be non-negative value for {name}"
    if platform == "ensemble":
        if backend:
            yield (
                f"Ensemble model '{name}' must have platform type 'ensemble' and empty backend type"
            )
    elif platform and platform not in BACKEND_BY_PLATFORM:
        hint = f'; give backend: "{platform}" instead' if platform in known_backends else ""
        yield f"unexpected platform type '{platform}' for {name}{hint}"
    elif platform and backend != BACKEND_BY_PLATFORM[platform]:
        yield f"unexpected 'platform' and 'backend' pair, got:{platform}, {backend}"
    elif backend not in known_backends:
        yield (
            f"unable to find backend library for backend '{backend}', try specifying runtime on "
            f"the model configuration. Backends here: {', '.join(sorted(known_backends))}"
        )
    if message.HasField("ensemble_scheduling") and platform != "ensemble":
        yield (
            f"ensemble scheduling cannot be set for model '{name}' whose platform is not ensemble"
        )
    if message.default_model_filename and not is_file_name(message.default_model_filename):
        yield (
            f"default_model_filename '{message.default_model_filename}' leaves the version "
            "directory; give a plain file name"
        )


def _batching_faults(message: Any) -> Iterator[str]:
    if not message.HasField("dynamic_batching"):
        return
    batching, levels = message.dynamic_batching, message.dynamic_batching.priority_levels
    what = "dynamic batching preferred size"
    yield from preferred_size_faults(what, batching.preferred_batch_size, message.max_batch_size)
    if levels and not 1 <= batching.default_priority_level <= levels:
        yield f"default priority level must be in range [1, {levels}]"
    if levels and not all(1 <= level <= levels for level in batching.priority_queue_policy):
        yield f"priority queue policy must have priority level in range [1, {levels}]"
    if batching.preserve_ordering:
        ordered = "when 'preserve_ordering' is true"
        if levels > 1:
            yield f"Only one priority level is allowed {ordered}"
        # Without a timeout on the model no request ever expires.
        if any(
            policy.timeout_action == pb.ModelQueuePolicy.DELAY
            and policy.default_timeout_microseconds
            for policy in (batching.default_queue_policy, *batching.priority_queue_policy.values())
        ):
            yield f"Queue policy can not have DELAY as timeout action {ordered}"


def _metric_faults(message: Any) -> Iterator[str]:
    for tag in message.metric_tags:
        if not _LABEL.fullmatch(tag):
            yield f"metric tag '{tag}' is no label: use letters, digits and _ for {message.name}"
    for control in message.model_metrics.metric_control:
        bounds = control.histogram_options.buckets
        if list(bounds) != sorted(set(bounds)) or not all(map(math.isfinite, bounds)):
            yield (
                f"buckets of {control.metric_identifier.family} must be finite and ascending for "
                f"{message.name}"
            )


def _idle_faults(message: Any) -> Iterator[str]:
    if IDLE_UNLOAD_S in message.parameters:
        text = message.parameters[IDLE_UNLOAD_S].string_value
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            yield (
                f"parameter '{IDLE_UNLOAD_S}' is '{text}' for {message.name}; give a number of "
                "seconds, 0 for never"
            )


def _cache_faults(message: Any) -> Iterator[str]:
    """Refuse the cache for responses that depend on more than the request's inputs."""
    for without, reason in (
        (message.HasField("sequence_batching"), "sequence batching scheduler"),
        (message.model_transaction_policy.decoupled, "'decoupled' transaction policy"),
    ):
        if message.response_cache.enable and without:
            yield (
                f"Response Cache does not currently support model {message.name} with {reason}. "
                "Please disable the response cache."
            )


def _instance_group_faults(message: Any, backend: str, completion: Completion) -> Iterator[str]:
    model, groups = message.name, message.instance_group
    for group in groups:
        where = f"instance group {group.name} of model {model}"
        yield from _device_faults(message, backend, group, where, completion)
        if group.count < 0:
            yield f"{where} has a negative count"
        if group.profile and message.platform != "tensorrt_plan":
            yield (
                f"{where} and platform {message.platform}specifies profile field which is only "
                "supported for TensorRT models"
            )
        else:
            for profile in group.profile:
                # A longer text is no profile number, and Python parses none of 5,000 digits.
                if not (profile.isascii() and profile.isdigit() and len(profile) < 10):
                    yield (
                        f"{where} and platform {message.platform} specifies invalid profile "
                        f"{profile}. The field should contain the string representation of a "
                        "non-negative integer."
                    )
        if any(not resource.name for resource in group.rate_limiter.resources):
            yield f"{where} has a rate limiter resource without 'name'"
    count = sum(max(group.count, 0) * max(1, len(group.gpus)) for group in groups)
    most = _MAX_PROCESSES if backend in PROCESS_BACKENDS else MAX_INSTANCES
    if count > most:
        yield f"model {model} has {count} instances; at most {most} can be"
    if all(group.passive for group in groups):
        yield f"every instance group of model {model} is passive, so that nothing would run"


def _device_faults(
    message: Any, backend: str, group: Any, where: str, completion: Completion
) -> Iterator[str]:
    kinds = pb.ModelInstanceGroup.Kind
    on_gpu = group.kind == pb.ModelInstanceGroup.KIND_GPU
    if on_gpu and backend not in GPU_BACKENDS:
        yield (
            f"{where} has kind KIND_GPU but server does not support GPUs for backend "
            f"'{message.backend}'; give KIND_CPU"
        )
    if group.gpus and not on_gpu:
        name = kinds.Name(group.kind) if group.kind in kinds.values() else group.kind
        yield f"{where} has kind {name} but specifies one or more GPUs"
    for gpu in group.gpus if on_gpu else ():
        if completion.gpus and not 0 <= gpu < completion.gpus:
            present = ",".join(map(str, range(completion.gpus)))
            yield (
                f"{where} specifies invalid or unsupported gpu id {gpu}. GPUs with at least the "
                f"minimum required CUDA compute compatibility of 6.000000 are: {present}"
            )
    shown = f"{group.name} of model {message.name}"
    if len(group.secondary_devices) > 1:
        yield f"{shown} must have either zero or or one secondary devices"
    nvdla = pb.ModelInstanceGroup.SecondaryDevice.KIND_NVDLA
    if any(device.kind != nvdla for device in group.secondary_devices):
        yield f"secondary device for {shown} must be KIND_NVDLA"


def _absent_gpus(message: Any, completion: Completion) -> Iterator[str]:
    """Yield the groups that need a GPU where there is none."""
    hint = "; on a Jetson KIND_AUTO is KIND_GPU, and KIND_CPU runs it on the CPU"
    for group in message.instance_group:
        on_gpu = group.kind == pb.ModelInstanceGroup.KIND_GPU and message.backend in GPU_BACKENDS
        if on_gpu and not completion.gpus:
            yield (
                f"instance group {group.name} of model {message.name} has kind KIND_GPU but no "
                f"GPUs are available: {completion.no_gpu}{hint if completion.jetson else ''}"
            )
