"""The Triton protocol's servicer: each method asks the data plane and answers in its words.

What a method lacks answers UNIMPLEMENTED by name, see `interceptors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from edge_server.errors import Unsupported
from edge_server.grpc_api.convert import to_infer_request, to_response_message
from edge_server.grpc_api.wire import read_request, write_response

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edge_server.model_config.config import ModelConfig
    from edge_server.serving.data_plane import DataPlane
    from edge_server.tensors import TensorSpec

# Only what works is advertised.
EXTENSIONS = ("model_configuration", "binary_tensor_data")


class TritonServicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """`inference.GRPCInferenceService` over a DataPlane."""

    def __init__(self, data_plane: DataPlane, name: str, version: str) -> None:
        self._data_plane = data_plane
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
        response = self._data_plane.infer(to_infer_request(*read_request(request)))
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
    """Every method of the published service, with `servicer` to answer it.

    What `add_GRPCInferenceServiceServicer_to_server` would register, but for ModelInfer, whose
    messages come and go as bytes.
    """
    service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in service.methods:
        answer = getattr(servicer, method.name)
        if method.name == "ModelInfer":
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(answer)
        else:
            make = (
                grpc.stream_stream_rpc_method_handler
                if method.client_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            handlers[method.name] = make(
                answer,
                request_deserializer=GetMessageClass(method.input_type).FromString,
                response_serializer=GetMessageClass(method.output_type).SerializeToString,
            )
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _tensor_metadata(config: ModelConfig, specs: Iterable[TensorSpec]) -> list[Any]:
    return [
        pb.ModelMetadataResponse.TensorMetadata(
            name=spec.name, datatype=spec.datatype.value, shape=config.full_shape(spec)
        )
        for spec in specs
    ]
