"""Real parts for integration tests."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Mosquitto:
    """A real broker on a free loopback port, which can be treated badly.

    Args:
        folder: for its configuration, its own.
        lines: of mosquitto.conf, beside the listener; the default lets everyone in.
    """

    def __init__(self, folder: Path, *lines: str) -> None:
        self.host = "127.0.0.1"
        self.port = _free_port()
        self._conf = folder / "mosquitto.conf"
        # It keeps root when started as root, or it could not read files under a private folder.
        self._conf.write_text(
            "\n".join(
                [
                    "user root",
                    "persistence false",
                    "connection_messages false",
                    f"listener {self.port} {self.host}",
                    *(lines or ["allow_anonymous true"]),
                    "",
                ]
            )
        )
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Returns when it listens."""
        self._process = process = subprocess.Popen(
            [_binary(), "-c", str(self._conf)], stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if line.rstrip().endswith("running"):
                return
        self.kill()
        raise AssertionError(f"mosquitto did not start:\n{said}")

    def kill(self) -> None:
        """kill -9, frozen or not; returns when it is gone. A second call does nothing."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _binary() -> str:
    # Debian puts it where only root looks.
    return shutil.which("mosquitto", path=f"{os.environ.get('PATH', '')}:/usr/sbin") or ""


@pytest.fixture
def stopped_mosquitto(tmp_path: Path) -> Iterator[Mosquitto]:
    """A broker that lets everyone in and is not yet there."""
    if not _binary():
        pytest.skip("no mosquitto on this machine: apt install mosquitto")
    broker = Mosquitto(tmp_path)
    yield broker
    broker.kill()


@pytest.fixture
def mosquitto(stopped_mosquitto: Mosquitto) -> Mosquitto:
    """A broker that lets everyone in, running."""
    stopped_mosquitto.start()
    return stopped_mosquitto


@pytest.fixture
def mosquitto_with(tmp_path: Path) -> Iterator[type[Mosquitto]]:
    """Makes and starts brokers with lines of mosquitto.conf: `mosquitto_with("acl_file f")`."""
    if not _binary():
        pytest.skip("no mosquitto on this machine: apt install mosquitto")
    made: list[Mosquitto] = []

    def make(*lines: str) -> Mosquitto:
        made.append(Mosquitto(tmp_path, *lines))
        made[-1].start()
        return made[-1]

    yield make  # type: ignore[misc]
    for broker in made:
        broker.kill()
