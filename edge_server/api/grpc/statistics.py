"""ModelStatistics: the counters of loaded models as the protocol's messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tritonclient.grpc import service_pb2 as pb

from edge_server.errors import InvalidRequest
from edge_server.inference.request_check import parse_version

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edge_server.inference.data_plane import DataPlane
    from edge_server.inference.snapshot import LoadedModel
    from edge_server.inference.statistics import Duration

_REQUEST_DURATIONS = (
    "success",
    "fail",
    "queue",
    "compute_input",
    "compute_infer",
    "compute_output",
    "cache_hit",
    "cache_miss",
)
_BATCH_DURATIONS = ("compute_input", "compute_infer", "compute_output")
_RESPONSE_DURATIONS = (
    "compute_infer",
    "compute_output",
    "success",
    "fail",
    "empty_response",
    "cancel",
)


def statistics_message(data_plane: DataPlane, name: str, version: str) -> Any:
    """Return a `ModelStatisticsResponse` for all loaded models, one model, or one version.

    Raises:
        InvalidRequest: that model or version is not loaded (Triton's texts).
    """
    asked_version = parse_version(version) if version else None
    found = [
        entry.loaded
        for entry in data_plane.index(only_ready=True)
        if entry.loaded is not None and name in ("", entry.name)
    ]
    if name and not found:
        raise InvalidRequest(f"requested model '{name}' is not available")
    if name and asked_version is not None:
        found = [loaded for loaded in found if loaded.version == asked_version]
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
    _copy(model.inference_stats, counts, _REQUEST_DURATIONS)
    for batch_size, batch in sorted(counts.batches.items()):
        _copy(model.batch_stats.add(batch_size=batch_size), batch, _BATCH_DURATIONS)
    for index, answered in counts.responses.items():
        _copy(model.response_stats[index], answered, _RESPONSE_DURATIONS)


def _copy(message: Any, source: object, names: Iterable[str]) -> None:
    for name in names:
        duration: Duration = getattr(source, name)
        target = getattr(message, name)
        target.count, target.ns = duration.count, duration.ns
