"""GrpcServer: the gRPC servers, synchronous, bounded, bound before anything else starts."""

from __future__ import annotations

import logging
import socket
import time
from typing import TYPE_CHECKING, Any

import grpc

from edge_server.api.grpc.access import AccessCheck, AccessRules
from edge_server.api.grpc.admission import Admission
from edge_server.api.grpc.byte_budget import ByteBudget
from edge_server.api.grpc.call_threads import CallThreads
from edge_server.api.grpc.call_traces import CallTraces
from edge_server.api.grpc.credentials import server_credentials
from edge_server.api.grpc.early_refusal import refusable
from edge_server.api.grpc.self_call import SelfCall
from edge_server.api.grpc.shared_memory import SharedMemory
from edge_server.api.grpc.traffic import Traffic
from edge_server.api.grpc.triton import TritonServicer, answer_with
from edge_server.api.grpc.unix_socket import UnixSocket
from edge_server.board.listening import listener, remedy
from edge_server.errors import Unavailable
from edge_server.inference.control import BoundedControl
from edge_server.inference.tracing.tracer import Tracer
from edge_server.process.logs import LogSwitches

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.inference.control import ModelControl
    from edge_server.inference.data_plane import DataPlane
    from edge_server.settings import Grpc

log = logging.getLogger(__name__)

# Calls wait in their thread for an instance or for a model load, and each open stream holds one;
# the spare threads keep answering health and metadata calls.
_INFERENCES_AT_ONCE = 28
_STREAMS_AT_ONCE = 8
_LOADS_AT_ONCE = 16
_THREADS = _INFERENCES_AT_ONCE + _STREAMS_AT_ONCE + _LOADS_AT_ONCE + 4
# Long enough for clients that retry without pause to receive the refusal before the disconnect.
_LAST_WORDS_S = 0.1


class GrpcServer:
    """Serves the Triton protocol on TCP and, if configured, on a Unix socket.

    Each side is a separate server with its own connections, streams, threads and admission of
    inferences: clients that exhaust the TCP side take nothing from the socket.

    The constructor binds the addresses, so that a port in use is reported before any model loads;
    calls are served after `start`.

    Args:
        name: the server's name for clients.
        control, log_switches: see `TritonServicer`.
        client_shared_memory: clients may register regions.
        tracer: traces requests; None traces none.

    Raises:
        Unavailable: the address cannot be bound.
        AlreadyRunning: another daemon holds the socket.
        SettingsError: a certificate or the socket's path is invalid.
    """

    def __init__(
        self,
        data_plane: DataPlane,
        settings: Grpc,
        name: str,
        version: str,
        *,
        control: ModelControl | None = None,
        client_shared_memory: bool = False,
        tracer: Tracer | None = None,
        log_switches: LogSwitches | None = None,
    ) -> None:
        self.port = 0
        self._traces = CallTraces(tracer or Tracer())
        self._gates: list[Admission] = []
        self._socket: UnixSocket | None = None
        self._servers: list[grpc.Server] = []
        self._threads: list[CallThreads] = []
        self._listening: list[str] = []
        self._traffic: list[Traffic] = []
        self.self_call: SelfCall | None = None
        if not settings.enabled:
            return
        log_switches = log_switches or LogSwitches()
        shared_memory = (
            SharedMemory(budget=_budget(settings), longest_bytes=settings.max_message_bytes)
            if client_shared_memory
            else None
        )

        def servicer(gate: Admission, traffic: Traffic) -> TritonServicer:
            return TritonServicer(
                data_plane,
                name,
                version,
                gate,
                control=control and BoundedControl(control, _LOADS_AT_ONCE),
                shared_memory=shared_memory,
                log_switches=log_switches,
                traces=self._traces,
                budget=traffic.budget,
            )

        try:
            if settings.socket is not None:
                self._socket = UnixSocket(settings.socket)
                self._listen_on_socket(self._socket, self._server(servicer, settings, unix=True))
            self._listen_on_tcp(settings, self._server(servicer, settings, unix=False))
            self.self_call = self._self_call(settings)
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        for traffic in self._traffic:
            traffic.start()
        for server, where in zip(self._servers, self._listening, strict=True):
            server.start()
            log.info("grpc: listening on %s", where)
        if self.self_call is not None:
            self.self_call.start()

    def drain(self) -> None:
        """Refuse new inferences from now on with a text; all other calls are still served."""
        for gate in self._gates:
            gate.close()

    def stop(self, grace_s: float) -> None:
        """Refuse new calls, give calls in flight `grace_s` seconds to finish, then return."""
        if not self._servers:
            return
        if self.self_call is not None:
            self.self_call.stop()
        self.drain()
        stop_by = time.monotonic() + grace_s
        for gate in self._gates:
            gate.wait_until_empty(max(0.0, stop_by - time.monotonic()))
        time.sleep(_LAST_WORDS_S)
        left_s = max(0.0, stop_by - time.monotonic())
        for ended in [server.stop(left_s) for server in self._servers]:
            ended.wait()
        self.close()

    def close(self) -> None:
        """Release the addresses, started or not."""
        for traffic in self._traffic:
            traffic.close()
        self._traffic.clear()
        for server in self._servers:
            server.stop(None).wait()
        self._servers.clear()
        for threads in self._threads:
            # A model that hangs would block this wait for ever.
            threads.shutdown(wait=False)
        self._threads.clear()
        if self._socket is not None:
            self._socket.release()
            self._socket = None

    def _server(
        self,
        servicer: Callable[[Admission, Traffic], TritonServicer],
        settings: Grpc,
        *,
        unix: bool,
    ) -> grpc.Server:
        rules = AccessRules.of(settings, unix=unix)
        threads = CallThreads(_THREADS, "grpc-unix" if unix else "grpc", self._traces.moments)
        traffic = Traffic(
            _budget(settings),
            settings.message_timeout_ms / 1e3,
            settings.max_message_bytes,
            waiting=threads.waiting,
        )
        self._traffic.append(traffic)
        server = grpc.server(
            threads,  # type: ignore[arg-type]
            # An interceptor costs every call.
            interceptors=[AccessCheck(rules, traffic)] if rules.refuse_any else [],
            options=channel_options(settings, unix=unix),
        )
        gate = Admission(_INFERENCES_AT_ONCE, _STREAMS_AT_ONCE)
        answer_with(
            servicer(gate, traffic),
            server,
            traffic,
            lambda infer: refusable(infer, lambda: _refusal(threads, gate), threads),
        )
        self._gates.append(gate)
        self._servers.append(server)
        self._threads.append(threads)
        return server

    def _self_call(self, settings: Grpc) -> SelfCall:
        """Return the daemon's own client, on the socket if there is one: TCP may be full."""
        metadata = [(r.header, r.value) for r in settings.restricted if "health" in r.protocols]
        if self._socket is not None:
            unix, threads = self._socket, self._threads[0]
            return SelfCall(unix.address, unix.connect, threads.waiting, metadata=metadata)
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104
        return SelfCall(
            f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}",
            lambda patience_s: socket.create_connection((host, self.port), patience_s),
            self._threads[0].waiting,
            metadata=metadata,
            speaks_tls=settings.tls.on,
        )

    def _listen_on_tcp(self, settings: Grpc, server: grpc.Server) -> None:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"{host}:{settings.port}"
        credentials = server_credentials(settings.tls) if settings.tls.on else None
        where = f"gRPC cannot listen on {settings.host}:{settings.port}: "
        try:
            # gRPC's own error gives no reason.
            listener(settings.host, settings.port).close()
        except OSError as error:
            raise Unavailable(where + remedy(error, "--grpc")) from error
        try:
            if credentials is None:
                self.port = server.add_insecure_port(address)
            else:
                self.port = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise Unavailable(where + _reason(error)) from error
        trust = (
            " with mutual TLS" if settings.tls.mutual else " with TLS" if settings.tls.on else ""
        )
        self._listening.append(f"{host}:{self.port}{trust}")

    def _listen_on_socket(self, unix: UnixSocket, server: grpc.Server) -> None:
        try:
            server.add_insecure_port(unix.address)
        except RuntimeError as error:
            raise Unavailable(
                f"gRPC cannot listen on {unix.path}: {_reason(error)}; choose another path with "
                "--grpc-socket"
            ) from error
        unix.let_group_in()
        self._listening.append(str(unix.path))


