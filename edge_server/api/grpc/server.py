"""GrpcServer: the gRPC servers, synchronous, bounded, bound before anything else starts."""

from __future__ import annotations

import logging
import socket
import time
from typing import TYPE_CHECKING

import grpc

from edge_server.api.access import AccessRules
from edge_server.api.admission import Admission, ByteBudget
from edge_server.api.call_threads import CallThreads
from edge_server.api.call_traces import CallTraces
from edge_server.api.grpc.credentials import Certificates
from edge_server.api.grpc.lane_service import (
    OVER_BYTES,
    SERVICE,
    LaneServicer,
    too_many_lane_streams,
)
from edge_server.api.grpc.methods import method_handlers, status_of
from edge_server.api.grpc.refusable import refusable
from edge_server.api.grpc.self_call import SelfCall
from edge_server.api.grpc.traffic import Traffic
from edge_server.api.grpc.triton import HealthServicer, TritonServicer, register
from edge_server.api.grpc.unix_socket import UnixSocket
from edge_server.api.headers import HeaderForwarding
from edge_server.api.request_metrics import RequestMetrics
from edge_server.board.listening import client_host, host_and_port, listener, remedy
from edge_server.errors import LimitReached, Unavailable
from edge_server.inference.control import BoundedControl
from edge_server.inference.tracing.tracer import Tracer
from edge_server.process.logs import LogSwitches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_server.api.grpc.lane_service import LaneSources
    from edge_server.api.grpc.methods import Handler
    from edge_server.api.shared_memory import SharedMemory
    from edge_server.api.tokens import Tokens
    from edge_server.errors import EdgeServerError
    from edge_server.inference.control import ModelControl
    from edge_server.inference.data_plane import DataPlane
    from edge_server.settings import Grpc

log = logging.getLogger(__name__)

