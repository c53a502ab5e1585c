"""The rules a configuration must keep; the texts are Triton's, file and remedy are ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import ModelConfigError
from edge_server.model_config.completion import BACKEND_BY_PLATFORM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_server.model_config.files import ModelFiles

# Every field is either acted on, accepted although it changes nothing here, or refused: a field
# that is silently ignored is a promise that is silently broken.
ACTED_ON = frozenset(
    {
        "name",
        "platform",
        "backend",
        "version_policy",
        "max_batch_size",
        "input",
        "output",
        "instance_group",
        "default_model_filename",
        "parameters",
        "ensemble_scheduling",
        "dynamic_batching",
        "sequence_batching",
        "model_transaction_policy",
        "response_cache",
        "model_warmup",
    }
)
ACCEPTED = {
    "runtime": "the backend is chosen by its name",
    "metric_tags": "there are no metrics to tag yet",
    "optimization": "the backends use their own defaults",
    "model_metrics": "there are no metrics to shape yet",
}

_TENSOR_FIELDS_ACTED_ON = frozenset(
    {"name", "data_type", "dims", "format", "reshape", "label_filename", "optional"}
)


def without_effect(message: Any) -> dict[str, str]:
    """The fields of a valid configuration that change nothing here → why."""
    return {f.name: ACCEPTED[f.name] for f, _ in message.ListFields() if f.name in ACCEPTED}


def validate(message: Any, files: ModelFiles, known_backends: frozenset[str]) -> None:
    """Hold a completed configuration against the rules.

    Raises:
        ModelConfigError: names the file, what is wrong and what to do; all faults, one per line.
    """
    path = files.config_path
    faults = [
        *_general(message, files, known_backends),
        *_tensors(message, "input"),
        *_tensors(message, "output"),
        *(_ensemble(message) if message.platform == "ensemble" else _instance_groups(message)),
    ]
    if faults:
        raise ModelConfigError("\n".join(f"{path}: {fault}" for fault in faults))


def _general(message: Any, files: ModelFiles, known_backends: frozenset[str]) -> Iterator[str]:
    name = message.name
    for descriptor, _ in message.ListFields():
        if descriptor.name not in ACTED_ON and descriptor.name not in ACCEPTED:
            yield f"field '{descriptor.name}' is not supported by this server; remove it"
    if name != files.name:
        yield (
            f"unexpected directory name '{files.name}' for model '{name}', directory name must "
            "equal model name; rename one of them"
        )
    if message.max_batch_size < 0:
        yield f"'max_batch_size' must be non-negative value for {name}"
    yield from _backend(message, known_backends)
    if message.WhichOneof("scheduling_choice") == "ensemble_scheduling" and (
        message.platform != "ensemble"
    ):
        yield (
            f"ensemble scheduling cannot be set for model '{name}' whose platform is not ensemble"
        )
    if _leaves_directory(message.default_model_filename):
        yield (
            f"default_model_filename '{message.default_model_filename}' leaves the version "
            "directory; give a plain file name"
        )


def _backend(message: Any, known_backends: frozenset[str]) -> Iterator[str]:
    name, platform, backend = message.name, message.platform, message.backend
    if platform == "ensemble":
        if backend:
            yield (
                f"Ensemble model '{name}' must have platform type 'ensemble' and empty backend type"
            )
    elif platform and platform not in BACKEND_BY_PLATFORM:
        yield f"unexpected platform type '{platform}' for {name}"
    elif platform and backend != BACKEND_BY_PLATFORM[platform]:
        yield f"unexpected 'platform' and 'backend' pair, got:{platform}, {backend}"
    elif backend not in known_backends:
        yield (
            f"unable to find backend library for backend '{backend}', try specifying runtime on "
            f"the model configuration. Backends here: {', '.join(sorted(known_backends))}"
        )


def _leaves_directory(filename: str) -> bool:
    return filename != "" and (filename.startswith("/") or ".." in filename.split("/"))


def _tensors(message: Any, kind: str) -> Iterator[str]:
    name = message.name
    names: set[str] = set()
    for tensor in getattr(message, kind):
        where = f"model {kind} '{tensor.name}'"
        if not tensor.name:
            yield f"model {kind} must specify 'name' for {name}"
        elif tensor.name in names:
            yield f"{where} is given more than once for {name}"
        names.add(tensor.name)
        if tensor.data_type == pb.TYPE_INVALID:
            yield f"{where} must specify 'data_type' for {name}; for example TYPE_FP32"
        elif tensor.data_type == pb.TYPE_BF16:
            yield f"{where} has data_type TYPE_BF16, which is not supported here, for {name}"
        elif tensor.data_type not in pb.DataType.values():
            yield f"{where} has data_type {tensor.data_type}, which is no data type, for {name}"
        if not tensor.dims:
            yield f"{where} must specify 'dims' for {name}"
        if any(dim < 1 and dim != -1 for dim in tensor.dims):
            yield (
                f"{where} dimension must be integer >= 1, or -1 to indicate a variable-size "
                f"dimension for {name}"
            )
        if kind == "input" and tensor.format not in pb.ModelInput.Format.values():
            yield f"{where} has format {tensor.format}, which is no format, for {name}"
        elif kind == "input" and tensor.format and len(tensor.dims) != 3:
            yield f"model input NHWC/NCHW require 3 dims for {name}"
        for descriptor, _ in tensor.ListFields():
            if descriptor.name not in _TENSOR_FIELDS_ACTED_ON:
                yield (
                    f"{where}: field '{descriptor.name}' is not supported by this server for {name}"
                )


def _instance_groups(message: Any) -> Iterator[str]:
    for group in message.instance_group:
        where = f"instance group {group.name} of model {message.name}"
        if group.kind not in pb.ModelInstanceGroup.Kind.values():
            yield f"{where} has kind {group.kind}, which is no kind; for example KIND_CPU"
        elif group.kind == pb.ModelInstanceGroup.KIND_GPU:
            yield f"{where} has kind KIND_GPU but server does not support GPUs"
        elif group.gpus:
            kind = pb.ModelInstanceGroup.Kind.Name(group.kind)
            yield f"{where} has kind {kind} but specifies one or more GPUs"
        if group.count < 0:
            yield f"{where} has a negative count"
        for descriptor, _ in group.ListFields():
            if descriptor.name not in {"name", "kind", "count", "gpus", "rate_limiter", "passive"}:
                yield f"{where}: field '{descriptor.name}' is not supported by this server"


def _ensemble(message: Any) -> Iterator[str]:
    name = message.name
    if message.instance_group:
        yield f"instance group should not be specified for ensemble '{name}'"
    if message.HasField("optimization"):
        yield f"optimization should not be specified for ensemble '{name}'"
    if not message.input or not message.output:
        yield f"ensemble '{name}' must specify its 'input' and 'output' tensors"
    if not message.ensemble_scheduling.step:
        yield f"must specify 'step' for ensemble '{name}'"
    inputs = {tensor.name for tensor in message.input}
    written: set[str] = set()
    for index, step in enumerate(message.ensemble_scheduling.step):
        where = f"step {index} of ensemble '{name}'"
        if not step.model_name:
            yield f"must specify 'model_name' in {where}"
        if not step.input_map:
            yield f"must specify 'input_map' in {where}"
        if not step.output_map:
            yield f"must specify 'output_map' in {where}"
        for tensor in step.output_map.values():
            if tensor in written:
                yield (
                    f"ensemble tensor '{tensor}' can appear in an output map only once for "
                    f"ensemble '{name}' step {index}"
                )
            if tensor in inputs:
                yield (
                    f"ensemble tensor '{tensor}' is an input of ensemble '{name}', so it cannot "
                    f"appear in the output map of step {index}"
                )
            written.add(tensor)
