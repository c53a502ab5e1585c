"""Calls of a running daemon's gRPC server, from another process: Triton's protocol and lanes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import grpc
from tritonclient.grpc import InferResult, service_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import serialize_byte_tensor

from edge_server.board.listening import client_host, host_and_port
from edge_server.errors import (
    DeadlineExceeded,
    EdgeServerError,
    InternalError,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    SettingsError,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from edge_server.proto.edge.lanes.v1 import lane_service_pb2 as lanes_pb
from edge_server.tensors import DataType

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from edge_server.settings import Grpc

_INFER = "/inference.GRPCInferenceService/ModelInfer"
_LANES = "/edge.lanes.v1.LaneService/"
_TIMEOUT_S = 5.0
# A plan is built, or a large model read, while a load is waited for.
_LOAD_S = 3600.0
# Of a request of `infer`.
_INFER_S = 60.0
CHANNEL_OPTIONS = (
    # The environment's proxies are for other machines.
    ("grpc.enable_http_proxy", 0),
    # Do not share the connection of another channel of this process.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)
_ERRORS: Mapping[grpc.StatusCode, type[EdgeServerError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNIMPLEMENTED: Unsupported,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
}
# The environment variable of a bearer token, see `Tokens`; a Unix socket needs none.
TOKEN = "EDGE_SERVER_TOKEN"  # noqa: S105 - its name


def socket_target(path: str) -> str:
    """Return the Unix socket's address in gRPC's notation."""
    return f"unix:{quote(str(Path(path).absolute()))}"


def target_of(settings: Grpc) -> str:
    """Return where a client on this machine calls the daemon that runs with `settings`: its Unix
    socket where it has one.

    Raises:
        SettingsError: there is no side that a client without a certificate can call.
    """
    if not settings.enabled:
        raise SettingsError("grpc: it is off; set enabled = true in [grpc]")
    if settings.socket is not None:
        return socket_target(settings.socket)
    if settings.tls.on:
        raise SettingsError(
            "grpc: TCP is encrypted, and this client has no certificate; set a socket in [grpc], "
            'like "/run/edge_server/grpc.sock", and restart the daemon'
        )
    return host_and_port(client_host(settings.host), settings.port)


class DaemonClient:
    """A connection to the gRPC server of a daemon on this machine; each method is one call.

    Every method raises an EdgeServerError by the status of the response: Unavailable where nothing
    answers, InvalidRequest, NotFound, … with the server's own text. Methods may be called from any
    thread.

    Attributes:
        target: the address, in gRPC's notation.

    Args:
        settings: the daemon's.

    Raises:
        SettingsError: see `target_of`.
    """

    def __init__(self, settings: Grpc) -> None:
        self.target = target_of(settings)
        self._metadata = tuple((each.header, each.value) for each in settings.restricted)
        if settings.socket is None and (token := os.environ.get(TOKEN)):
            self._metadata += (("authorization", f"Bearer {token}"),)
        self._channel = grpc.insecure_channel(self.target, options=CHANNEL_OPTIONS)
        self._triton = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def __enter__(self) -> DaemonClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def server(self) -> Any:
        """Return the `ServerMetadataResponse`."""
        return self._call(self._triton.ServerMetadata, pb.ServerMetadataRequest())

    def is_ready(self) -> bool:
        return bool(self._call(self._triton.ServerReady, pb.ServerReadyRequest()).ready)

    def index(self) -> Sequence[Any]:
        """Return every model version of the repository with its state and the reason for it."""
        return tuple(self._call(self._triton.RepositoryIndex, pb.RepositoryIndexRequest()).models)

    def statistics(self, model: str = "") -> Sequence[Any]:
        """Return the `ModelStatistics` of each loaded version, of all models by default."""
        request = pb.ModelStatisticsRequest(name=model)
        return tuple(self._call(self._triton.ModelStatistics, request).model_stats)

    def config(self, model: str) -> Any:
        """Return the completed `ModelConfig`."""
        return self._call(self._triton.ModelConfig, pb.ModelConfigRequest(name=model)).config

    def load(self, model: str, config_json: str = "") -> None:
        """Load a model; returns after the load."""
        request = pb.RepositoryModelLoadRequest(model_name=model)
        if config_json:
            request.parameters["config"].string_param = config_json
        self._call(self._triton.RepositoryModelLoad, request, _LOAD_S)

    def infer(
        self,
        model: str,
        inputs: Mapping[str, NDArray[Any]],
        *,
        version: str = "",
        classes: Mapping[str, int] | None = None,
    ) -> dict[str, NDArray[Any]]:
        """Return the outputs of one request by name.

        Args:
            classes: output → number of classes to return in its place, as texts
                `score:index:label`.
        """
        request = infer_request(model, inputs, version, classes)
        result = InferResult(self._call(self._triton.ModelInfer, request, _INFER_S))
        names = [output.name for output in result.get_response().outputs]
        return {name: result.as_numpy(name) for name in names}

    def prepared(self, request: Any, timeout_s: float) -> Callable[[], object]:
        """Return a function that sends this `ModelInferRequest`: it is serialised once, and its
        responses are not parsed, so that a measurement has little of the client in it."""
        data = request.SerializeToString()
        call: Any = self._channel.unary_unary(_INFER)

        def send() -> object:
            return self._call(call, data, timeout_s)

        return send

    def cameras(self) -> Sequence[Any]:
        """Return the `Camera` messages of LaneService."""
        request = lanes_pb.ListCamerasRequest()
        return tuple(self._call_lanes("ListCameras", request, lanes_pb.ListCamerasResponse).cameras)

    def latest_lanes(self, camera: str) -> Any | None:
        """Return the newest `LaneFrame`; None before the first frame."""
        request = lanes_pb.GetLatestLanesRequest(camera=camera)
        try:
            return self._call_lanes(
                "GetLatestLanes", request, lanes_pb.GetLatestLanesResponse
            ).frame
        except (Unavailable, NotFound):
            return None

    def _call_lanes(self, name: str, request: Any, response: type[Any]) -> Any:
        """Call a method of LaneService, of which no stub is generated."""
        method = self._channel.unary_unary(
            f"{_LANES}{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        return self._call(method, request)

    def _call(self, method: Any, request: Any, timeout_s: float = _TIMEOUT_S) -> Any:
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            kind = _ERRORS.get(error.code(), InternalError)
            remedy = f"; put it into {TOKEN}" if kind is Unauthenticated else ""
            raise kind(_text(error) + remedy) from error


def _text(error: Any) -> str:
    """Return the server's own text, or why none was reached: without gRPC's list of attempts."""
    text = str(error.details() or error.code().name)
    if text.startswith("failed to connect to all addresses"):
        return text.rpartition(": ")[2]
    return text


def infer_request(
    model: str,
    inputs: Mapping[str, NDArray[Any]],
    version: str = "",
    classes: Mapping[str, int] | None = None,
) -> Any:
    """Return a `ModelInferRequest` with the tensors as raw bytes.

    Raises:
        InvalidRequest: the protocol has no type for an array's elements.
    """
    request = pb.ModelInferRequest(model_name=model, model_version=version)
    for name, array in inputs.items():
        datatype = DataType.BYTES if array.dtype.kind in "OSU" else DataType.from_numpy(array.dtype)
        if datatype is None:
            raise InvalidRequest(f"input '{name}': the protocol has no type for {array.dtype}")
        request.inputs.add(name=name, datatype=datatype.value, shape=array.shape)
        request.raw_input_contents.append(_bytes_of(array, datatype))
    for name, count in (classes or {}).items():
        request.outputs.add(name=name).parameters["classification"].int64_param = count
    return request


def _bytes_of(array: NDArray[Any], datatype: DataType) -> bytes:
    if datatype is DataType.BYTES:
        serialised: np.ndarray[Any, Any] | None = serialize_byte_tensor(array)
        return b"" if serialised is None else bytes(serialised.item())
    return array.astype(datatype.numpy, copy=False).tobytes()
