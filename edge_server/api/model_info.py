"""What a client may know: the server's extensions, a model's tensors, the counters of models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tritonclient.grpc import service_pb2 as pb

from edge_server.errors import InvalidRequest
from edge_server.inference.request_check import parse_version

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edge_server.api.shared_memory import SharedMemory
    from edge_server.inference.data_plane import DataPlane, ModelControl
    from edge_server.inference.registry import LoadedModel
    from edge_server.inference.tracing import Tracer
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


def statistics_message(data_plane: DataPlane, name: str, version: str) -> Any:
    """Return a `ModelStatisticsResponse` for all loaded models, one model, or one version.

    Raises:
        InvalidRequest: that model or version is not loaded (Triton's texts).
    """
    wanted_version = parse_version(version) if version else None
    found = [
        entry.loaded
        for entry in data_plane.index(only_ready=True)
        if entry.loaded is not None and name in ("", entry.name)
    ]
    if name and not found:
        raise InvalidRequest(f"requested model '{name}' is not available")
    if name and wanted_version is not None:
        found = [loaded for loaded in found if loaded.version == wanted_version]
        if not found:
            raise InvalidRequest(f"requested model version is not available for model '{name}'")
    response = pb.ModelStatisticsResponse()
    for loaded in found:
        _add(response, loaded)
    return response


def _add(response: Any, loaded: LoadedModel) -> None:
    counts = loaded.statistics.counts()
    model = response.model_stats.add(
        name=loaded.config.name,
        version=str(loaded.version),
        last_inference=counts.last_inference_ms,
        inference_count=counts.inference_count,
        execution_count=counts.execution_count,
    )
    _copy_durations(model.inference_stats, counts)
    for batch_size, batch in sorted(counts.batches.items()):
        _copy_durations(model.batch_stats.add(batch_size=batch_size), batch)
    for index, counted in counts.responses.items():
        _copy_durations(model.response_stats[index], counted)


def _copy_durations(message: Any, source: object) -> None:
    """Copy each duration that the message has; `source` has them by the same names."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None:
            duration, target = getattr(source, field.name), getattr(message, field.name)
            target.count, target.ns = duration.count, duration.ns
