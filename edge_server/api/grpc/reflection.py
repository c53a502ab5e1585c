"""Server reflection: generic clients (grpcurl, grpcui) find the services and their messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import SERVICE_NAME, ReflectionServicer

from edge_server.api.access import REFLECTION
from edge_server.api.grpc.methods import streaming
from edge_server.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import grpc

    from edge_server.api.access import AccessRules
    from edge_server.api.admission import Admission
    from edge_server.api.grpc.traffic import Traffic


def register_reflection(
    server: grpc.Server,
    services: Sequence[str],
    streams: Admission,
    traffic: Traffic,
    rules: AccessRules,
) -> None:
    """Serve reflection, as v1 and v1alpha, whose messages are the same.

    Args:
        server: is not started yet.
        services: their full names.
        streams: admits a client's stream, which holds a thread for as long as it is open, and ends
            it as CANCELLED.
        traffic, rules: see `streaming`.
    """
    # v1 itself cannot be described: its .proto is in no package that fits protobuf 6.
    servicer = ReflectionServicer((*services, SERVICE_NAME))

    def reflect(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        with streams.stream(context.cancel):
            for response in servicer.ServerReflectionInfo(map(_parse, requests), context):
                yield response.SerializeToString()

    for path in REFLECTION:
        _, service, method = path.split("/")
        handler = streaming(reflect, path, traffic, rules)
        server.add_registered_method_handlers(service, {method: handler})


def _parse(request: bytes) -> Any:
    try:
        return reflection_pb2.ServerReflectionRequest.FromString(request)
    except DecodeError as error:
        raise InvalidRequest(f"the request is no ServerReflectionRequest: {error}") from error
