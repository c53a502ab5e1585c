"""Completes a configuration from the model directory and the defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import ModelConfigError
from edge_server.model_config.config import USUAL_COMPLETION
from edge_server.model_config.files import reading

if TYPE_CHECKING:
    from pathlib import Path

    from edge_server.model_config.config import Completion
    from edge_server.model_config.files import ModelFiles

# Backend, its platform, and its file in a version directory, the first that exists wins.
_BACKENDS = (
    ("tensorrt", "tensorrt_plan", "model.plan"),
    ("onnxruntime", "onnxruntime_onnx", "model.onnx"),
    ("python", "", "model.py"),
)
BACKEND_BY_PLATFORM = {platform: backend for backend, platform, _ in _BACKENDS if platform}
_PLATFORM_BY_BACKEND = {backend: platform for backend, platform, _ in _BACKENDS}
_FILE_BY_BACKEND = {backend: file for backend, _, file in _BACKENDS}
# Backends that can use a GPU; the others always run on the CPU.
GPU_BACKENDS = frozenset({"tensorrt", "image_preprocess"})
_DEFAULT_SEQUENCE_IDLE_US = 1_000_000

# Remedies for models whose backend Triton has and edge_server lacks.
_THEN = 'put it into the version directory as model.onnx, with backend: "onnxruntime"'
_WRAP = 'or load it in a model.py, with backend: "python"'

# Names in config.pbtxt (backends, and the platforms of Triton's older configurations), a file in a
# version directory, and the remedy.
_REMEDIES = (
    (
        ("pytorch", "pytorch_libtorch"),
        "model.pt",
        'convert it with torch.onnx.export(torch.jit.load("model.pt"), (example,), "model.onnx", '
        f"dynamo=False) and {_THEN}; {_WRAP}",
    ),
    (
        ("tensorflow", "tensorflow_savedmodel"),
        "model.savedmodel",
        "convert it with python -m tf2onnx.convert --saved-model model.savedmodel --output "
        f"model.onnx and {_THEN}; {_WRAP}",
    ),
    (
        ("tensorflow_graphdef",),
        "model.graphdef",
        "convert it with python -m tf2onnx.convert --graphdef model.graphdef --inputs NAME:0 "
        f"--outputs NAME:0 --output model.onnx and {_THEN}; {_WRAP}",
    ),
    (
        ("openvino",),
        "model.xml",
        f"export the model that it was made of to ONNX and {_THEN}; {_WRAP}",
    ),
    (
        ("paddle",),
        "model.pdmodel",
        "convert it with paddle2onnx --model_dir DIR --model_filename model.pdmodel "
        f"--params_filename model.pdiparams --save_file model.onnx and {_THEN}; {_WRAP}",
    ),
    (("fil",), "", f"convert it with onnxmltools and {_THEN}; {_WRAP}"),
    (
        ("dali",),
        "",
        'use backend: "image_preprocess" for images, or a model.py with backend: "python"',
    ),
    (
        ("vllm", "tensorrtllm"),
        "",
        'load it in a model.py, with backend: "python", where the board has room for it',
    ),
)


def complete(message: Any, files: ModelFiles, completion: Completion = USUAL_COMPLETION) -> None:
    """Fill in name, backend, platform, file name and every default, in place.

    The backend completes inputs, outputs and `max_batch_size`.

    Raises:
        ModelConfigError: configuration, files and name determine no backend, the files cannot be
            read, or there is no configuration and completion is off.
    """
    if not completion.auto and not message.ListFields():
        raise ModelConfigError(
            f"{files.config_path}: missing or empty; write it, or let the server complete "
            "configurations from the models' files"
        )
    if not message.name:
        message.name = files.name
    if message.platform != "ensemble":
        _complete_backend(message, files)
        _complete_instance_groups(message, completion.gpus)
        for memory in ("input_pinned_memory", "output_pinned_memory"):
            if not message.optimization.HasField(memory):
                getattr(message.optimization, memory).enable = True
    policy = message.version_policy
    if not policy.WhichOneof("policy_choice"):
        policy.latest.SetInParent()
    if policy.HasField("latest") and not policy.latest.num_versions:
        policy.latest.num_versions = 1
    complete_scheduling(message)


def complete_scheduling(message: Any) -> None:
    """Fill in the scheduler's defaults, in place; some of them are `max_batch_size`."""
    choice = message.WhichOneof("scheduling_choice")
    if choice == "dynamic_batching":
        _complete_preferred(message.dynamic_batching, message.max_batch_size)
    elif choice == "sequence_batching":
        batching = message.sequence_batching
        if not batching.max_sequence_idle_microseconds:
            batching.max_sequence_idle_microseconds = _DEFAULT_SEQUENCE_IDLE_US
        if not batching.WhichOneof("strategy_choice"):
            batching.direct.SetInParent()
        if batching.HasField("oldest"):
            _complete_preferred(batching.oldest, message.max_batch_size)


