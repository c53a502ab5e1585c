"""HealthServicer: grpc.health.v1, the check of load balancers and `grpc_health_probe`.

Only `Check`; `Watch` is not offered, which its definition allows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health_pb2 as pb

from edge_server.errors import NotFound

if TYPE_CHECKING:
    from edge_server.inference.data_plane import DataPlane

SERVICE = pb.DESCRIPTOR.services_by_name["Health"]
_KNOWN = ("", "inference.GRPCInferenceService")


class HealthServicer:
    """`grpc.health.v1.Health` over a DataPlane: SERVING while the server is ready."""

    def __init__(self, data_plane: DataPlane) -> None:
        self._data_plane = data_plane

    def Check(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002 - the protocol's
        if request.service not in _KNOWN:
            raise NotFound(f"unknown service '{request.service}'")
        ready = self._data_plane.server_ready()
        state = pb.HealthCheckResponse.SERVING if ready else pb.HealthCheckResponse.NOT_SERVING
        return pb.HealthCheckResponse(status=state)
