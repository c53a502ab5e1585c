"""Limits hold, each listener for itself, and only who may gets in."""

from __future__ import annotations

import queue
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from support.verb import ANY_PORTS, run_verb
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.daemon_process import Process

MODELS = Path(__file__).parents[2] / "models"
TIMEOUT_S = 30.0
LIVE = "/inference.GRPCInferenceService/ServerLive"
# What a client of HTTP/2 says first: the preface and empty SETTINGS.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def configured(start: Callable[..., Process], tmp_path: Path) -> Callable[..., Process]:
    """Starts a daemon with these lines in its configuration."""

    def start_with(*lines: str) -> Process:
        path = tmp_path / "config.toml"
        path.write_text("\n".join([f'[repository]\npaths = ["{MODELS}"]', *lines]))
        return start("--config", str(path))

    return start_with


@pytest.fixture
def address(tmp_path: Path) -> str:
    return str(tmp_path / "grpc.sock")


def is_live(
    target: str, stack: ExitStack, *, wait: bool = False, timeout_s: float = TIMEOUT_S
) -> bool:
    # An own subchannel: a shared one would be an old connection.
    channel = stack.enter_context(
        grpc.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)])
    )
    try:
        channel.unary_unary(LIVE)(b"", timeout=timeout_s, wait_for_ready=wait)
    except grpc.RpcError:
        return False
    return True


def connect(port: int, stack: ExitStack, said: bytes = b"") -> socket.socket:
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT_S))
    connection.sendall(said)
    return connection


