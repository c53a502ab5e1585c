"""TritonServicer: inference over gRPC, and the service of health."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2 as pb

from edge_server.api.calls import GRPC, CallMoments, traced
from edge_server.api.convert import to_infer_request, to_response_message
from edge_server.api.grpc.methods import method_handlers, parsing, status_of
from edge_server.api.grpc.stream import InferStream
from edge_server.api.grpc.traffic import COMPRESSED, Traffic
from edge_server.api.grpc.wire import read_load_request, read_request, write_response
from edge_server.api.parameters import EMPTY_FINAL_RESPONSE
from edge_server.errors import EdgeServerError, NotFound, Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterator

    import grpc

    from edge_server.api.access import AccessRules
    from edge_server.api.admission import Admission
    from edge_server.api.grpc.methods import UnaryCall
    from edge_server.api.grpc.stream import StreamRequest
    from edge_server.api.parameters import HeaderForwarding
    from edge_server.api.triton_calls import TritonCalls
    from edge_server.inference.data_plane import DataPlane

_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
_STATES = health_pb2.HealthCheckResponse
HEALTH_WATCH = "/grpc.health.v1.Health/Watch"
# How late a client learns that the server is ready; that it stops it learns at once.
_WATCH_S = 0.2
_SERVICES = (
    "",
    "inference.GRPCInferenceService",
    "edge.lanes.v1.LaneService",
    "edge.perception.v1.PerceptionService",
)


class TritonServicer:
    """Serves the methods of `inference.GRPCInferenceService` that read and write bytes themselves;
    `calls` serves the others.

    Args:
        calls: what the daemon offers to this side's clients.
        moments: of the thread's call: when it was received; None is unknown.
        headers: adds headers of calls to their requests' parameters; None adds none.
    """

    def __init__(
        self,
        calls: TritonCalls,
        admission: Admission,
        *,
        moments: CallMoments | None = None,
        traffic: Traffic | None = None,
        headers: HeaderForwarding | None = None,
    ) -> None:
        self.calls = calls
        self._data_plane = calls.data_plane
        self._lease = calls.data_plane.lease
        self._admission = admission
        self._shared_memory = calls.shared_memory
        self._tracer = calls.tracer
        self._requests = calls.requests
        self._moments = moments or CallMoments()
        self._traffic = traffic or Traffic()
        self._headers = headers

    def ModelInfer(self, request: bytes, call: UnaryCall) -> bytes:
        """Parse and serialise bytes, so that tensors are not copied; see `wire`."""
        began_ns = time.monotonic_ns()
        context = call.context
        try:
            with self._admission, self._lease() as snapshot:
                message, raw = read_request(request, call)
                loaded = snapshot.find(message.model_name, message.model_version)
                if loaded.config.decoupled:
                    raise Unsupported(
                        "ModelInfer RPC doesn't support models with decoupled transaction policy"
                    )
                read, forms = to_infer_request(
                    message,
                    raw,
                    loaded.config,
                    context.time_remaining(),
                    call,
                    shared_memory=self._shared_memory,
                )
                if self._headers is not None:
                    read = self._headers.add(read, context.invocation_metadata())
                if self._tracer.on:
                    reading_ns = (self._moments.taken_ns, began_ns)
                    metadata = context.invocation_metadata
                    read = traced(
                        self._tracer,
                        read,
                        GRPC,
                        reading_ns,
                        metadata,
                        when_over=context.add_callback,
                    )
                response = snapshot.run(loaded, read)
            written = write_response(*to_response_message(response, forms))
        except EdgeServerError as error:
            self._requests.failed("grpc", _code_of(error))
            raise
        if read.trace is not None:
            read.trace.mark(GRPC.send_start)
        self._requests.responded("grpc", loaded.config.name, began_ns)
        return written

    def ModelStreamInfer(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Stream messages as bytes, as in ModelInfer; see `InferStream`."""
        metadata = context.invocation_metadata()
        stream = InferStream(
            lambda data, stream_request: self._submit(data, stream_request, context),
            self._traffic.budget,
            errors_end_it=("triton_grpc_error", "true") in [(m[0], m[1]) for m in metadata],
        )
        with self._admission.stream(stream.close):
            if not context.add_callback(stream.end):
                return
            yield from stream.responses(requests)

    def _submit(self, data: bytes, stream_request: StreamRequest, context: Any) -> None:
        try:
            self._read_and_submit(data, stream_request, context)
        except EdgeServerError as error:
            self._requests.failed("grpc", _code_of(error))
            raise

    def _read_and_submit(self, data: bytes, stream_request: StreamRequest, context: Any) -> None:
        if data.startswith(COMPRESSED):
            data = self._traffic.decompressed(data, stream_request)
        message, raw = read_request(data, stream_request)
        stream_request.id = message.id
        lease = self._lease()
        try:
            loaded = lease.snapshot.find(message.model_name, message.model_version)
            request, stream_request.forms = to_infer_request(
                message,
                raw,
                loaded.config,
                context.time_remaining(),
                stream_request,
                shared_memory=self._shared_memory,
            )
            if self._headers is not None:
                request = self._headers.add(request, context.invocation_metadata())
            stream_request.model_name, stream_request.model_version = (
                loaded.config.name,
                str(loaded.version),
            )
            stream_request.decoupled = loaded.config.decoupled
            stream_request.empty_final = (
                EMPTY_FINAL_RESPONSE in message.parameters
                and message.parameters[EMPTY_FINAL_RESPONSE].bool_param
            )
            stream_request.take_place()
            if self._tracer.on:
                reading_ns, metadata = stream_request.reading_ns, context.invocation_metadata
                request = traced(self._tracer, request, GRPC, reading_ns, metadata)
        except BaseException:
            lease.release()
            raise
        respond = self._requests.timed("grpc", loaded.name, stream_request.respond, _code_of)
        self._data_plane.submit(request, respond, lease)

    def RepositoryModelLoad(self, request: bytes, call: UnaryCall) -> bytes:
        """Parse the message from bytes, as it may carry model files; see `read_load_request`."""
        self.calls.loading()  # refuses before it is parsed
        self.calls.load(read_load_request(request), call)
        return b""


