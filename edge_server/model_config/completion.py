"""Completes a configuration from the model directory and the defaults."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import ModelConfigError
from edge_server.model_config.config import USUAL_COMPLETION
from edge_server.model_config.files import reading

if TYPE_CHECKING:
    from pathlib import Path

    from edge_server.model_config.config import Completion
    from edge_server.model_config.files import ModelFiles

# Backend, its platform, and its file in a version directory: the first that exists wins, and is the
# default where none does. Triton does not find Paddle's models by their files.
_BACKENDS = (
    ("tensorrt", "tensorrt_plan", "model.plan"),
    ("onnxruntime", "onnxruntime_onnx", "model.onnx"),
    ("tensorflow", "tensorflow_savedmodel", "model.savedmodel"),
    ("tensorflow", "tensorflow_graphdef", "model.graphdef"),
    ("pytorch", "pytorch_libtorch", "model.pt"),
    ("pytorch", "torch_aoti", "model.pt2"),
    ("openvino", "", "model.xml"),
    ("python", "", "model.py"),
    ("paddle", "", "model.pdmodel"),
    ("paddle", "", "inference.json"),
    ("paddle", "", "inference.pdmodel"),
)
BACKEND_BY_PLATFORM = {platform: backend for backend, platform, _ in _BACKENDS if platform} | {
    "libtorch": "pytorch"
}
# Backends that can use a GPU; the others always run on the CPU.
GPU_BACKENDS = frozenset(
    {"tensorrt", "image_preprocess", "onnxruntime", "pytorch", "tensorflow", "paddle"}
)
# Of these, those that use it without being asked: of the others, what pip installs has no GPU on a
# Jetson.
_GPU_BY_DEFAULT = frozenset({"tensorrt", "image_preprocess", "pytorch"})
_DEFAULT_SEQUENCE_IDLE_US = 1_000_000

# Remedies for models whose backend Triton has and edge_server lacks.
_THEN = 'put it into the version directory as model.onnx, with backend: "onnxruntime"'
_WRAP = 'or load it in a model.py, with backend: "python"'

# Names in config.pbtxt (backends), and the remedy.
_REMEDIES = (
    (("fil",), f"convert it with onnxmltools and {_THEN}; {_WRAP}"),
    (
        ("dali",),
        'use backend: "image_preprocess" for images, or a model.py with backend: "python"',
    ),
    (
        ("vllm", "tensorrtllm"),
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
    if message.platform == "libtorch":
        message.platform = "pytorch_libtorch"
    if not (message.platform and message.default_model_filename):
        _complete_format(message, files)


def _complete_format(message: Any, files: ModelFiles) -> None:
    """Fill in the platform and the file, which determine each other where a backend reads several
    formats, and which the files determine where neither is given."""
    own = [(p, f) for backend, p, f in _BACKENDS if backend == message.backend]
    own = [each for each in own if message.platform in ("", each[0])]
    by_name = [
        (p, f)
        for p, f in own
        if message.default_model_filename
        and PurePath(f).suffix == PurePath(message.default_model_filename).suffix
    ]
    on_disk = (
        each
        for directory in files.versions.values()
        for each in own
        if len(own) > 1 and _exists(directory / each[1])
    )
    platform, file = next(iter(by_name), None) or next(on_disk, None) or next(iter(own), ("", ""))
    message.platform = message.platform or platform
    message.default_model_filename = message.default_model_filename or file


def _backend_of(filename: str, files: ModelFiles) -> tuple[str, str]:
    by_file = {f: (backend, platform) for backend, platform, f in _BACKENDS if backend != "paddle"}
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
        f"'model.<backend_name>'. Name a 'backend' in config.pbtxt, or put one of "
        f"{', '.join(by_file)} into a version directory."
    )


def remedy_for(name: str) -> str:
    """The remedy for a model of that backend or platform, to follow the text of the fault.

    Empty for a name that is none of Triton's.
    """
    found = (remedy for names, remedy in _REMEDIES if name in names)
    return next((f"; '{name}' is not built here: {remedy}" for remedy in found), "")


def _exists(path: Path) -> bool:
    with reading(path):
        return path.exists()


def _complete_instance_groups(message: Any, gpus: int) -> None:
    kind = pb.ModelInstanceGroup
    accelerators = message.optimization.execution_accelerators
    if not message.instance_group:
        message.instance_group.add(name=message.name)
    for index, group in enumerate(message.instance_group):
        if not group.name:
            group.name = f"{message.name}_{index}"
        if group.kind == kind.KIND_AUTO:
            is_asked = group.gpus or accelerators.gpu_execution_accelerator
            may = GPU_BACKENDS if is_asked else _GPU_BY_DEFAULT
            on_gpu = message.backend in may and gpus and all(g < gpus for g in group.gpus)
            group.kind = kind.KIND_GPU if on_gpu else kind.KIND_CPU
        if group.kind == kind.KIND_GPU and not group.gpus:
            group.gpus.extend(range(gpus))
        if group.count == 0:
            cpu = group.kind == kind.KIND_CPU
            group.count = 2 if cpu and message.backend == "onnxruntime" else 1
