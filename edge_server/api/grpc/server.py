"""GrpcServer: the gRPC servers, synchronous, bounded, bound before anything else starts; and each
side of it, TCP or the Unix socket, with all that bounds it."""

from __future__ import annotations

import logging
import os
import socket
import stat
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import grpc

from edge_server.api.access import REFLECTION, AccessRules
from edge_server.api.admission import Admission, ByteBudget
from edge_server.api.calls import CallThreads
from edge_server.api.certificates import CertificateWatch
from edge_server.api.grpc.client import SelfCall
from edge_server.api.grpc.lane_service import SERVICES, LaneServicer, too_many_lane_streams
from edge_server.api.grpc.methods import INFER, Doorkeeper, method_handlers, parsing, streaming
from edge_server.api.grpc.traffic import Traffic
from edge_server.api.grpc.triton import HEALTH_WATCH, HealthServicer, TritonServicer, register
from edge_server.api.parameters import HeaderForwarding
from edge_server.board.listening import client_host, host_and_port, listener, remedy
from edge_server.errors import AlreadyRunning, SettingsError, Unavailable
from edge_server.inference.data_plane import BoundedControl
from edge_server.process.disk import error_of_place, lock_file
from edge_server.settings.sections import MOST_INFERENCES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from edge_server.api.access import Tokens
    from edge_server.api.certificates import CertificateFiles
    from edge_server.api.grpc.lane_service import LaneSources
    from edge_server.api.grpc.methods import Refuses
    from edge_server.api.triton_calls import TritonCalls
    from edge_server.settings import Grpc, Tls


class UnixSocket:
    """Reserves a path for this daemon alone, from construction to `release`.

    The lock on `<path>.lock`, a file that stays, tells a stale socket from a served one: the kernel
    releases it however a process ends. The directory's mode decides which users may connect.

    Raises:
        AlreadyRunning: another daemon holds the lock.
        SettingsError: the path cannot be used; the text names it and the remedy.
        Unavailable: the directory does not exist yet, or is not writable.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        _require_safe_directory(self.path.parent)
        self._lock = _lock(self.path)
        try:
            _require_socket_or_nothing(self.path)
            self.path.unlink(missing_ok=True)
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def address(self) -> str:
        """The address in gRPC's notation, which escapes some characters."""
        return f"unix:{quote(str(self.path.absolute()))}"

    def let_group_in(self) -> None:
        """Open the socket to its group; call after listening, which applies the umask."""
        self.path.chmod(0o660)

    def connect(self, timeout_s: float) -> socket.socket:
        """Raises: OSError: no server listens there, or the connection took too long."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(timeout_s)
            connection.connect(str(self.path))
        except BaseException:
            connection.close()
            raise
        return connection

    def release(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._lock)


def check_path(path: str) -> None:
    """Return if a socket may be at `path`; changes nothing.

    Raises: SettingsError, Unavailable: as `UnixSocket`.
    """
    _require_safe_directory(Path(path).parent)
    _require_socket_or_nothing(Path(path))


def _require_socket_or_nothing(path: Path) -> None:
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise SettingsError(
                f"grpc.socket: {path}: is there and is no socket; remove it, or choose another "
                "path with --grpc-socket"
            )


def _require_safe_directory(directory: Path) -> None:
    try:
        mode = directory.stat().st_mode
    except OSError as error:
        raise error_of_place(
            error,
            f"grpc.socket: {directory}: {error.strerror}; make the directory, for this user and "
            "the group that may connect (systemd: RuntimeDirectory=)",
        ) from error
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise SettingsError(
            f"grpc.socket: {directory}: anybody could put another socket there; chmod o-w it"
        )


def _lock(path: Path) -> int:
    lock_path = path.with_name(f"{path.name}.lock")
    try:
        return lock_file(lock_path)
    except BlockingIOError:
        raise AlreadyRunning(
            f"grpc.socket: {path}: another daemon serves there; stop it, or choose another path "
            "with --grpc-socket"
        ) from None
    except OSError as error:
        raise error_of_place(error, f"grpc.socket: {lock_path}: {error.strerror}") from error


# Calls wait in their thread for an instance or for a model load, and each open stream holds one;
# the spare threads keep answering health and metadata calls.
LOADS_AT_ONCE = 16
_OTHER_THREADS = LOADS_AT_ONCE + 4


class Side:
    """TCP or the Unix socket: a server of its own, and all that bounds it."""

    def __init__(
        self,
        calls: TritonCalls,
        settings: Grpc,
        tokens: Tokens | None,
        max_inferences: int,
        *,
        unix: bool,
    ) -> None:
        self.rules = AccessRules.of(settings, unix=unix, tokens=tokens)
        streams, lane_streams = settings.max_infer_streams, settings.max_lane_streams
        # Each open stream holds a thread.
        self.threads = CallThreads(
            max_inferences + _OTHER_THREADS + streams + lane_streams,
            "grpc-unix" if unix else "grpc",
        )
        self.lane_gate = Admission(0, lane_streams, too_many_lane_streams)
        self.gate = Admission(max_inferences, streams)
        self.traffic = Traffic(
            ByteBudget(limit_bytes(settings.max_pending_bytes, settings.max_message_bytes)),
            settings.message_timeout_ms / 1e3,
            settings.max_message_bytes,
            waiting=lambda: len(self.threads.waiting),
            longest_decompressed_bytes=settings.max_decompressed_bytes,
            inferences=lambda: self.gate.inside,
        )
        refusals: dict[str, Refuses] = {INFER: self.gate.refusal}
        streams_of = [
            f"/{service.full_name}/{method.name}"
            for service in SERVICES
            for method in service.methods
            if method.server_streaming
        ]
        long = (*streams_of, *REFLECTION, HEALTH_WATCH)
        refusals.update(dict.fromkeys(long, self.lane_gate.stream_refusal))
        self.server = grpc.server(
            # The stub wants a ThreadPoolExecutor; grpc calls an Executor's methods only.
            self.threads,  # type: ignore[arg-type]
            interceptors=[Doorkeeper(self.threads, refusals, self.rules, calls.requests)],
            options=channel_options(settings, unix=unix),
        )
        self.where = ""
        self._add_triton(calls, settings)

    def _add_triton(self, calls: TritonCalls, settings: Grpc) -> None:
        control, regions, pattern = calls.control, calls.shared_memory, settings.forward_headers
        secret = [each.header for each in settings.restricted]
        servicer = TritonServicer(
            replace(
                calls,
                control=control and BoundedControl(control, LOADS_AT_ONCE),
                shared_memory=regions and regions.counted_by(self.traffic.budget),
            ),
            self.gate,
            moments=self.threads.moments,
            traffic=self.traffic,
            headers=HeaderForwarding(pattern, secret) if pattern else None,
        )
        health = HealthServicer(calls.data_plane, self.lane_gate)
        register(self.server, servicer, health, traffic=self.traffic, rules=self.rules)

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
        for service in SERVICES:
            methods = method_handlers(service, servicer, traffic=self.traffic, rules=self.rules)
            self.server.add_registered_method_handlers(service.full_name, methods)

    def add_reflection(self, services: Sequence[str]) -> None:
        """Serve reflection, as v1 and v1alpha, whose messages are the same.

        v1 itself cannot be described: its .proto is in no package that fits protobuf 6. A stream
        holds a thread for as long as it is open, and ends as CANCELLED where the server closes.
        """
        # Imported late: descriptors cost memory.
        from grpc_reflection.v1alpha import reflection, reflection_pb2  # noqa: PLC0415

        servicer = reflection.ReflectionServicer((*services, reflection.SERVICE_NAME))
        read = parsing(reflection_pb2.ServerReflectionRequest)

        def reflect(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            with self.lane_gate.stream(context.cancel):
                for response in servicer.ServerReflectionInfo(map(read, requests), context):
                    yield response.SerializeToString()

        for path in REFLECTION:
            _, service, method = path.split("/")
            handler = streaming(reflect, path, self.traffic, self.rules)
            self.server.add_registered_method_handlers(service, {method: handler})


class Certificates:
    """The server's certificate, and the clients' authority if `tls` is mutual.

    Every new connection gets the present contents of the files, once they match each other; until
    then it gets the previous contents, and the log gives the reason. Open connections stay.

    Raises: SettingsError: see `check_certificates`.
    """

    def __init__(self, tls: Tls) -> None:
        self._lock = threading.Lock()
        self._watch = CertificateWatch(tls, "grpc.tls")
        self.credentials = grpc.dynamic_ssl_server_credentials(
            _configuration(self._watch.shown),
            self._renewal,  # type: ignore[arg-type]  # the stub forgets None, for no change
            require_client_authentication=tls.mutual,
        )

    def change(self, tls: Tls) -> None:
        """Take the files from other paths, for new connections; `tls` is mutual as before."""
        with self._lock:
            self._watch.tls = tls

    def _renewal(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC before each handshake, on its threads: new certificates, or None."""
        with self._lock:
            found = self._watch.renewed()
        return None if found is None else _configuration(found)


