"""The validation of a configuration; the texts are Triton's, file and remedy are ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edge_server.errors import ModelConfigError, ModelLoadError
from edge_server.model_config.batching_rules import batching_faults, cache_faults
from edge_server.model_config.completion import BACKEND_BY_PLATFORM
from edge_server.model_config.config import USUAL_COMPLETION, Completion
from edge_server.model_config.conversions import remedy_for
from edge_server.model_config.count_rules import list_faults, size_faults
from edge_server.model_config.fields import field_faults, without_effect
from edge_server.model_config.files import is_file_name
from edge_server.model_config.instance_group_rules import absent_gpus, instance_group_faults
from edge_server.model_config.io_rules import io_faults
from edge_server.model_config.labels import read_labels
from edge_server.model_config.sequence_rules import sequence_faults
from edge_server.model_config.warmup import warmup_faults

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from edge_server.model_config.files import ModelFiles

__all__ = ["validate", "without_effect"]

# Readable at once; the text goes to every client that asks for the index.
_MOST_FAULTS = 32
# Backends that complete inputs and outputs from the model's file.
_COMPLETES_IO = frozenset({"onnxruntime", "tensorrt", "python"})


def validate(
    message: Any,
    files: ModelFiles,
    known_backends: frozenset[str],
    completion: Completion = USUAL_COMPLETION,
) -> None:
    """Validate a completed configuration and its label files.

    Raises:
        ModelConfigError: names the file, the fault and the remedy; all faults, one per line.
    """
    path = files.config_path
    if too_long := list(list_faults(message)):
        raise _fault(path, too_long)
    by_backend = completion.auto and message.backend in _COMPLETES_IO
    faults = [
        *field_faults(message),
        *_general(message, files, known_backends),
        *io_faults(message, complete=not by_backend),
        *batching_faults(message),
        *sequence_faults(message, files),
        *cache_faults(message),
        *size_faults(message),
    ]
    if message.platform == "ensemble":
        faults += _ensemble(message)
    else:
        faults += [*instance_group_faults(message, completion), *warmup_faults(message, files)]
    absent = list(absent_gpus(message, completion))
    if faults or absent:
        raise _fault(path, [*faults, *absent], ModelConfigError if faults else ModelLoadError)
    read_labels(message, files)


def _fault(
    path: Path, faults: Sequence[str], kind: type[ModelConfigError] = ModelConfigError
) -> ModelConfigError:
    told = [f"{path}: {fault}" for fault in faults[:_MOST_FAULTS]]
    if len(faults) > _MOST_FAULTS:
        told.append(f"{path}: {len(faults) - _MOST_FAULTS} more faults of the same configuration")
    return kind("\n".join(told))


def _general(message: Any, files: ModelFiles, known_backends: frozenset[str]) -> Iterator[str]:
    name = message.name
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
    if message.default_model_filename and not is_file_name(message.default_model_filename):
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
        yield f"unexpected platform type '{platform}' for {name}{remedy_for(platform)}"
    elif platform and backend != BACKEND_BY_PLATFORM[platform]:
        yield f"unexpected 'platform' and 'backend' pair, got:{platform}, {backend}"
    elif backend not in known_backends:
        yield (
            f"unable to find backend library for backend '{backend}', try specifying runtime on "
            f"the model configuration. Backends here: {', '.join(sorted(known_backends))}"
            f"{remedy_for(backend)}"
        )


def _ensemble(message: Any) -> Iterator[str]:
    name = message.name
    if message.WhichOneof("scheduling_choice") != "ensemble_scheduling":
        yield f"ensemble scheduling must be set for ensemble {name} whose platform is ensemble"
    elif not message.ensemble_scheduling.step:
        yield f"must specify 'step' for ensemble '{name}'"
    if message.instance_group:
        yield f"instance group should not be specified for ensemble '{name}'"
    if message.HasField("optimization"):
        yield f"optimization should not be specified for ensemble '{name}'"
    if message.model_warmup:
        yield f"model_warmup can not be specified for ensemble '{name}'"
    if not message.input or not message.output:
        yield f"ensemble '{name}' must specify its 'input' and 'output' tensors"
    yield from _steps(message)


def _steps(message: Any) -> Iterator[str]:
    name = message.name
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
