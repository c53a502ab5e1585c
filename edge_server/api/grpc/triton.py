"""TritonServicer: each method of the Triton protocol calls the data plane."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from edge_server.api.calls import GRPC, CallMoments, RequestMetrics, traced
from edge_server.api.control_calls import (
    index_message,
    load_model,
    loading,
    metadata_message,
    refuse_repository_name,
    refuse_unknown_model,
    server_extensions,
    statistics_message,
    unload_model,
    update_log_settings,
    update_trace_settings,
)
from edge_server.api.convert import to_infer_request, to_response_message
from edge_server.api.grpc.methods import method_handlers, parsing, status_of
from edge_server.api.grpc.stream import InferStream
from edge_server.api.grpc.traffic import COMPRESSED, Traffic
from edge_server.api.grpc.wire import read_load_request, read_request, write_response
from edge_server.api.parameters import EMPTY_FINAL_RESPONSE
from edge_server.api.shared_memory import allowed
from edge_server.errors import EdgeServerError, NotFound, Unsupported
from edge_server.inference.tracing import Tracer
from edge_server.process.logs import LogSwitches

if TYPE_CHECKING:
    from collections.abc import Iterator

    import grpc

    from edge_server.api.access import AccessRules
    from edge_server.api.admission import Admission
    from edge_server.api.grpc.methods import UnaryCall
    from edge_server.api.grpc.stream import StreamRequest
    from edge_server.api.parameters import HeaderForwarding
    from edge_server.api.shared_memory import SharedMemory
    from edge_server.inference.data_plane import DataPlane, ModelControl

# Methods that parse and serialise their messages themselves.
_OVER_BYTES = ("ModelInfer", "ModelStreamInfer", "RepositoryModelLoad")
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


class TritonServicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Serves `inference.GRPCInferenceService` over a DataPlane.

    Args:
        control: loads and unloads models on request; None refuses such requests.
        shared_memory: the clients' regions; None refuses shared memory.
        moments: of the thread's call: when it was received; None is unknown.
        headers: adds headers of calls to their requests' parameters; None adds none.
    """

    def __init__(
        self,
        data_plane: DataPlane,
        name: str,
        version: str,
        admission: Admission,
        *,
        control: ModelControl | None = None,
        shared_memory: SharedMemory | None = None,
        log_switches: LogSwitches | None = None,
        tracer: Tracer | None = None,
        moments: CallMoments | None = None,
        traffic: Traffic | None = None,
        requests: RequestMetrics | None = None,
        headers: HeaderForwarding | None = None,
    ) -> None:
        self._data_plane = data_plane
        self._lease = data_plane.lease
        self._admission = admission
        self._name = name
        self._version = version
        self._control = control
        self._shared_memory = shared_memory
        self._log_switches = log_switches or LogSwitches()
        self._tracer = tracer or Tracer()
        self._moments = moments or CallMoments()
        self._extensions = server_extensions(control, shared_memory, self._tracer)
        self._traffic = traffic or Traffic()
        self._budget = self._traffic.budget
        self._requests = requests or RequestMetrics()
        self._headers = headers

    def ServerLive(self, request: Any, context: Any) -> Any:
        return pb.ServerLiveResponse(live=self._data_plane.server_live())

    def ServerReady(self, request: Any, context: Any) -> Any:
        return pb.ServerReadyResponse(ready=self._data_plane.server_ready())

    def ModelReady(self, request: Any, context: Any) -> Any:
        ready = self._data_plane.model_ready(request.name, request.version)
        return pb.ModelReadyResponse(ready=ready)

    def ServerMetadata(self, request: Any, context: Any) -> Any:
        return pb.ServerMetadataResponse(
            name=self._name, version=self._version, extensions=self._extensions
        )

    def ModelMetadata(self, request: Any, context: Any) -> Any:
        return metadata_message(self._data_plane, request.name, request.version)

    def ModelConfig(self, request: Any, context: Any) -> Any:
        metadata = self._data_plane.metadata(request.name, request.version)
        return pb.ModelConfigResponse(config=metadata.config.message)

    def ModelStatistics(self, request: Any, context: Any) -> Any:
        return statistics_message(self._data_plane, request.name, request.version)

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
                    context.time_remaining(),
                    call,
                    self._shared_memory,
                    config=loaded.config,
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
            self._budget,
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
                context.time_remaining(),
                stream_request,
                self._shared_memory,
                config=loaded.config,
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

    def RepositoryIndex(self, request: Any, context: Any) -> Any:
        refuse_repository_name(request.repository_name)
        known = self._control or self._data_plane
        return index_message(known, only_ready=request.ready)

    def RepositoryModelLoad(self, request: bytes, call: UnaryCall) -> bytes:
        """Parse the message from bytes, as it may carry model files; see `read_load_request`."""
        load_model(loading(self._control), read_load_request(request), call)
        return b""

    def RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        unload_model(self._control, request)
        return pb.RepositoryModelUnloadResponse()

    def SystemSharedMemoryStatus(self, request: Any, context: Any) -> Any:
        response = pb.SystemSharedMemoryStatusResponse()
        if self._shared_memory is None:
            return response
        for region in self._shared_memory.regions(request.name):
            status = response.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.byte_size
        return response

    def SystemSharedMemoryRegister(self, request: Any, context: Any) -> Any:
        regions = allowed(self._shared_memory)
        regions.register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    def SystemSharedMemoryUnregister(self, request: Any, context: Any) -> Any:
        allowed(self._shared_memory).unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    def CudaSharedMemoryStatus(self, request: Any, context: Any) -> Any:
        """Return no region: CUDA shared memory is unsupported."""
        if request.name and self._shared_memory is not None:
            raise NotFound(f"Unable to find cuda shared memory region: '{request.name}'")
        return pb.CudaSharedMemoryStatusResponse()

    def CudaSharedMemoryRegister(self, request: Any, context: Any) -> Any:
        allowed(self._shared_memory)
        raise Unsupported(
            f"failed to register CUDA shared memory region: '{request.name}', GPUs not supported"
        )

    def CudaSharedMemoryUnregister(self, request: Any, context: Any) -> Any:
        allowed(self._shared_memory)
        return pb.CudaSharedMemoryUnregisterResponse()

    def TraceSetting(self, request: Any, context: Any) -> Any:
        refuse_unknown_model(self._data_plane, request.model_name)
        return update_trace_settings(self._tracer, request.model_name, request.settings)

    def LogSettings(self, request: Any, context: Any) -> Any:
        return update_log_settings(self._log_switches, request)


def _code_of(error: EdgeServerError) -> str:
    return str(status_of(error).name)


class HealthServicer:
    """`grpc.health.v1.Health`, the check of load balancers and `grpc_health_probe`: SERVING while
    the server is ready. A `Watch`, with which a client balances its own calls, has a thread, and
    counts in `streams`."""

    def __init__(self, data_plane: DataPlane, streams: Admission) -> None:
        self._data_plane = data_plane
        self._streams = streams

    def Check(self, request: Any, context: Any) -> Any:
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
    infer = method_handlers(service, servicer, _OVER_BYTES, traffic, rules)
    server.add_registered_method_handlers(service.full_name, infer)
    checks = method_handlers(_HEALTH, health, ("Watch",), traffic, rules)
    server.add_registered_method_handlers(_HEALTH.full_name, checks)