def _code_of(error: EdgeServerError) -> str:
    return str(status_of(error).name)


class HealthServicer:
    """`grpc.health.v1.Health`, the check of load balancers and `grpc_health_probe`: SERVING while
    the server is ready. A `Watch`, with which a client balances its own calls, has a thread, and
    counts in `streams`."""

    def __init__(self, data_plane: DataPlane, streams: Admission) -> None:
        self._data_plane = data_plane
        self._streams = streams

    def Check(self, request: Any) -> Any:
        if request.service not in _SERVICES:
            raise NotFound(f"unknown service '{request.service}'")
        return _STATES(status=self._status(request.service))

    def Watch(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        ended = threading.Event()
        with self._streams.stream(ended.set):
            request = parsing(health_pb2.HealthCheckRequest)(next(requests, b""))
            if not context.add_callback(ended.set):
                return
            before = None
            while not ended.is_set():
                if (status := self._status(request.service)) != before:
                    before = status
                    yield _STATES(status=status).SerializeToString()
                ended.wait(_WATCH_S)
            yield _STATES(status=_STATES.NOT_SERVING).SerializeToString()

    def _status(self, service: str) -> Any:
        if service not in _SERVICES:
            return _STATES.SERVICE_UNKNOWN
        return _STATES.SERVING if self._data_plane.server_ready() else _STATES.NOT_SERVING


def register(
    server: grpc.Server,
    servicer: TritonServicer,
    health: HealthServicer,
    *,
    traffic: Traffic | None = None,
    rules: AccessRules | None = None,
) -> None:
    """Serve every method of the published services on `server`."""
    service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    infer = method_handlers(
        service, servicer.calls, over_bytes=servicer, traffic=traffic, rules=rules
    )
    server.add_registered_method_handlers(service.full_name, infer)
    checks = method_handlers(_HEALTH, health, traffic=traffic, rules=rules)
    server.add_registered_method_handlers(_HEALTH.full_name, checks)