def ends(connection: socket.socket) -> bool:
    """Whether the server ends a connection; waits for that."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


@contextmanager
def set_in_the_end() -> Iterator[threading.Event]:
    event = threading.Event()
    try:
        yield event
    finally:
        event.set()


def test_the_socket_serves_while_tcp_is_held_by_others(
    configured: Callable[..., Process], address: str, stack: ExitStack
) -> None:
    process = configured(f'[grpc]\nsocket = "{address}"\nmax_connections = 8')
    tcp, unix = f"127.0.0.1:{process.port}", f"unix:{address}"
    assert is_live(tcp, stack)  # its connection is one of the 8
    held = [connect(process.port, stack, PREFACE) for _ in range(7)]
    for connection in held:
        assert connection.recv(9), "the server said nothing"
    for _ in range(50):
        connect(process.port, stack)
    assert not is_live(tcp, stack, timeout_s=2.0)  # it is held indeed
    with triton.InferenceServerClient(unix) as client:
        assert client.is_server_ready()
        image = triton.InferInput("image", [1, 720, 1280, 3], "UINT8")
        image.set_data_from_numpy(np.full((1, 720, 1280, 3), 127, np.uint8))
        assert client.infer("lane_detection", [image]).as_numpy("lane_scores") is not None


def test_one_connection_may_ask_for_any_number_of_shapes(
    configured: Callable[..., Process], stack: ExitStack
) -> None:
    process = configured("[grpc]\nmax_streams = 4")
    client = stack.enter_context(triton.InferenceServerClient(f"127.0.0.1:{process.port}"))
    for height in range(1, 20):
        image = triton.InferInput("image", [1, 36 * height, 64, 3], "UINT8")
        image.set_data_from_numpy(np.zeros((1, 36 * height, 64, 3), np.uint8))
        assert client.infer("lane_preprocess", [image]).get_response().outputs


def test_streams_that_fill_tcp_leave_the_socket_its_own(
    configured: Callable[..., Process], address: str, stack: ExitStack
) -> None:
    process = configured(f'[grpc]\nsocket = "{address}"', "max_infer_streams = 8")
    done = stack.enter_context(set_in_the_end())
    calls = []

    def open_stream(target: str) -> None:
        channel = stack.enter_context(grpc.insecure_channel(target))
        infer = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")

        def requests() -> Iterator[bytes]:
            yield b""
            done.wait(TIMEOUT_S)

        calls.append(infer(requests(), timeout=TIMEOUT_S))
        next(calls[-1])  # the request is refused, but the stream is open

    for _ in range(8):
        open_stream(f"127.0.0.1:{process.port}")
    with pytest.raises(grpc.RpcError) as caught:
        open_stream(f"127.0.0.1:{process.port}")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    open_stream(f"unix:{address}")


def test_who_connects_and_says_nothing_loses_his_place(
    configured: Callable[..., Process], stack: ExitStack
) -> None:
    process = configured("[grpc]\nmax_connections = 4\nhandshake_timeout_ms = 500")
    silent = [connect(process.port, stack) for _ in range(4)]
    assert all(ends(connection) for connection in silent)
    assert is_live(f"127.0.0.1:{process.port}", stack, wait=True, timeout_s=TIMEOUT_S)


def test_a_tcp_connection_ends_with_its_age_and_a_client_does_not_notice(
    configured: Callable[..., Process], stack: ExitStack
) -> None:
    process = configured(
        "[grpc]\nmax_connection_age_ms = 300\nmax_connection_age_grace_ms = 3000",
    )
    raw = connect(process.port, stack, PREFACE)
    with triton.InferenceServerClient(f"127.0.0.1:{process.port}") as client:
        assert client.is_server_live()
        assert ends(raw)
        assert client.is_server_live()


@pytest.mark.parametrize("target", ["tcp", "unix"])
def test_a_message_above_the_limit_is_turned_away_and_one_below_is_not(
    configured: Callable[..., Process], address: str, stack: ExitStack, target: str
) -> None:
    process = configured(f'[grpc]\nsocket = "{address}"\nmax_message_bytes = 100000')
    channel = stack.enter_context(
        grpc.insecure_channel(f"127.0.0.1:{process.port}" if target == "tcp" else f"unix:{address}")
    )
    infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    for size, code in (
        (90_000, grpc.StatusCode.INVALID_ARGUMENT),
        (100_001, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            infer(b"\xff" * size, timeout=TIMEOUT_S)
        assert caught.value.code() is code


def test_a_client_of_many_threads_waits_for_a_stream_and_is_never_refused(
    configured: Callable[..., Process], stack: ExitStack
) -> None:
    process = configured("[grpc]", "max_streams = 4")
    channel = stack.enter_context(
        grpc.insecure_channel(f"127.0.0.1:{process.port}", [("grpc.use_local_subchannel_pool", 1)])
    )
    live = channel.unary_unary(LIVE)
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda _: live(b"", timeout=TIMEOUT_S), range(1000)))
    assert set(answers) == {b"\x08\x01"}


def test_headers_above_the_limit_are_turned_away(
    configured: Callable[..., Process], stack: ExitStack
) -> None:
    process = configured("[grpc]\nmax_metadata_bytes = 4096")
    channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{process.port}"))
    live = channel.unary_unary(LIVE)
    live(b"", metadata=[("x", "y" * 3000)], timeout=TIMEOUT_S)
    with pytest.raises(grpc.RpcError) as caught:
        live(b"", metadata=[("x", "y" * 5000)], timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    live(b"", timeout=TIMEOUT_S)


def test_a_second_daemon_ends_with_75_and_a_dead_ones_socket_is_replaced(
    start: Callable[..., Process], address: str, stack: ExitStack
) -> None:
    flags = (f"--model-repository={MODELS}", f"--grpc-socket={address}")
    first = start(*flags)
    second = run_verb("run", *flags, *ANY_PORTS)
    assert second.returncode == 75
    assert f"{address}: another daemon serves there" in second.stderr
    assert is_live(f"unix:{address}", stack)
    first.popen.send_signal(signal.SIGKILL)
    first.popen.wait(TIMEOUT_S)
    assert Path(address).is_socket()  # left behind
    first.close()
    Path(address).with_name("notify").unlink()
    third = start(*flags)
    assert is_live(f"unix:{address}", stack)
    assert third.terminate() == 0
    assert not Path(address).exists()


def test_control_calls_are_answered_on_the_socket_only_where_that_is_chosen(
    configured: Callable[..., Process], address: str
) -> None:
    process = configured(f'[grpc]\nsocket = "{address}"\ncontrol = "unix"')
    control: tuple[Callable[[Any], object], ...] = (
        lambda client: client.load_model("lane_decode"),
        lambda client: client.unload_model("nothing"),
        lambda client: client.register_system_shared_memory("r", "/r", 1),
        lambda client: client.unregister_system_shared_memory(),
        lambda client: client.unregister_cuda_shared_memory(),
        lambda client: client.update_log_settings({"log_verbose_level": 0}),
        lambda client: client.update_trace_settings(settings={"trace_rate": "1000"}),
    )
    told = "is a control call; those are served on the Unix socket"
    with triton.InferenceServerClient(f"127.0.0.1:{process.port}") as client:
        for call in control:
            with pytest.raises(InferenceServerException, match=told) as caught:
                call(client)
            assert caught.value.status() == "StatusCode.UNAVAILABLE"
        assert client.get_model_repository_index().models
    with triton.InferenceServerClient(f"unix:{address}") as client:
        for call in control:
            try:
                call(client)
            except InferenceServerException as error:
                assert told not in str(error)  # noqa: PT017


def test_a_restricted_protocol_is_for_who_sends_the_header(
    start: Callable[..., Process], client: Callable[..., triton.InferenceServerClient]
) -> None:
    process = start(
        f"--model-repository={MODELS}", "--grpc-restricted-protocol=metadata,inference:key=word"
    )
    server = client(process)
    header = "triton-grpc-protocol-key"
    assert server.is_server_live()
    with pytest.raises(
        InferenceServerException, match=f"This protocol is restricted, expecting header '{header}'"
    ) as caught:
        server.get_server_metadata()
    assert caught.value.status() == "StatusCode.UNAVAILABLE"
    assert server.get_server_metadata(headers={header: "word"}).name == "triton"
    refused: queue.Queue[object] = queue.Queue()
    server.start_stream(callback=lambda result, error: refused.put(error))
    assert "This protocol is restricted" in str(refused.get(timeout=TIMEOUT_S))
    server.stop_stream()
    assert "word" not in process.log.read_text()


def tls_client(
    process: Process, client_files: tuple[Path, Path] | None, trusted: Path
) -> triton.InferenceServerClient:
    shown = client_files and {
        "certificate_chain": str(client_files[0]),
        "private_key": str(client_files[1]),
    }
    return triton.InferenceServerClient(
        f"127.0.0.1:{process.port}", ssl=True, root_certificates=str(trusted), **(shown or {})
    )


def tls_live(process: Process, client_files: tuple[Path, Path] | None, trusted: Path) -> bool:
    with tls_client(process, client_files, trusted) as client:
        try:
            return bool(client.is_server_live(client_timeout=TIMEOUT_S))
        except InferenceServerException:
            return False


def test_mutual_tls_lets_in_who_is_signed_and_nobody_else(
    start: Callable[..., Process], authority: Any, stranger: Any, stack: ExitStack
) -> None:
    certificate, key = authority.issue("server")
    process = start(
        f"--model-repository={MODELS}",
        "--grpc-use-ssl-mutual=true",
        f"--grpc-server-cert={certificate}",
        f"--grpc-server-key={key}",
        f"--grpc-root-cert={authority.ca}",
    )

    def live(client_files: tuple[Path, Path] | None, trusted: Path) -> bool:
        return tls_live(process, client_files, trusted)

    signed = authority.issue("signed")
    assert live(signed, authority.ca)
    assert not live(None, authority.ca)
    assert not live(stranger.issue("other"), authority.ca)
    assert not live(authority.issue("expired", days=-1), authority.ca)
    assert not live(signed, stranger.ca)
    assert not is_live(f"127.0.0.1:{process.port}", stack)  # plain text
    assert live(signed, authority.ca)
    process.wait_for_log("listening on 127.0.0.1:")
    process.wait_for_log("with mutual TLS")


def test_certificates_that_are_renewed_are_what_new_connections_see(
    start: Callable[..., Process], authority: Any, stranger: Any, tmp_path: Path
) -> None:
    certificate, key = authority.issue("server")
    client_ca = tmp_path / "clients.pem"
    client_ca.write_bytes(authority.ca.read_bytes())
    process = start(
        f"--model-repository={MODELS}",
        "--grpc-use-ssl-mutual=true",
        f"--grpc-server-cert={certificate}",
        f"--grpc-server-key={key}",
        f"--grpc-root-cert={client_ca}",
    )
    signed, other = authority.issue("signed"), stranger.issue("other")
    with tls_client(process, signed, authority.ca) as before:
        assert before.is_server_live()
        new_certificate, new_key = stranger.issue("new")
        certificate.write_bytes(new_certificate.read_bytes())
        for _ in range(3):
            assert tls_live(process, signed, authority.ca)
        key.write_bytes(new_key.read_bytes())
        assert tls_live(process, signed, stranger.ca)
        assert not tls_live(process, signed, authority.ca)
        client_ca.write_bytes(stranger.ca.read_bytes())
        assert tls_live(process, other, stranger.ca)
        assert not tls_live(process, signed, stranger.ca)
        key.chmod(0o644)
        client_ca.unlink()
        assert tls_live(process, other, stranger.ca)
        assert before.is_server_live()
    stay = f"certificates stay as they were: grpc.tls.client_ca: {client_ca}"
    process.wait_for_log(stay)
    log = process.log.read_text()
    assert log.count(f"{key}: is not the key of {certificate}") == 1
    assert log.count("certificates were renewed") == 2
    assert log.count(stay) == 1


def test_tls_without_mutual_asks_no_client(
    start: Callable[..., Process], authority: Any, stack: ExitStack
) -> None:
    certificate, key = authority.issue("server")
    process = start(
        *(f"--model-repository={MODELS}", "--grpc-use-ssl=true"),
        *(f"--grpc-server-cert={certificate}", f"--grpc-server-key={key}"),
    )
    with triton.InferenceServerClient(
        f"127.0.0.1:{process.port}", ssl=True, root_certificates=str(authority.ca)
    ) as client:
        assert client.is_server_live()
    assert not is_live(f"127.0.0.1:{process.port}", stack)


def test_64_streams_are_open_at_once_and_one_connection_is_enough_for_them(
    tmp_path: Path, start: Callable[..., Any]
) -> None:
    (tmp_path / "models" / "echo" / "1").mkdir(parents=True)
    io = "data_type: TYPE_FP32 dims: -1 }"
    (tmp_path / "models" / "echo" / "config.pbtxt").write_text(
        f'backend: "identity" input {{ name: "a" {io} output {{ name: "b" {io}'
    )
    process = start(f"--model-repository={tmp_path / 'models'}")
    clients = [triton.InferenceServerClient(f"127.0.0.1:{process.port}") for _ in range(64)]
    heard: queue.Queue[tuple[object, object]] = queue.Queue()
    values = triton.InferInput("a", [1], "FP32")
    values.set_data_from_numpy(np.ones(1, np.float32))
    try:
        for _ in range(2):
            for client in clients:
                if not client._stream:
                    client.start_stream(lambda result, error: heard.put((result, error)))
                client.async_stream_infer("echo", [values])
            for _ in clients:
                _, error = heard.get(timeout=TIMEOUT_S)
                assert error is None, error
        assert clients[0].is_server_ready()
    finally:
        for client in clients:
            client.close()
