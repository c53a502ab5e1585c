"""The Triton protocol's servicer: each method asks the data plane and answers in its words.

A method that is not offered answers UNIMPLEMENTED by name.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from edge_server.errors import InvalidRequest, Unsupported
from edge_server.grpc_api.convert import (
    DISABLED_SHARED_MEMORY,
    to_infer_request,
    to_response_message,
)
from edge_server.grpc_api.wire import read_request, write_response

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edge_server.grpc_api.admission import Admission
    from edge_server.model_config.config import ModelConfig
    from edge_server.serving.data_plane import DataPlane
    from edge_server.tensors import TensorSpec

# Only what works is advertised.
EXTENSIONS = ("model_configuration", "binary_tensor_data")


class TritonServicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """`inference.GRPCInferenceService` over a DataPlane."""

    def __init__(
        self, data_plane: DataPlane, name: str, version: str, admission: Admission
    ) -> None:
        self._data_plane = data_plane
        self._admission = admission
        self._name = name
        self._version = version

    def ServerLive(self, request: Any, context: Any) -> Any:
        return pb.ServerLiveResponse(live=True)

    def ServerReady(self, request: Any, context: Any) -> Any:
        return pb.ServerReadyResponse(ready=self._data_plane.server_ready())

    def ModelReady(self, request: Any, context: Any) -> Any:
        ready = self._data_plane.model_ready(request.name, request.version)
        return pb.ModelReadyResponse(ready=ready)

    def ServerMetadata(self, request: Any, context: Any) -> Any:
        return pb.ServerMetadataResponse(
            name=self._name, version=self._version, extensions=EXTENSIONS
        )

    def ModelMetadata(self, request: Any, context: Any) -> Any:
        metadata = self._data_plane.metadata(request.name, request.version)
        config = metadata.config
        return pb.ModelMetadataResponse(
            name=config.name,
            versions=[str(version) for version in metadata.versions],
            platform=config.kind,
            inputs=_tensor_metadata(config, config.inputs),
            outputs=_tensor_metadata(config, config.outputs),
        )

    def ModelConfig(self, request: Any, context: Any) -> Any:
        metadata = self._data_plane.metadata(request.name, request.version)
        return pb.ModelConfigResponse(config=metadata.config.message)

    def ModelInfer(self, request: bytes, context: Any) -> bytes:
        """Takes and gives the messages as bytes, so that tensors are not copied; see `wire`."""
        message, raw = read_request(request)
        self._data_plane.require(message.model_name, message.model_version)
        with self._admission.admit():
            response = self._data_plane.infer(
                to_infer_request(message, raw, timeout_s=_patience_s(context))
            )
        return write_response(*to_response_message(response))

    def RepositoryIndex(self, request: Any, context: Any) -> Any:
        if request.repository_name:
            raise Unsupported("'repository_name' specification is not supported")
        response = pb.RepositoryIndexResponse()
        for entry in self._data_plane.index(only_ready=request.ready):
            response.models.add(
                name=entry.name,
                version=str(entry.version) if entry.version else "",
                state=entry.state.value,
                reason=entry.reason,
            )
        return response


def method_handlers(servicer: TritonServicer) -> grpc.GenericRpcHandler:
    """Every method of the published service, over bytes, with `servicer` to answer it.

    Like `add_GRPCInferenceServiceServicer_to_server`, but that messages are parsed within the
    call, where a damaged one is the caller's error, and that ModelInfer's are not parsed at all:
    it reads them itself.
    """
    service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    handlers = {method.name: _handler(servicer, method) for method in service.methods}
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _handler(servicer: TritonServicer, method: Any) -> grpc.RpcMethodHandler[Any, Any]:
    answer = getattr(servicer, method.name)
    read = GetMessageClass(method.input_type).FromString
    not_offered = (
        DISABLED_SHARED_MEMORY
        if "SharedMemory" in method.name
        else f"{method.name} is not offered by this server"
    )

    def answer_parsed(request: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            message = read(request)
        except DecodeError as error:
            raise InvalidRequest(f"the request is no {method.input_type.name}: {error}") from error
        written: bytes = answer(message, context).SerializeToString()
        return written

    def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
        raise Unsupported(not_offered)

    def refuse_stream(requests: Any, context: grpc.ServicerContext) -> NoReturn:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, not_offered)

    if method.client_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse_stream)
    if method.name not in vars(TritonServicer):
        return grpc.unary_unary_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(
        answer if method.name == "ModelInfer" else answer_parsed
    )


def _patience_s(context: grpc.ServicerContext) -> float | None:
    """How long the caller still waits; grpc says "for ever" as some hundred billion years."""
    left_s = context.time_remaining()
    return None if left_s is None or left_s > threading.TIMEOUT_MAX else left_s


def _tensor_metadata(config: ModelConfig, specs: Iterable[TensorSpec]) -> list[Any]:
    return [
        pb.ModelMetadataResponse.TensorMetadata(
            name=spec.name, datatype=spec.datatype.value, shape=config.full_shape(spec)
        )
        for spec in specs
    ]
