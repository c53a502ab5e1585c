"""A daemon for measurements alone: on a Unix socket, with no camera, broker or model at first."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.api.grpc.client import DaemonClient
from edge_server.errors import EdgeServerError, Unavailable
from edge_server.settings import Grpc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_START_S = 60.0
_STOP_S = 15.0
_LOOK_S = 0.1
_LINES = 5


class OwnDaemon:
    """A daemon that loads models of a repository on request, and changes nothing there.

    Attributes:
        client: calls it.
    """

    def __init__(self, process: subprocess.Popen[bytes], client: DaemonClient) -> None:
        self._process = process
        self.client = client

    @property
    def resident_bytes(self) -> int | None:
        """The memory of its process, without those of Python models; None where it has ended."""
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        except OSError:
            return None
        lines = (line.split() for line in status.splitlines() if line.startswith("VmRSS:"))
        return next((int(words[1]) * 1024 for words in lines), None)


@contextmanager
def own_daemon(repositories: Sequence[str]) -> Iterator[OwnDaemon]:
    """Start a daemon on `repositories`, and stop it at the end.

    Raises:
        Unavailable: it did not start; the text has its last lines.
    """
    with tempfile.TemporaryDirectory(prefix="edge-server-bench-") as folder:
        path = Path(folder, "grpc.sock")
        log_path = Path(folder, "log")
        isolated = ["-I"] if sys.flags.isolated else []
        with log_path.open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 - our own program
                [
                    *(sys.executable, *isolated, "-m", "edge_server", "run"),
                    *(f"--model-repository={Path(each).absolute()}" for each in repositories),
                    *("--model-control-mode=explicit", "--allow-metrics=false"),
                    *("--allow-http=false", "--grpc-port=0", f"--grpc-socket={path}"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            with DaemonClient(Grpc(socket=str(path))) as client:
                _wait_until_ready(process, client, log_path)
                yield OwnDaemon(process, client)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(
    process: subprocess.Popen[bytes], client: DaemonClient, log_path: Path
) -> None:
    end_s = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < end_s:
        try:
            if client.is_ready():
                return
        except EdgeServerError:
            time.sleep(_LOOK_S)
    lines = log_path.read_text(errors="replace").splitlines()[-_LINES:]
    raise Unavailable("\n".join(["the daemon for the measurement did not start:", *lines]))
