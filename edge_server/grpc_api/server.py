"""The gRPC server: synchronous, bounded, bound before anything else starts."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import grpc

from edge_server.errors import Unavailable
from edge_server.grpc_api.admission import Admission
from edge_server.grpc_api.interceptors import ErrorsToStatus
from edge_server.grpc_api.triton import TritonServicer, method_handlers

if TYPE_CHECKING:
    from edge_server.serving.data_plane import DataPlane

log = logging.getLogger(__name__)

# A 4K BGR frame has 25 MB; the protocol's own 2 GiB would let one client fill the board's memory.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# Calls wait in their thread for an instance, and each stream has one for as long as it is open;
# the spare ones keep answering how the server is.
_THREADS = 40
_INFERENCES_AT_ONCE = 28
# Long enough for clients that ask without pause to hear the refusal before the connection ends.
_LAST_WORDS_S = 0.1

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 16),
    ("grpc.server_handshake_timeout_ms", 2000),
)


class GrpcServer:
    """Serves the Triton protocol on `host:port`.

    Binding happens at once, so that a taken port is known before any model is loaded; calls are
    answered after `start`.

    Raises:
        Unavailable: the address cannot be bound.
    """

    def __init__(self, data_plane: DataPlane, host: str, port: int, version: str) -> None:
        self._admission = Admission(_INFERENCES_AT_ONCE)
        self._server = grpc.server(
            ThreadPoolExecutor(_THREADS, thread_name_prefix="grpc"),
            interceptors=[ErrorsToStatus()],
            options=_OPTIONS,
        )
        servicer = TritonServicer(data_plane, "triton", version, self._admission)
        self._server.add_generic_rpc_handlers([method_handlers(servicer)])
        self.address = f"[{host}]" if ":" in host else host
        try:
            self.port = self._server.add_insecure_port(f"{self.address}:{port}")
        except RuntimeError as error:
            raise Unavailable(
                f"gRPC cannot listen on {host}:{port}: {_reason(error)}; another process may hold "
                "the port: stop it, or choose another with --grpc-port"
            ) from error

    def start(self) -> None:
        self._server.start()
        log.info("grpc: listening on %s:%d", self.address, self.port)

    def drain(self) -> None:
        """Refuse new inferences from now on, in words; all else is still answered."""
        self._admission.close()

    def stop(self, grace_s: float) -> None:
        """Refuse new calls, give those in flight `grace_s` to finish, then return."""
        self.drain()
        stop_by = time.monotonic() + grace_s
        self._admission.wait_until_empty(grace_s)
        time.sleep(_LAST_WORDS_S)
        self._server.stop(max(0.0, stop_by - time.monotonic())).wait()


def _reason(error: RuntimeError) -> str:
    return str(error).splitlines()[0]
