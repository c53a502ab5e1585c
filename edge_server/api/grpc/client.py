"""Calls of a running daemon's gRPC server, from another process: Triton's protocol and lanes."""

from __future__ import annotations

import errno
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import grpc
import msgspec
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
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
    StageStuck,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from edge_server.process.threads import Worker
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
    return f"unix:{quote(str(Path(path).absolute()))}"


def target_of(settings: Grpc) -> str:
    """Return where a client on this machine calls the daemon that runs with `settings`; raise
    SettingsError where no side can be called without a certificate.
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
    """The gRPC server of a daemon on this machine; each method is one call, from any thread.

    Every method raises an EdgeServerError by the status of the response: Unavailable where nothing
    answers, InvalidRequest, NotFound, … with the server's own text.

    Raises: SettingsError: see `target_of`.
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
        return self._call(self._triton.ServerMetadata, pb.ServerMetadataRequest())

    def is_ready(self) -> bool:
        return bool(self._call(self._triton.ServerReady, pb.ServerReadyRequest()).ready)

    def index(self) -> Sequence[Any]:
        """Return every model version of the repository with its state and the reason for it."""
        return tuple(self._call(self._triton.RepositoryIndex, pb.RepositoryIndexRequest()).models)

    def statistics(self) -> Sequence[Any]:
        request = pb.ModelStatisticsRequest()
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
        """Return the outputs of one request by name; of an output in `classes` so many of its
        classes, as texts `score:index:label`.
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
    """Return a `ModelInferRequest` with the tensors as raw bytes; raise InvalidRequest where the
    protocol has no type for them.
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


log = logging.getLogger(__name__)

# A server counts as dead after so many failed calls in a row: some 30 s. The limit counts
# calls, not seconds, as the whole process may have been suspended for a while.
MOST_FAILURES = 5
_PERIOD_S = 5.0


class SelfCall:
    """Calls Health/Check periodically, over one connection that stays open.

    A full server is healthy: one without a free thread, or one at its connection limit, which
    closes a new connection at once; also where its clients leave before the new connection is
    tried. So is one whose address this machine has no more, as that of an interface whose cable is
    out.

    Args:
        connect: opens a plain connection to the server, from the server's own address.
        waiting: returns the number of accepted calls without a thread.
        metadata: headers that the call must carry.
        speaks_tls: the daemon has no certificate for a call; the server then counts as healthy if
            it sends any byte in reply to a ClientHello, or closes the connection.
    """

    def __init__(
        self,
        target: str,
        connect: Callable[[float], socket.socket],
        waiting: Callable[[], int],
        *,
        metadata: Sequence[tuple[str, str]] = (),
        speaks_tls: bool = False,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self.worker = Worker(
            "grpc-self-call", self._tick, deadline_s=10 * timeout_s, on_end=self._close
        )
        self._target = target
        self._connect = connect
        self._waiting = waiting
        self._metadata = tuple(metadata)
        self._speaks_tls = speaks_tls
        self._timeout_s = timeout_s
        self._channel: grpc.Channel | None = None
        self._failures = 0
        self._why = ""

    def start(self) -> None:
        self.worker.start()

    def stop(self) -> None:
        """Make no more calls; does not wait for a call in progress."""
        self.worker.stop(0.0)

    def check(self) -> None:
        """Raises: StageStuck: the server does not respond; only a new process recovers."""
        if self._failures >= MOST_FAILURES:
            raise StageStuck(
                f"gRPC does not respond on {self._target}: {self._failures} calls in a row failed: "
                f"{self._why}"
            )

    def _tick(self, now: float) -> None:
        del now
        why = self.fault()
        if why and not self._failures:
            log.warning("grpc: no response to the daemon's own call on %s: %s", self._target, why)
        self._failures, self._why = (self._failures + 1, why) if why else (0, "")
        self.worker.wait(_PERIOD_S)

    def fault(self) -> str:
        """Return why the server does not respond to one call now; empty if it does."""
        if self._speaks_tls:
            return self._greeted()[1]
        if self._channel is None:
            self._channel = grpc.insecure_channel(self._target, options=CHANNEL_OPTIONS)
        check = HealthStub(self._channel).Check
        try:
            check(health_pb2.HealthCheckRequest(), timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            greeting = self._greeted()[0]
            # A server that accepts the connection and responds to no call gives DEADLINE_EXCEEDED.
            was_full = greeting is not None and error.code() is grpc.StatusCode.UNAVAILABLE
            if self._waiting() or was_full or greeting == b"":
                return ""
            return f"{error.code().name}: {error.details()}"
        return ""

    def _greeted(self) -> tuple[bytes | None, str]:
        """Return the first byte on a new connection, empty if it was closed; or the reason for
        neither."""
        try:
            with self._connect(self._timeout_s) as connection:
                if self._speaks_tls:
                    connection.sendall(_client_hello())
                return connection.recv(1), ""
        except (ConnectionResetError, BrokenPipeError):
            return b"", ""
        except OSError as error:
            # The network of the server's address is gone, and with it the address: nobody can call
            # it there now, and a new process could not even listen.
            if error.errno == errno.EADDRNOTAVAIL:
                return b"", ""
            return None, error.strerror or str(error)

    def _close(self) -> None:
        if self._channel is not None:
            self._channel.close()


def _client_hello() -> bytes:
    """Return a ClientHello; without it a TLS server is silent until its handshake times out."""
    # Not needed without TLS.
    import ssl  # noqa: PLC0415

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # gRPC logs each name that its certificate does not have
    sent = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    return sent.read()


def not_ready_reason(settings: Grpc) -> str:
    """Return why the server of another process is not ready; empty if it is.

    A TCP side with TLS, which this process cannot call, is ready once it answers a ClientHello.
    """
    if settings.tls.on and settings.socket is None:
        host = client_host(settings.host)
        call = SelfCall(
            host_and_port(host, settings.port),
            lambda timeout_s: socket.create_connection((host, settings.port), timeout_s),
            lambda: 0,
            speaks_tls=True,
        )
        return call.fault()
    with DaemonClient(settings) as client:
        try:
            ready = client.is_ready()
        except EdgeServerError as error:
            return f"{client.target}: {error}"
    reason = f"{client.target}: live, not ready: models are loading, or one has failed"
    return "" if ready else reason


def server_name(settings: Grpc) -> str:
    """Return name and version of another process's server; empty where neither side says them."""
    for each in dict.fromkeys((settings.socket, None)):
        with (
            suppress(EdgeServerError),
            DaemonClient(msgspec.structs.replace(settings, socket=each)) as client,
        ):
            metadata = client.server()
            return f"{metadata.name} {metadata.version}"
    return ""
