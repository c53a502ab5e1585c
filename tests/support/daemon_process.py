"""The daemon as a process."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from typing import TYPE_CHECKING

from support.free_ports import free_ports
from support.notify_socket import NotifySocket
from support.preloaded import start_daemon
from support.waiting import TIMEOUT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Process:
    """`edge-server run` with its own notify socket, so that READY is heard as systemd hears it.

    `within` is a command that runs the daemon in its own place, such as `unshare --mount`.
    """

    def __init__(self, folder: Path, *arguments: str, within: Sequence[str] = ()) -> None:
        self._systemd = NotifySocket(folder)
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
            {**os.environ, "NOTIFY_SOCKET": self._systemd.address},
            self.log,
            within,
        )

    def wait_for(self, assignment: str) -> None:
        """Return once it has said that, after what was waited for before."""
        end = time.monotonic() + TIMEOUT_S
        while not self._systemd.wait_for(assignment, 0.5):
            if self.popen.poll() is not None:
                raise AssertionError(f"ended with {self.popen.returncode}:\n{self.log.read_text()}")
            assert time.monotonic() < end, f"{assignment} was not said:\n{self.log.read_text()}"

    def wait_for_log(self, text: str, since: int = 0) -> None:
        """Wait until the log, which a thread of its own writes, has `text`, after its first `since`
        characters."""
        wait_until(
            lambda: text in self.log.read_text()[since:],
            otherwise=lambda: f"{text} is not logged:\n{self.log.read_text()}",
        )

    def metrics(self) -> str:
        """The page of its metrics."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as page:
            return str(page.read().decode())

    def metric(self, begin: str) -> float:
        """The value of the only sample whose name and labels begin so."""
        lines = self.metrics().splitlines()
        (value,) = (line.split()[-1] for line in lines if line.startswith(begin))
        return float(value)

    def terminate(self) -> int:
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(TIMEOUT_S)

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self._systemd.close()
