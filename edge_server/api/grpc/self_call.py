"""Calls of the daemon's own gRPC server, as a client makes them: is it healthy, does it run."""

from __future__ import annotations

import errno
import logging
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc
import msgspec
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1.health_pb2_grpc import HealthStub

from edge_server.api.grpc.client import CHANNEL_OPTIONS, DaemonClient, target_of
from edge_server.board.listening import client_host, host_and_port
from edge_server.errors import EdgeServerError, StageStuck
from edge_server.process.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edge_server.settings import Grpc

log = logging.getLogger(__name__)

# A server counts as dead after so many failed calls in a row: some 30 s. The limit counts
# calls, not seconds, as the whole process may have been suspended for a while.
MOST_FAILURES = 5
_PERIOD_S = 5.0
_TIMEOUT_S = 5.0


class SelfCall:
    """Calls Health/Check periodically, over one connection that stays open.

    A full server is healthy: one without a free thread, or one at its connection limit, which
    closes a new connection at once. A server whose clients leave between the call, which finds it
    full, and the test of a new connection, which does not, is healthy too. So is one whose address
    this machine has no more, as that of an interface whose cable is out.

    Args:
        target: the server's address, in gRPC's notation.
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
            check(pb.HealthCheckRequest(), timeout=self._timeout_s, metadata=self._metadata)
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

    The call goes to the Unix socket where there is one. A TCP side with TLS is called without a
    certificate: it counts as ready once it answers a ClientHello.
    """
    metadata = tuple((r.header, r.value) for r in settings.restricted if "health" in r.protocols)
    if settings.tls.on and settings.socket is None:
        host = client_host(settings.host)
        call = SelfCall(
            host_and_port(host, settings.port),
            lambda timeout_s: socket.create_connection((host, settings.port), timeout_s),
            lambda: 0,
            speaks_tls=True,
        )
        return call.fault()
    target = target_of(settings)
    with grpc.insecure_channel(target, options=CHANNEL_OPTIONS) as channel:
        check = HealthStub(channel).Check
        try:
            response = check(pb.HealthCheckRequest(), timeout=_TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            return f"{target}: {error.code().name}: {error.details()}"
    ready = response.status == pb.HealthCheckResponse.SERVING
    return "" if ready else f"{target}: live, not ready: models are loading, or one has failed"


def server_name(settings: Grpc) -> str:
    """Return name and version of the server of another process with these settings; empty where it
    does not say them. The call goes to the Unix socket where that responds, else to TCP."""
    for each in dict.fromkeys((settings.socket, None)):
        with (
            suppress(EdgeServerError),
            DaemonClient(msgspec.structs.replace(settings, socket=each)) as client,
        ):
            metadata = client.server()
            return f"{metadata.name} {metadata.version}"
    return ""
