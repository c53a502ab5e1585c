"""GrpcServer: the gRPC servers, synchronous, bounded, bound before anything else starts."""

from __future__ import annotations

import logging
import socket
import time
from typing import TYPE_CHECKING

from edge_server.api.access import AccessRules
from edge_server.api.calls import RequestMetrics
from edge_server.api.grpc.client import SelfCall
from edge_server.api.grpc.lane_service import SERVICES
from edge_server.api.grpc.side import (
    LOADS_AT_ONCE,
    Certificates,
    Side,
    UnixSocket,
    limit_bytes,
)
from edge_server.api.grpc.triton import HealthServicer, TritonServicer, register
from edge_server.api.parameters import HeaderForwarding
from edge_server.board.listening import client_host, host_and_port
from edge_server.inference.data_plane import BoundedControl
from edge_server.process.logs import LogSwitches
from edge_server.settings.sections import MOST_INFERENCES

if TYPE_CHECKING:
    from edge_server.api.access import Tokens
    from edge_server.api.grpc.lane_service import LaneSources
    from edge_server.api.shared_memory import SharedMemory
    from edge_server.inference.data_plane import DataPlane, ModelControl
    from edge_server.inference.tracing import Tracer
    from edge_server.settings import Grpc

log = logging.getLogger(__name__)

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
        tokens: that calls over TCP need; None needs none.
        max_inferences: in flight at once on each side.

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
        max_inferences: int = MOST_INFERENCES,
    ) -> None:
        self.port = 0
        self.self_call: SelfCall | None = None
        self._certificates: Certificates | None = None
        self._longest_bytes, self._tls = settings.max_message_bytes, settings.tls
        self._sides: list[Side] = []
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

        def side(*, unix: bool) -> Side:
            rules = AccessRules.of(settings, unix=unix, tokens=tokens)
            made = Side(settings, rules, requests, max_inferences, unix=unix)
            servicer = TritonServicer(
                data_plane,
                name,
                version,
                made.gate,
                control=control and BoundedControl(control, LOADS_AT_ONCE),
                shared_memory=shared_memory and shared_memory.counted_by(made.traffic.budget),
                log_switches=log_switches,
                tracer=tracer,
                moments=made.threads.moments,
                traffic=made.traffic,
                requests=requests,
                headers=headers,
            )
            register(
                made.server,
                servicer,
                HealthServicer(data_plane, made.lane_gate),
                traffic=made.traffic,
                rules=rules,
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
        """Serve the services of lanes and of other networks too, from `start` on."""
        for side in self._sides:
            side.add_lanes(sources)
        self._services += [service.full_name for service in SERVICES]

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
        """Take over what can change while it serves: the limit of all messages in flight, the time
        of one, and the paths of the certificates, which are valid (`check_certificates`).

        Where TLS is to be on, off or mutual other than before, the certificates stay too.
        """
        for side in self._sides:
            side.traffic.change(
                limit_bytes(settings.max_pending_bytes, self._longest_bytes),
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
        self._sides.clear()
        if self._socket is not None:
            self._socket.release()
            self._socket = None

    def _self_call(self, settings: Grpc) -> SelfCall:
        metadata = [(r.header, r.value) for r in settings.restricted if "health" in r.protocols]
        calls = self._sides[0].threads.waiting
        if self._socket is not None:
            return SelfCall(
                self._socket.address, self._socket.connect, lambda: len(calls), metadata=metadata
            )
        host = client_host(settings.host)
        return SelfCall(
            host_and_port(host, self.port),
            lambda timeout_s: socket.create_connection((host, self.port), timeout_s, (host, 0)),
            lambda: len(calls),
            metadata=metadata,
            speaks_tls=settings.tls.on,
        )
