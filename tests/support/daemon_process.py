"""The daemon as a process."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from support.free_ports import free_ports
from support.preloaded import start_daemon

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TIMEOUT_S = 30.0


class Process:
    """`edge-server run` with its own notify socket, so that READY is heard as systemd hears it.

    `within` is a command that runs the daemon in its own place, such as `unshare --mount`.
    """

    def __init__(self, folder: Path, *arguments: str, within: Sequence[str] = ()) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        address = folder / "notify"
        address.unlink(missing_ok=True)  # of one that was started before
        self._socket.bind(str(address))
        self._socket.settimeout(0.5)
        self._draining: threading.Thread | None = None
        self.log = folder / "log"
        self.port, self.metrics_port, self.http_port = free_ports(3)
        self.popen = start_daemon(
            [
                "run",
                f"--grpc-port={self.port}",
                f"--metrics-port={self.metrics_port}",
                f"--http-port={self.http_port}",
                *arguments,
            ],
            {**os.environ, "NOTIFY_SOCKET": str(address)},
            self.log,
            within,
        )

    def wait_for(self, assignment: str) -> None:
        end = time.monotonic() + TIMEOUT_S
        said = ""
        while assignment not in said:
            if self.popen.poll() is not None:
                raise AssertionError(f"ended with {self.popen.returncode}:\n{self.log.read_text()}")
            assert time.monotonic() < end, f"{assignment} was not said:\n{self.log.read_text()}"
            with suppress(TimeoutError):
                said = self._socket.recv(4096).decode()

    def drain(self) -> None:
        """Read on, until `close`, what the daemon says: it waits for a reader that does not."""

        def read() -> None:
            while self.popen.poll() is None:
                with suppress(TimeoutError, OSError):
                    self._socket.recv(4096)

        self._draining = threading.Thread(target=read)
        self._draining.start()

    def terminate(self) -> int:
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(TIMEOUT_S)

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        if self._draining is not None:
            self._draining.join()
        self._socket.close()
