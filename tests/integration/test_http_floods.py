"""Floods of HTTP that cost Python the most for a byte, and an HTTP loop that hangs: the daemon
stays up, its Unix socket answers, and its memory is bounded."""

from __future__ import annotations

import base64
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import tritonclient.grpc as triton
from support.processes import resident_bytes
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.daemon_process import Process

TIMEOUT_S = 60.0
MIB = 1024 * 1024
MOST_MORE_BYTES = 1000 * MIB
TINY_FRAMES = b"\x81\x81\0\0\0\0x" * 9000
GET = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n"
# `socket.gethostname` is asked, on the HTTP loop's thread, for a host that is no address. The hang
# lasts as long as the file is there.
HANG = """
import os, socket, threading, time
asked = socket.gethostname
def gethostname():
    while threading.current_thread().name == "http" and os.path.exists({path!r}):
        time.sleep(0.05)
    return asked()
socket.gethostname = gethostname
"""


@pytest.fixture
def daemon(start: Callable[..., Process], tmp_path: Path) -> Iterator[Process]:
    (tmp_path / "models").mkdir()
    process = start(
        f"--model-repository={tmp_path / 'models'}", f"--grpc-socket={tmp_path / 'grpc.sock'}"
    )
    yield process
    assert process.popen.poll() is None, process.log.read_text()
    assert "Traceback" not in process.log.read_text()


def _connect(process: Process) -> socket.socket:
    return socket.create_connection(("127.0.0.1", process.http_port), TIMEOUT_S)


def _status(process: Process, host: bytes = b"localhost", timeout_s: float = TIMEOUT_S) -> bytes:
    """Return the status of a GET; nothing where there is no answer."""
    with suppress(OSError), _connect(process) as connection:
        connection.settimeout(timeout_s)
        connection.sendall(b"GET /v2 HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
        return connection.recv(65536)[9:12]
    return b""


def _flood(process: Process, folder: Path, floods: int, flood: Callable[[], None]) -> None:
    """Run so many at once; the socket answers all that time, and memory is bounded."""
    assert _status(process) == b"200"  # what HTTP imports at its first client is there
    rest_bytes = resident_bytes(process.popen.pid)
    over = threading.Event()
    peak_bytes = 0

    def run() -> None:
        with ThreadPoolExecutor(floods) as pool:
            done = [pool.submit(flood) for _ in range(floods)]
        over.set()
        for each in done:
            each.result()

    with (
        ThreadPoolExecutor(1) as pool,
        triton.InferenceServerClient(f"unix://{folder / 'grpc.sock'}") as client,
    ):
        running = pool.submit(run)
        while not over.wait(0.05):
            assert client.is_server_live(client_timeout=TIMEOUT_S)
            peak_bytes = max(peak_bytes, resident_bytes(process.popen.pid))
        running.result()
    assert peak_bytes - rest_bytes < MOST_MORE_BYTES
    wait_until(lambda: _status(process) == b"200", TIMEOUT_S)


def test_six_web_sockets_of_tiny_frames(daemon: Process, tmp_path: Path) -> None:
    key = base64.b64encode(bytes(16))
    upgrade = (
        b"GET /page/live HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
        b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + key
    )

    def flood() -> None:
        with _connect(daemon) as connection:
            connection.sendall(upgrade + b"\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 101")
            with suppress(ConnectionError):
                for _ in range(30):
                    connection.sendall(TINY_FRAMES)

    _flood(daemon, tmp_path, 6, flood)


def test_fifty_connections_of_pipelined_gets(daemon: Process, tmp_path: Path) -> None:
    def flood() -> None:
        with suppress(ConnectionError), _connect(daemon) as connection:
            connection.sendall(GET * (1_900_000 // len(GET)))

    _flood(daemon, tmp_path, 50, flood)


def test_a_loop_that_hangs_is_closed_and_opened_again_while_grpc_goes_on(
    start: Callable[..., Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    hangs = tmp_path / "hangs"
    (tmp_path / "sitecustomize.py").write_text(HANG.format(path=str(hangs)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    process = start(
        f"--model-repository={tmp_path / 'models'}", f"--grpc-socket={tmp_path / 'grpc.sock'}"
    )
    assert _status(process) == b"200"
    hangs.touch()
    with triton.InferenceServerClient(f"unix://{tmp_path / 'grpc.sock'}") as client:

        def goes_on(said: str) -> bool:
            assert client.is_server_live(client_timeout=TIMEOUT_S)
            return said in process.log.read_text()

        with _connect(process) as connection:
            connection.sendall(GET.replace(b"localhost", b"stranger"))
            wait_until(lambda: goes_on("http: closed, and opened again: "), TIMEOUT_S)
            wait_until(lambda: goes_on("http: open again"), TIMEOUT_S)
            wait_until(lambda: _status(process, timeout_s=1.0) == b"200", TIMEOUT_S)
            hangs.unlink()
            # The loop that hung ends with its connections.
            with suppress(ConnectionError):
                while connection.recv(65536):
                    pass
        assert _status(process) == b"200"
        assert goes_on("")
    assert process.popen.poll() is None
