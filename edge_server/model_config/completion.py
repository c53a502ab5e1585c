"""What a configuration leaves out and the model directory or the defaults say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import ModelConfigError
from edge_server.model_config.files import reading

if TYPE_CHECKING:
    from edge_server.model_config.files import ModelFiles

# A file in a version directory → (backend, platform) that loads it; the first that exists counts.
_BACKEND_BY_FILE = {
    "model.plan": ("tensorrt", "tensorrt_plan"),
    "model.onnx": ("onnxruntime", "onnxruntime_onnx"),
    "model.py": ("python", ""),
}
BACKEND_BY_PLATFORM = {
    "tensorrt_plan": "tensorrt",
    "onnxruntime_onnx": "onnxruntime",
}
_FILE_BY_BACKEND = {
    "tensorrt": "model.plan",
    "onnxruntime": "model.onnx",
    "python": "model.py",
}


def complete(message: Any, files: ModelFiles) -> None:
    """Fill in name, backend, platform, file name, version policy and instance groups, in place.

    Inputs and outputs are the backend's to complete.

    Raises:
        ModelConfigError: no backend can be told from configuration, files or name, or the files
            cannot be read.
    """
    if not message.name:
        message.name = files.name
    _complete_backend(message, files)
    if not message.WhichOneof("scheduling_choice") and message.platform == "ensemble":
        message.ensemble_scheduling.SetInParent()
    if not message.version_policy.WhichOneof("policy_choice"):
        message.version_policy.latest.num_versions = 1
    if message.platform != "ensemble":
        _complete_instance_groups(message)


def _complete_backend(message: Any, files: ModelFiles) -> None:
    if message.platform == "ensemble":
        return
    if not message.backend and message.platform:
        message.backend = BACKEND_BY_PLATFORM.get(message.platform, "")
    if not message.backend and not message.platform:
        message.backend, message.platform = _backend_of(files)
    if not message.default_model_filename:
        message.default_model_filename = _FILE_BY_BACKEND.get(message.backend, "")


def _backend_of(files: ModelFiles) -> tuple[str, str]:
    for directory in files.versions.values():
        for filename, found in _BACKEND_BY_FILE.items():
            with reading(directory):
                if (directory / filename).exists():
                    return found
    stem, dot, suffix = files.name.rpartition(".")
    if dot and stem and suffix:
        return suffix, ""
    raise ModelConfigError(
        f"{files.config_path}: Invalid model name: Could not determine backend for model "
        f"'{files.name}' with no backend in model configuration. Expected model name of the form "
        "'model.<backend_name>'. Name a 'backend' in config.pbtxt, or put one of "
        f"{', '.join(_BACKEND_BY_FILE)} into a version directory."
    )


def _complete_instance_groups(message: Any) -> None:
    if not message.instance_group:
        message.instance_group.add()
    for index, group in enumerate(message.instance_group):
        if not group.name:
            group.name = f"{message.name}_{index}" if index else message.name
        if group.kind == pb.ModelInstanceGroup.KIND_AUTO:
            # Where a GPU can be driven, its backend asks for it; everything here runs on the CPU.
            group.kind = pb.ModelInstanceGroup.KIND_CPU
        if group.count == 0:
            cpu = group.kind == pb.ModelInstanceGroup.KIND_CPU
            group.count = 2 if cpu and message.backend == "onnxruntime" else 1
