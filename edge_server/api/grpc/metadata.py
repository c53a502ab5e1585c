"""The metadata of the server and of a model's tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tritonclient.grpc import service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edge_server.api.grpc.shared_memory import SharedMemory
    from edge_server.inference.control import ModelControl
    from edge_server.inference.tracing.tracer import Tracer
    from edge_server.model_config.config import ModelConfig
    from edge_server.tensors import TensorSpec


def server_extensions(
    control: ModelControl | None, shared_memory: SharedMemory | None, tracer: Tracer
) -> tuple[str, ...]:
    """Return the supported extensions, in Triton's order and spelling."""
    offered = {
        "classification": True,
        "sequence": True,
        "model_repository": control is not None,
        "model_repository(unload_dependents)": control is not None,
        "schedule_policy": True,
        "model_configuration": True,
        "system_shared_memory": shared_memory is not None,
        "binary_tensor_data": True,
        "parameters": True,
        "statistics": True,
        "trace": bool(tracer.file_name),
        "logging": True,
    }
    return tuple(name for name, works in offered.items() if works)


def tensor_metadata(config: ModelConfig, specs: Iterable[TensorSpec]) -> list[Any]:
    """Return the metadata of a model's inputs or outputs, batch dimension included."""
    return [
        pb.ModelMetadataResponse.TensorMetadata(
            name=spec.name, datatype=spec.datatype.value, shape=config.full_shape(spec)
        )
        for spec in specs
    ]