# Calls wait in their thread for an instance or for a model load, and each open stream holds one;
# the spare threads keep answering health and metadata calls.
_INFERENCES_AT_ONCE = 28
_LOADS_AT_ONCE = 16
_OTHER_THREADS = _INFERENCES_AT_ONCE + _LOADS_AT_ONCE + 4
# For lane streams whose first request has not arrived, and for those to refuse.
_MORE_LANE_THREADS = 4
_SERVICES = ("inference.GRPCInferenceService", "grpc.health.v1.Health")
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
        shared_memory: the regions that clients register; None where they may register none.
        tokens: that calls over TCP need; None needs none.
        tracer: traces requests; None traces none.
        requests: counts inference requests; None counts them for nobody.

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
        shared_memory: SharedMemory | None = None,
        tracer: Tracer | None = None,
        log_switches: LogSwitches | None = None,
        tokens: Tokens | None = None,
        requests: RequestMetrics | None = None,
    ) -> None:
        self.port = 0
        self.self_call: SelfCall | None = None
        self._certificates: Certificates | None = None
        self._longest_bytes, self._tls = settings.max_message_bytes, settings.tls
        self._sides: list[_Side] = []
        self._reflection = settings.reflection
        self._services = list(_SERVICES)
        self._socket: UnixSocket | None = None
        if not settings.enabled:
            return
        log_switches = log_switches or LogSwitches()
        requests = requests or RequestMetrics()
        pattern = settings.forward_headers
        secret = [each.header for each in settings.restricted]
        headers = HeaderForwarding(pattern, secret) if pattern else None

        def side(*, unix: bool) -> _Side:
            made = _Side(settings, AccessRules.of(settings, unix=unix, tokens=tokens), unix=unix)

            def refusal() -> EdgeServerError | None:
                reason = made.refusal()
                if reason is not None:
                    requests.failed("grpc", status_of(reason).name)
                return reason

            servicer = TritonServicer(
                data_plane,
                name,
                version,
                made.gate,
                control=control and BoundedControl(control, _LOADS_AT_ONCE),
                shared_memory=shared_memory and shared_memory.counted_by(made.traffic.budget),
                log_switches=log_switches,
                traces=CallTraces(tracer or Tracer(), made.threads.moments),
                budget=made.traffic.budget,
                requests=requests,
                headers=headers,
            )
            register(
                made.server,
                servicer,
                HealthServicer(data_plane),
                traffic=made.traffic,
                rules=made.rules,
                refused=lambda infer: refusable(infer, refusal, made.threads),
            )
            self._sides.append(made)
            return made

        try:
            if settings.socket is not None:
                self._socket = UnixSocket(settings.socket)
                side(unix=True).listen_on_socket(self._socket)
            if settings.tls.on:
                self._certificates = Certificates(settings.tls)
            self.port = side(unix=False).listen_on_tcp(settings, self._certificates)
            self.self_call = self._self_call(settings)
        except BaseException:
            self.close()
            raise

    def offer_lanes(self, sources: LaneSources) -> None:
        """Serve `edge.lanes.v1.LaneService` too, from `start` on."""
        for side in self._sides:
            side.add_lanes(sources)
        self._services.append(SERVICE.full_name)

    def start(self) -> None:
        for side in self._sides:
            if self._reflection:
                side.add_reflection(self._services)
            side.traffic.start()
            side.server.start()
            log.info("grpc: listening on %s", side.where)
        if self.self_call is not None:
            self.self_call.start()

    def change(self, settings: Grpc) -> None:
        """Take over what this server can change while it serves: the limit of all messages in
        flight, the time that one may take, and the paths of the certificates.

        Args:
            settings: with certificates that are valid, see `check_certificates`. Where TLS is to be
                on, off or mutual other than before, the certificates stay too.
        """
        for side in self._sides:
            side.traffic.change(
                _limit_bytes(settings.max_pending_bytes, self._longest_bytes),
                settings.message_timeout_ms / 1e3,
            )
        if self._certificates is not None and (self._tls.enabled, self._tls.mutual) == (
            settings.tls.enabled,
            settings.tls.mutual,
        ):
            self._certificates.change(settings.tls)

    def drain(self) -> None:
        """Refuse new inferences and streams from now on, and end streams of lanes and events; all
        other calls are still served."""
        for side in self._sides:
            side.gate.close()
            side.lane_gate.close()

    def stop(self, grace_s: float) -> None:
        """Refuse new calls, give calls in flight `grace_s` seconds to finish, then return."""
        if not self._sides:
            return
        if self.self_call is not None:
            self.self_call.stop()
        self.drain()
        stop_by = time.monotonic() + grace_s
        for side in self._sides:
            side.gate.wait_until_empty(max(0.0, stop_by - time.monotonic()))
        time.sleep(_LAST_WORDS_S)
        left_s = max(0.0, stop_by - time.monotonic())
        for ended in [side.server.stop(left_s) for side in self._sides]:
            ended.wait()
        self.close()

    def close(self) -> None:
        """Release the addresses, started or not."""
        for side in self._sides:
            side.traffic.close()
            side.server.stop(None).wait()
            side.threads.shutdown()
            side.lane_threads.shutdown()
        self._sides.clear()
        if self._socket is not None:
            self._socket.release()
            self._socket = None

    def _self_call(self, settings: Grpc) -> SelfCall:
        """Return the daemon's own client, on the socket if there is one: TCP may be full."""
        metadata = [(r.header, r.value) for r in settings.restricted if "health" in r.protocols]
        waiting = self._sides[0].threads.waiting
        if self._socket is not None:
            return SelfCall(self._socket.address, self._socket.connect, waiting, metadata=metadata)
        host = client_host(settings.host)
        return SelfCall(
            host_and_port(host, self.port),
            lambda timeout_s: socket.create_connection((host, self.port), timeout_s),
            waiting,
            metadata=metadata,
            speaks_tls=settings.tls.on,
        )


