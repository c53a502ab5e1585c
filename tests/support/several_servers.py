"""Several daemons with the same models, and nginx in front of them."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from support.daemon_process import Process
from support.fleet_recipes import RECIPES
from support.free_ports import free_ports
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Servers:
    """Daemons.

    Args:
        build: makes the repository of a server in that folder, by its number.
    """

    def __init__(self, folder: Path, count: int, build: Callable[[Path, int], object]) -> None:
        self._folder = folder
        self.ports = free_ports(count)
        self.running: list[Process] = []
        for number in range(count):
            build(folder / f"{number}/models", number)
            self.running.append(self._start(number))

    def _start(self, number: int) -> Process:
        folder = self._folder / str(number)
        process = Process(
            folder,
            f"--model-repository={folder / 'models'}",
            f"--grpc-port={self.ports[number]}",
            "--allow-client-shm=true",
        )
        process.wait_for("READY=1")
        return process

    def stop(self, number: int) -> None:
        assert self.running[number].terminate() == 0
        self.running[number].close()

    def start(self, number: int) -> None:
        """Return when it is ready."""
        self.running[number] = self._start(number)

    def restart(self, number: int) -> None:
        self.stop(number)
        self.start(number)

    def close(self) -> None:
        for each in self.running:
            each.close()


class Nginx:
    """Debian's nginx with the configuration of examples/fleet."""

    def __init__(self, folder: Path, ports: list[int]) -> None:
        binary = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin")
        if binary is None:
            pytest.skip("no nginx on this machine: apt install nginx-light")
        folder.mkdir()
        (self.port,) = free_ports(1)
        self._config = folder / "nginx.conf"
        text = (RECIPES / "nginx.conf").read_text()
        for old, new in {
            "127.0.0.1:8001": f"127.0.0.1:{self.port}",
            "/run/nginx.pid": f"{folder}/pid",
            "/var/log/nginx/error.log": f"{folder}/log",
            "http {\n": "http {\n"
            + "".join(
                f"    {each}_temp_path {folder}/{each};\n"
                for each in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
            ),
        }.items():
            assert old in text, f"nginx.conf has no {old}"
            text = text.replace(old, new)
        self._text = text
        self.ports = ports
        self._write(())
        self._process = subprocess.Popen(
            [binary, "-c", str(self._config), "-g", "daemon off;", "-e", str(folder / "log")]
        )
        self._log = folder / "log"
        wait_until(self._listens, otherwise=self._log.read_text)

    def _write(self, without: tuple[int, ...]) -> None:
        lines = []
        for line in self._text.splitlines():
            if "server 127.0.0.1:8101" in line:
                for port in self.ports:
                    end = " down;" if port in without else ";"
                    lines.append(line.replace("8101", str(port)).replace(";", end))
            elif "server 127.0.0.1:8102" not in line:
                lines.append(line)
        self._config.write_text("\n".join(lines))

    def _listens(self) -> bool:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), 1).close()
            return True
        return False

    def reload(self, *without: int) -> None:
        """Use no longer the servers at these ports; `nginx -s reload`."""
        self._write(without)
        self._process.send_signal(signal.SIGHUP)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