def _complete_preferred(batching: Any, max_batch_size: int) -> None:
    if not batching.preferred_batch_size and max_batch_size > 0:
        batching.preferred_batch_size.append(max_batch_size)


def _complete_backend(message: Any, files: ModelFiles) -> None:
    if not message.backend and message.platform:
        message.backend = BACKEND_BY_PLATFORM.get(message.platform, "")
    if not message.backend and not message.platform:
        message.backend, message.platform = _backend_of(message.default_model_filename, files)
    if not message.platform:
        message.platform = _PLATFORM_BY_BACKEND.get(message.backend, "")
    if not message.default_model_filename:
        message.default_model_filename = _FILE_BY_BACKEND.get(message.backend, "")


def _backend_of(filename: str, files: ModelFiles) -> tuple[str, str]:
    by_file = {file: (backend, platform) for backend, platform, file in _BACKENDS}
    if filename in by_file:
        return by_file[filename]
    for directory in () if filename else files.versions.values():
        for file, found in by_file.items():
            if _exists(directory / file):
                return found
    stem, dot, suffix = files.name.rpartition(".")
    if dot and stem and suffix:
        return suffix, ""
    raise ModelConfigError(
        f"{files.config_path}: Invalid model name: Could not determine backend for model "
        f"'{files.name}' with no backend in model configuration. Expected model name of the form "
        f"'model.<backend_name>'. {_remedy_for_files(files)}"
    )


def remedy_for(name: str) -> str:
    """The remedy for a model of that backend or platform, to follow the text of the fault.

    Empty for a name that is none of Triton's.
    """
    found = (remedy for names, _, remedy in _REMEDIES if name in names)
    return next((f"; '{name}' is not built here: {remedy}" for remedy in found), "")


def _remedy_for_files(files: ModelFiles) -> str:
    """The remedy for a model in a file format of none of our backends."""
    for directory in files.versions.values():
        for _, file, remedy in _REMEDIES:
            if file and _exists(directory / file):
                return f"{file} is of a backend that is not built here: {remedy}"
    known = ", ".join(file for _, _, file in _BACKENDS)
    return f"Name a 'backend' in config.pbtxt, or put one of {known} into a version directory."


def _exists(path: Path) -> bool:
    with reading(path):
        return path.exists()


def _complete_instance_groups(message: Any, gpus: int) -> None:
    kind = pb.ModelInstanceGroup
    if not message.instance_group:
        message.instance_group.add(name=message.name)
    for index, group in enumerate(message.instance_group):
        if not group.name:
            group.name = f"{message.name}_{index}"
        if group.kind == kind.KIND_AUTO:
            on_gpu = message.backend in GPU_BACKENDS and gpus and all(g < gpus for g in group.gpus)
            group.kind = kind.KIND_GPU if on_gpu else kind.KIND_CPU
        if group.kind == kind.KIND_GPU and not group.gpus:
            group.gpus.extend(range(gpus))
        if group.count == 0:
            cpu = group.kind == kind.KIND_CPU
            group.count = 2 if cpu and message.backend == "onnxruntime" else 1
