"""The validation of a configuration; the texts are Triton's, file and remedy are ours."""

from __future__ import annotations

import math
import re
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
from edge_server.model_config.fields import (
    IDLE_UNLOAD_S,
    PROCESS_BACKENDS,
    field_faults,
    list_faults,
)
from edge_server.model_config.files import is_file_name, read_labels
from edge_server.model_config.rules import (
    batch_io_faults,
    io_faults,
    preferred_size_faults,
    sequence_faults,
    size_faults,
    warmup_faults,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from edge_server.model_config.files import ModelFiles

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
    """Validate a completed configuration and return its labels, see `read_labels`.

    Raises:
        ModelConfigError: names the file, the fault and the remedy; all faults, one per line.
    """
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
