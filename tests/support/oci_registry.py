"""Docker's own registry on the loopback, with TLS."""

from __future__ import annotations

import shutil
import socket
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from support.free_ports import free_ports
from support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from support.certificates import Authority

_CONFIG = """
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {root}}}, delete: {{enabled: true}}}}
http:
  addr: 127.0.0.1:{port}
  tls: {{certificate: {certificate}, key: {key}}}
  debug: {{addr: 127.0.0.1:{metrics_port}, prometheus: {{enabled: true, path: /metrics}}}}
"""


class Registry:
    """A registry that keeps what it has while it is stopped."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        if shutil.which("docker-registry") is None:
            pytest.skip("no docker-registry on this machine: apt install docker-registry")
        self.port, self.metrics_port = free_ports(2)
        certificate, key = authority.issue("registry")
        self._config = folder / "registry.yml"
        root = folder / "registry"
        self._config.write_text(
            _CONFIG.format(
                root=root,
                port=self.port,
                metrics_port=self.metrics_port,
                certificate=certificate,
                key=key,
            )
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Return when it listens."""
        self._process = process = subprocess.Popen(
            ["docker-registry", "serve", str(self._config)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

        def listens() -> bool:
            assert process.poll() is None, "the registry has ended"
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return True
            return False

        wait_until(listens)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None
