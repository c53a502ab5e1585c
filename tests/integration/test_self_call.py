"""A server that answers nobody is found out; one that is merely full is not."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import grpc
import pytest

from edge_server.api.grpc.client import MOST_FAILURES, SelfCall
from edge_server.api.grpc.server import GrpcServer
from edge_server.api.triton_calls import TritonCalls
from edge_server.errors import StageStuck
from edge_server.inference.data_plane import DataPlane
from edge_server.inference.registry import ModelRegistry
from edge_server.settings import Grpc, Restriction, Tls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.certificates import Authority

TIMEOUT_S = 60.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def serve(stack: ExitStack) -> Callable[[Grpc], GrpcServer]:
    def start(settings: Grpc) -> GrpcServer:
        server = GrpcServer(TritonCalls(DataPlane(ModelRegistry()), "triton", "1"), settings)
        server.start()
        stack.callback(server.stop, 0.0)
        return server

    return start


def connects(port: int) -> Callable[[float], socket.socket]:
    return lambda timeout_s: socket.create_connection(("127.0.0.1", port), timeout_s)


def asked(call: SelfCall, times: int = MOST_FAILURES) -> SelfCall:
    """`call`, after so many calls, with no time between them."""
    call.worker.ask_to_stop()  # no wait of a worker that is to stop takes any time
    for _ in range(times):
        call._tick(time.monotonic())
    return call


def own(server: GrpcServer, **more: float) -> SelfCall:
    """Another like the one that the server makes of itself, or with `more`."""
    assert server.self_call is not None
    theirs = server.self_call
    return SelfCall(
        theirs._target,
        theirs._connect,
        theirs._waiting,
        metadata=theirs._metadata,
        speaks_tls=theirs._speaks_tls,
        **more,
    )


def test_a_server_that_responds_is_healthy(
    serve: Callable[[Grpc], GrpcServer], tmp_path: Path, authority: Authority
) -> None:
    certificate, key = map(str, authority.issue("server"))
    tls = Tls(mutual=True, certificate=certificate, key=key, client_ca=str(authority.ca))
    restricted = (Restriction(("health",), "secret", "word"),)
    for settings in (
        Grpc(port=0),
        Grpc(port=0, host="0.0.0.0", insecure=True, control="off"),  # noqa: S104
        Grpc(port=0, socket=str(tmp_path / "grpc.sock")),
        Grpc(port=0, restricted=restricted),
        Grpc(port=0, tls=tls, handshake_timeout_ms=200),
        Grpc(port=0, tls=tls, handshake_timeout_ms=600_000),
    ):
        # A busy machine is late now and then.
        call = asked(own(serve(settings), timeout_s=TIMEOUT_S), 1)
        assert call._failures == 0, (settings, call._why)
        call.check()
        call._close()


def test_a_server_that_was_stopped_is_dead(
    serve: Callable[[Grpc], GrpcServer], tmp_path: Path
) -> None:
    for settings in (Grpc(port=0), Grpc(port=0, socket=str(tmp_path / "grpc.sock"))):
        server = serve(settings)
        call = asked(own(server), 1)
        call.check()
        for side in server._sides:
            side.server.stop(None).wait()
        with pytest.raises(StageStuck, match=f"{MOST_FAILURES} calls in a row failed: UNAVAILABLE"):
            asked(call).check()
        call._close()


@pytest.mark.parametrize("speaks_tls", [False, True])
def test_a_port_without_a_server_is_dead(speaks_tls: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        call = SelfCall(
            f"127.0.0.1:{port}",
            connects(port),
            lambda: 0,
            speaks_tls=speaks_tls,
            timeout_s=0.2,
        )
        asked(call, MOST_FAILURES - 1).check()
        with pytest.raises(StageStuck, match="gRPC does not respond on 127"):
            asked(call, 1).check()
        call._close()


@pytest.mark.parametrize("speaks_tls", [False, True])
def test_a_server_whose_address_is_gone_with_its_network_is_no_fault(
    serve: Callable[[Grpc], GrpcServer], speaks_tls: bool
) -> None:
    call = own(serve(Grpc(port=0, host="127.0.0.9")))
    with call._connect(TIMEOUT_S) as connection:
        assert connection.getsockname()[0] == "127.0.0.9"
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        call = SelfCall(
            f"127.0.0.1:{port}",
            # An address that no machine has (RFC 5737).
            lambda timeout_s: socket.create_connection(
                ("127.0.0.1", port), timeout_s, ("192.0.2.1", 0)
            ),
            lambda: 0,
            speaks_tls=speaks_tls,
            timeout_s=0.1,
        )
        asked(call).check()
        assert call._failures == 0
        call._close()


def test_one_response_resets_the_failures(serve: Callable[[Grpc], GrpcServer]) -> None:
    call = own(serve(Grpc(port=0)))
    call._failures = MOST_FAILURES - 1
    asked(call, 1).check()
    assert call._failures == 0
    call._close()


def test_a_server_with_as_many_connections_as_there_may_be_is_well(
    serve: Callable[[Grpc], GrpcServer], stack: ExitStack
) -> None:
    server = serve(Grpc(port=0, max_connections=2))
    end = time.monotonic() + TIMEOUT_S
    while True:
        held = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        held.settimeout(TIMEOUT_S)
        try:
            if held.recv(1) == b"":
                break
        except ConnectionResetError:
            break
        assert time.monotonic() < end
    call = asked(own(server))
    assert call._failures == 0, call._why
    call._close()


def test_a_server_is_well_that_is_full_for_the_call_and_has_room_a_moment_later(
    stack: ExitStack,
) -> None:
    full, greets = (stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))

    def take(listener: socket.socket, greeting: bytes) -> None:
        # Its end is the end of the listener.
        with suppress(OSError):
            while True:
                with listener.accept()[0] as connection:
                    connection.sendall(greeting)

    for listener, greeting in ((full, b""), (greets, b"\0")):
        thread = threading.Thread(target=take, args=(listener, greeting))
        thread.start()
        stack.callback(thread.join)
        stack.callback(listener.shutdown, socket.SHUT_RDWR)
    call = SelfCall(
        f"127.0.0.1:{full.getsockname()[1]}", connects(greets.getsockname()[1]), lambda: 0
    )
    stack.callback(call._close)
    asked(call).check()
    assert call._failures == 0


def test_a_server_whose_threads_are_all_taken_is_well(stack: ExitStack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        call = SelfCall(f"127.0.0.1:{port}", connects(port), lambda: 1, timeout_s=0.2)
        asked(call).check()
        call._close()


def test_it_runs_as_long_as_the_server_does(serve: Callable[[Grpc], GrpcServer]) -> None:
    heard = threading.Event()
    server = GrpcServer(TritonCalls(DataPlane(ModelRegistry()), "triton", "1"), Grpc(port=0))
    assert server.self_call is not None
    really = server.self_call.fault
    server.self_call.fault = lambda: (really(), heard.set())[0]
    server.start()
    assert heard.wait(TIMEOUT_S)
    server.stop(0.0)
    server.self_call.worker.stop(TIMEOUT_S)
    assert not server.self_call.worker.alive
    assert server.self_call.worker.failure is None
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = channel.unary_unary("/grpc.health.v1.Health/Check")
        with pytest.raises(grpc.RpcError):
            call(b"", timeout=5)