def channel_options(settings: Grpc, *, unix: bool) -> list[tuple[str, Any]]:
    """Return gRPC's options for the limits of one side.

    Responses have no limit: a model made them, and refusing a long one would end a stream.

    `maximum_concurrent_rpcs` is absent: it counts calls whose request has not arrived, so that a
    few connections with half-sent requests would close the server to everyone.
    """
    options = {
        "grpc.so_reuseport": 0,
        "grpc.max_receive_message_length": settings.max_message_bytes,
        "grpc.max_send_message_length": -1,
        "grpc.max_concurrent_streams": settings.max_streams,
        # On, gRPC would refuse calls of a client that keeps to that number, because a stream counts
        # for a moment longer here than at the client. Such a client waits for a free stream.
        "grpc.http.overload_protection": 0,
        # One more for the daemon itself, see `SelfCall`.
        "grpc.max_allowed_incoming_connections": (
            settings.max_connections + (unix == (settings.socket is not None))
        ),
        # The second is the hard limit; between the two gRPC refuses at random.
        "grpc.max_metadata_size": settings.max_metadata_bytes,
        "grpc.absolute_max_metadata_size": settings.max_metadata_bytes,
        "grpc.server_handshake_timeout_ms": settings.handshake_timeout_ms,
        # Otherwise the bytes of one call that gRPC accepts before the server reads grow to 32 MiB.
        "grpc.http2.bdp_probe": 0,
        "grpc.max_connection_idle_ms": settings.idle_timeout_ms,
        "grpc.keepalive_time_ms": settings.keepalive_time_ms,
        "grpc.keepalive_timeout_ms": settings.keepalive_timeout_ms,
        "grpc.keepalive_permit_without_calls": int(settings.keepalive_without_calls),
        "grpc.http2.max_pings_without_data": settings.max_pings_without_data,
        "grpc.http2.min_recv_ping_interval_without_data_ms": (
            settings.min_ping_interval_without_data_ms
        ),
        "grpc.http2.max_ping_strikes": settings.max_ping_strikes,
    }
    if not unix:
        options["grpc.max_connection_age_ms"] = settings.max_connection_age_ms
        options["grpc.max_connection_age_grace_ms"] = settings.max_connection_age_grace_ms
    return list(options.items())


def _budget(settings: Grpc) -> ByteBudget:
    # With one of the longest requests inside, a second one must fit.
    return ByteBudget(max(settings.max_pending_bytes, 2 * settings.max_message_bytes))


def _refusal(threads: CallThreads, gate: Admission) -> Unavailable | None:
    """Return the reason to refuse an inference now; None to admit it."""
    if threads.waiting():
        return Unavailable("Exceeds maximum queue size: every thread of the server is taken")
    return gate.refusal()


def _reason(error: RuntimeError) -> str:
    return str(error).splitlines()[0]
