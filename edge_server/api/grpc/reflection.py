"""Server reflection: generic clients (grpcurl, grpcui) find the services and their messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import SERVICE_NAME, ReflectionServicer

from edge_server.api.access import REFLECTION
from edge_server.api.admission import SHUTTING_DOWN
from edge_server.api.grpc.methods import streaming
from edge_server.api.grpc.traffic import end_call
from edge_server.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from edge_server.api.access import AccessRules
    from edge_server.api.admission import Admission
    from edge_server.api.grpc.methods import Handler
    from edge_server.api.grpc.traffic import Traffic


def register_reflection(
    server: grpc.Server,
    services: Sequence[str],
    streams: Admission,
    *,
    traffic: Traffic,
    rules: AccessRules,
    on_threads: Callable[[Handler], Handler],
) -> None:
    """Serve reflection, as v1 and v1alpha, whose messages are the same.

    Args:
        server: is not started yet.
        services: their full names.
        streams: admits a client's stream, which holds a thread for as long as it is open.
        traffic, rules: see `unary`.
        on_threads: has a handler run on the threads of such streams.
    """
    paths = [path.rsplit("/", 1) for path in REFLECTION]
    # v1 itself cannot be described: its .proto is in no package that fits protobuf 6.
    servicer = ReflectionServicer((*services, SERVICE_NAME))

    def reflect(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        def shut_down() -> None:
            end_call(context, grpc.StatusCode.UNAVAILABLE, SHUTTING_DOWN)

        with streams.stream(shut_down):
            for response in servicer.ServerReflectionInfo(map(_parse, requests), context):
                yield response.SerializeToString()

    for service, method in paths:
        handler = on_threads(streaming(reflect, f"{service}/{method}", traffic, rules))
        server.add_registered_method_handlers(service.strip("/"), {method: handler})


def _parse(request: bytes) -> Any:
    try:
        return reflection_pb2.ServerReflectionRequest.FromString(request)
    except DecodeError as error:
        raise InvalidRequest(f"the request is no ServerReflectionRequest: {error}") from error