def _configuration(files: CertificateFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(files.key, files.certificate)], root_certificates=files.client_ca
    )


# gRPC's option for each setting that it takes as it is.
_OPTIONS = {
    "grpc.max_receive_message_length": "max_message_bytes",
    "grpc.max_concurrent_streams": "max_streams",
    # The second is the hard limit; between the two gRPC refuses at random.
    "grpc.max_metadata_size": "max_metadata_bytes",
    "grpc.absolute_max_metadata_size": "max_metadata_bytes",
    "grpc.server_handshake_timeout_ms": "handshake_timeout_ms",
    # Until a client acknowledges the settings, gRPC holds it to none of these limits.
    "grpc.http2.settings_timeout": "handshake_timeout_ms",
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
        # So a client that resets calls faster than they are taken fills gRPC's backlog of their
        # method, and such calls of others on TCP end as CANCELLED meanwhile.
        ("grpc.http.overload_protection", 0),
        ("grpc.max_allowed_incoming_connections", connections),
        # gRPC would decompress a message before anything can count it.
        ("grpc.per_message_decompression", 0),
        # Otherwise the bytes of one call that gRPC accepts before the server reads grow to 32 MiB.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.keepalive_permit_without_calls", int(settings.keepalive_without_calls)),
    ]


def limit_bytes(pending_bytes: int, longest_bytes: int) -> int:
    # With one of the longest requests inside, a second one must fit.
    return max(pending_bytes, 2 * longest_bytes)


def _reason(error: RuntimeError) -> str:
    return str(error).splitlines()[0]


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
        calls: TritonCalls,
        settings: Grpc,
        *,
        tokens: Tokens | None = None,
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

        def side(*, unix: bool) -> Side:
            self._sides.append(Side(calls, settings, tokens, max_inferences, unix=unix))
            return self._sides[-1]

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
