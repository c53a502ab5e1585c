"""The rules for `instance_group`; the texts are Triton's where it has one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.model_config.completion import GPU_BACKENDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_server.model_config.config import Completion

# Each instance holds a thread, a process or a copy of the model; a higher number is a typing error.
MAX_INSTANCES = 1024
# A process has an interpreter of its own, of some 30 MB.
_MAX_PROCESSES = 64


def instance_group_faults(message: Any, completion: Completion) -> Iterator[str]:
    """Yield the faults of a completed configuration's instance groups; at least one exists."""
    for group in message.instance_group:
        where = f"instance group {group.name} of model {message.name}"
        if group.kind == pb.ModelInstanceGroup.KIND_GPU:
            yield from _gpu_faults(message, group, where, completion)
        elif group.gpus:
            kind = pb.ModelInstanceGroup.Kind
            name = kind.Name(group.kind) if group.kind in kind.values() else group.kind
            yield f"{where} has kind {name} but specifies one or more GPUs"
        if group.count < 0:
            yield f"{where} has a negative count"
        yield from _dla_faults(message, group)
        for profile in group.profile:
            if message.platform != "tensorrt_plan":
                yield (
                    f"{where} and platform {message.platform}specifies profile field which is only "
                    "supported for TensorRT models"
                )
                break
            # A longer text is no profile number, and Python parses none of 5,000 digits.
            if not (profile.isascii() and profile.isdigit() and len(profile) < 10):
                yield (
                    f"{where} and platform {message.platform} specifies invalid profile {profile}. "
                    "The field should contain the string representation of a non-negative integer."
                )
        if any(not resource.name for resource in group.rate_limiter.resources):
            yield f"{where} has a rate limiter resource without 'name'"
    count = sum(max(g.count, 0) * max(1, len(g.gpus)) for g in message.instance_group)
    most = _MAX_PROCESSES if message.backend == "python" else MAX_INSTANCES
    if count > most:
        yield f"model {message.name} asks for {count} instances; at most {most} can be"
    if all(group.passive for group in message.instance_group):
        yield f"every instance group of model {message.name} is passive, so that nothing would run"


def absent_gpus(message: Any, completion: Completion) -> Iterator[str]:
    """Yield the groups that need a GPU where there is none; its driver may come up later."""
    for group in message.instance_group:
        wants = group.kind == pb.ModelInstanceGroup.KIND_GPU and message.backend in GPU_BACKENDS
        if wants and not completion.gpus:
            where = f"instance group {group.name} of model {message.name}"
            yield f"{where} has kind KIND_GPU but no GPUs are available: {completion.no_gpu}"


def _gpu_faults(message: Any, group: Any, where: str, completion: Completion) -> Iterator[str]:
    if message.backend not in GPU_BACKENDS:
        yield (
            f"{where} has kind KIND_GPU but server does not support GPUs for backend "
            f"'{message.backend}'; give KIND_CPU"
        )
    for gpu in group.gpus:
        if completion.gpus and not 0 <= gpu < completion.gpus:
            there = ",".join(map(str, range(completion.gpus)))
            yield (
                f"{where} specifies invalid or unsupported gpu id {gpu}. GPUs with at least the "
                f"minimum required CUDA compute compatibility of 6.000000 are: {there}"
            )


def _dla_faults(message: Any, group: Any) -> Iterator[str]:
    devices = group.secondary_devices
    if len(devices) > 1:
        yield (
            f"{group.name} of model {message.name} must have either zero or or one secondary "
            "devices"
        )
    nvdla = pb.ModelInstanceGroup.SecondaryDevice.KIND_NVDLA
    if any(device.kind != nvdla for device in devices):
        yield f"secondary device for {group.name} of model {message.name} must be KIND_NVDLA"
