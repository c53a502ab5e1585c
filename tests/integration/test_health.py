"""`edge-server health` against a real daemon: the gate that an update engine calls."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.free_ports import free_ports
from support.preloaded import start_daemon
from support.verb import run_verb
from support.waiting import wait_until

from edge_server.api.http.scrape import scrape
from edge_server.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from support.mosquitto import Mosquitto
    from support.preloaded import Forked

TIMEOUT_S = 60
MODELS = Path(__file__).parents[2] / "models"
EVERYTHING = ("model:lane_detection", "camera:front", "lanes:front", "mqtt")


class Device:
    """A settings file, and daemons that run with it."""

    def __init__(self, folder: Path, more: str = "") -> None:
        self.config = folder / "config.toml"
        self.port, self.metrics_port = free_ports(2)
        self.config.write_text(
            f'[repository]\npaths = ["{MODELS}"]\n'
            f"[grpc]\nport = {self.port}\n{more}\n"
            f"[metrics]\nport = {self.metrics_port}\n"
            "[http]\nport = 0\n"
            '[cameras.front]\nuri = "synthetic://road?seed=7&fps=4"\n'
        )
        self._log = folder / "daemon.log"
        self._daemon: Forked | subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = ["run", "--config", str(self.config)]
        self._daemon = start_daemon(words, dict(os.environ), self._log)

    def kill(self) -> None:
        if self._daemon is not None:
            self._daemon.kill()
            self._daemon.wait()

    def signal(self, number: signal.Signals) -> None:
        assert self._daemon is not None
        self._daemon.send_signal(number)

    def health(self, *required: str, wait_s: float = 0, stable_s: float = 0) -> Health:
        done = run_verb(*self._words(required, wait_s, stable_s, "--json"))
        return Health(done.returncode, done.stdout, done.stderr)

    def begin_health(
        self, *required: str, wait_s: float, stable_s: float, flag: str = "--json"
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "edge_server", *self._words(required, wait_s, stable_s, flag)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(os.environ),
        )

    def _words(
        self, required: Sequence[str], wait_s: float, stable_s: float, flag: str
    ) -> list[str]:
        needs = (word for name in required for word in ("--require", name))
        times = ("--wait", str(wait_s), "--stable", str(stable_s))
        return ["health", "--config", str(self.config), *times, flag, *needs]


class Health:
    """What one call of `health` ended with."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.err = err
        found: dict[str, Any] = json.loads(out) if out else {}
        self.healthy = found.get("healthy")
        self.restarts = found.get("restarts")
        rows = found.get("requirements", ())
        self.unmet = {row["name"]: row["reason"] for row in rows if not row["met"]}


@pytest.fixture
def device(tmp_path: Path, mosquitto: Mosquitto) -> Iterator[Device]:
    made = Device(tmp_path)
    with made.config.open("a") as config:
        config.write(f'[mqtt]\nhost = "{mosquitto.host}"\nport = {mosquitto.port}\n')
    yield made
    made.kill()


def test_a_daemon_that_is_not_there_yet_is_waited_for_and_each_fault_has_its_reason(
    device: Device, mosquitto: Mosquitto
) -> None:
    missing = device.health(*EVERYTHING)
    assert (missing.code, missing.healthy) == (69, False)
    assert set(missing.unmet) == {"daemon", "version", "grpc", *EVERYTHING}
    assert "Connection refused" in missing.unmet["daemon"]
    waiting = device.begin_health(*EVERYTHING, wait_s=55, stable_s=1)
    device.start()
    out, err = waiting.communicate(timeout=TIMEOUT_S)
    found = Health(waiting.returncode, out, err)
    assert (found.code, found.healthy, found.unmet) == (0, True, {}), found.err

    mosquitto.kill()

    def without_broker() -> Health | None:
        found = device.health("camera:front", "mqtt")
        # On a busy machine the camera is late now and then.
        return found if found.unmet == {"mqtt": "no connection to the broker"} else None

    assert wait_until(without_broker, TIMEOUT_S).code == 69
    assert device.health("model:lane_detection").code == 0

    unknown = device.health("camera:rear", wait_s=30)
    assert unknown.code == 2
    assert "no such camera" in unknown.err


def test_a_restart_while_it_is_watched_starts_the_time_anew(device: Device) -> None:
    device.start()
    watching = device.begin_health(
        "model:lane_detection", wait_s=50, stable_s=3, flag="--lanes-within=9"
    )
    assert watching.stderr is not None
    for line in watching.stderr:
        if "is it stable?" in line:
            break
    device.kill()
    device.start()
    out, _ = watching.communicate(timeout=TIMEOUT_S)
    assert watching.returncode == 0
    assert "the daemon was restarted 1 times meanwhile" in out


def test_a_daemon_that_hangs_is_not_healthy(device: Device) -> None:
    device.start()
    assert device.health("lanes:front", wait_s=TIMEOUT_S).code == 0
    device.signal(signal.SIGSTOP)
    found = device.health("lanes:front")
    device.signal(signal.SIGCONT)
    assert found.code == 69
    assert "timed out" in found.unmet["daemon"]


def test_the_unix_socket_is_called_where_there_is_one(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    device = Device(tmp_path, f'socket = "{directory}/grpc.sock"')
    device.start()
    try:
        assert device.health(wait_s=TIMEOUT_S).code == 0
        (directory / "grpc.sock").unlink()
        found = device.health()
        assert (found.code, list(found.unmet)) == (69, ["grpc"])
        assert "grpc.sock" in found.unmet["grpc"]
    finally:
        device.kill()


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.0 200 OK\r\nA: ", b"HTTP/1.0 200 OK\r\n\r\n"])
def test_an_answer_that_comes_byte_by_byte_is_given_up(
    begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_server.api.http.scrape._LONGEST_S", 0.5)

    def drip(listener: socket.socket) -> None:
        caller, _ = listener.accept()
        with caller, suppress(OSError):
            caller.sendall(begin)
            while True:
                caller.sendall(b"#")
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = threading.Thread(target=drip, args=(listener,))
        sender.start()
        with pytest.raises(Unavailable, match=r"no whole answer within 0\.5 s"):
            scrape("127.0.0.1", listener.getsockname()[1])
        sender.join(TIMEOUT_S)