class _Side:
    """TCP or the Unix socket: a server of its own, and all that bounds it.

    Attributes:
        where: the address for people, once it listens.
    """

    def __init__(self, settings: Grpc, rules: AccessRules, *, unix: bool) -> None:
        name = "grpc-unix" if unix else "grpc"
        self.rules = rules
        streams = settings.max_infer_streams
        self.threads = CallThreads(_OTHER_THREADS + streams, name)
        # Each stream holds a thread, so they have their own: they take none from inferences.
        self.lane_threads = CallThreads(
            settings.max_lane_streams + _MORE_LANE_THREADS, f"{name}-streams"
        )
        self.lane_gate = Admission(0, settings.max_lane_streams, too_many_lane_streams)
        self.gate = Admission(_INFERENCES_AT_ONCE, streams)
        self.traffic = Traffic(
            ByteBudget(_limit_bytes(settings.max_pending_bytes, settings.max_message_bytes)),
            settings.message_timeout_ms / 1e3,
            settings.max_message_bytes,
            waiting=self.threads.waiting,
            inferences=lambda: self.gate.inside,
        )
        self.server = grpc.server(
            # The stub wants a ThreadPoolExecutor; grpc calls an Executor's methods only.
            self.threads,  # type: ignore[arg-type]
            options=channel_options(settings, unix=unix),
        )
        self.where = ""

    def listen_on_tcp(self, settings: Grpc, certificates: Certificates | None) -> int:
        """Return the port."""
        tls, address = settings.tls, host_and_port(settings.host, settings.port)
        where = f"gRPC cannot listen on {settings.host}:{settings.port}: "
        try:
            # gRPC's own error gives no reason.
            listener(settings.host, settings.port).close()
        except OSError as error:
            raise Unavailable(where + remedy(error, "--grpc")) from error
        try:
            if certificates is None:
                port = self.server.add_insecure_port(address)
            else:
                port = self.server.add_secure_port(address, certificates.credentials)
        except RuntimeError as error:
            raise Unavailable(where + _reason(error)) from error
        trust = " with mutual TLS" if tls.mutual else " with TLS" if tls.on else ""
        self.where = f"{host_and_port(settings.host, port)}{trust}"
        return port

    def listen_on_socket(self, unix: UnixSocket) -> None:
        try:
            self.server.add_insecure_port(unix.address)
        except RuntimeError as error:
            raise Unavailable(
                f"gRPC cannot listen on {unix.path}: {_reason(error)}; choose another path with "
                "--grpc-socket"
            ) from error
        unix.let_group_in()
        self.where = str(unix.path)

    def add_lanes(self, sources: LaneSources) -> None:
        servicer = LaneServicer(sources, self.lane_gate, self.traffic)
        methods = method_handlers(SERVICE, servicer, OVER_BYTES, self.traffic, self.rules)
        for name in OVER_BYTES:
            methods[name] = self._on_lane_threads(methods[name])
        self.server.add_registered_method_handlers(SERVICE.full_name, methods)

    def add_reflection(self, services: Sequence[str]) -> None:
        # Nobody pays for its descriptors who has turned it off.
        from edge_server.api.grpc.reflection import register_reflection  # noqa: PLC0415

        register_reflection(
            self.server,
            services,
            self.lane_gate,
            traffic=self.traffic,
            rules=self.rules,
            on_threads=self._on_lane_threads,
        )

    def _on_lane_threads(self, handler: Handler) -> Handler:
        def refusal() -> EdgeServerError | None:
            if self.lane_threads.waiting():
                return LimitReached("every thread of streams is taken; try again when one ends")
            return None

        return refusable(handler, refusal, self.lane_threads)

    def refusal(self) -> Unavailable | None:
        """Return the reason to refuse an inference now; None to admit it."""
        if self.threads.waiting():
            return Unavailable("Exceeds maximum queue size: every thread of the server is taken")
        return self.gate.refusal()


# gRPC's option for each setting that it takes as it is.
_OPTIONS = {
    "grpc.max_receive_message_length": "max_message_bytes",
    "grpc.max_concurrent_streams": "max_streams",
    # The second is the hard limit; between the two gRPC refuses at random.
    "grpc.max_metadata_size": "max_metadata_bytes",
    "grpc.absolute_max_metadata_size": "max_metadata_bytes",
    "grpc.server_handshake_timeout_ms": "handshake_timeout_ms",
    "grpc.max_connection_idle_ms": "idle_timeout_ms",
    "grpc.keepalive_time_ms": "keepalive_time_ms",
    "grpc.keepalive_timeout_ms": "keepalive_timeout_ms",
    "grpc.http2.max_pings_without_data": "max_pings_without_data",
    "grpc.http2.min_recv_ping_interval_without_data_ms": "min_ping_interval_without_data_ms",
    "grpc.http2.max_ping_strikes": "max_ping_strikes",
}
_OPTIONS_OF_TCP = {
    "grpc.max_connection_age_ms": "max_connection_age_ms",
    "grpc.max_connection_age_grace_ms": "max_connection_age_grace_ms",
}


def channel_options(settings: Grpc, *, unix: bool) -> list[tuple[str, int]]:
    """Return gRPC's options for the limits of one side.

    Responses have no limit: a model made them, and refusing a long one would end a stream.

    `maximum_concurrent_rpcs` is absent: it counts calls whose request has not arrived, so that a
    few connections with half-sent requests would close the server to everyone.
    """
    taken = _OPTIONS if unix else {**_OPTIONS, **_OPTIONS_OF_TCP}
    # One more for the daemon itself, see `SelfCall`.
    connections = settings.max_connections + (unix == (settings.socket is not None))
    return [
        *((option, getattr(settings, name)) for option, name in taken.items()),
        ("grpc.so_reuseport", 0),
        ("grpc.max_send_message_length", -1),
        # On, gRPC would refuse calls of a client that keeps to max_streams, because a stream counts
        # for a moment longer here than at the client. Such a client waits for a free stream.
        ("grpc.http.overload_protection", 0),
        ("grpc.max_allowed_incoming_connections", connections),
        # Otherwise the bytes of one call that gRPC accepts before the server reads grow to 32 MiB.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.keepalive_permit_without_calls", int(settings.keepalive_without_calls)),
    ]


def _limit_bytes(pending_bytes: int, longest_bytes: int) -> int:
    # With one of the longest requests inside, a second one must fit.
    return max(pending_bytes, 2 * longest_bytes)


def _reason(error: RuntimeError) -> str:
    return str(error).splitlines()[0]
