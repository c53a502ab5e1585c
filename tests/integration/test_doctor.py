"""`edge-server doctor` as people and scripts start it, on whatever machine the tests run."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from support.processes import is_running
from support.verb import run_verb
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.daemon_process import Process
    from support.mosquitto import Mosquitto

TIMEOUT_S = 120


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_verb("doctor", *arguments, env={**os.environ, **environment})


def checks(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    told = json.loads(done.stdout)
    assert done.stderr == ""
    assert done.returncode == (0 if told["ok"] else 1)
    return {check["name"]: check for check in told["checks"]}


def test_a_running_daemon_and_its_broker_are_found_and_a_stopped_broker_is_a_warning(
    start: Callable[..., Process], mosquitto: Mosquitto, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    process = start("--model-repository", str(models))
    config = tmp_path / "config.toml"
    config.write_text(
        f"[grpc]\nport = {process.port}\n"
        f'[mqtt]\nhost = "{mosquitto.host}"\nport = {mosquitto.port}\n'
    )
    found = checks(doctor("--config", str(config), "--json"))
    assert "the daemon runs" in found["grpc_port"]["found"]
    assert found["broker"]["level"] == "ok"
    assert found["settings"]["level"] == "ok"
    assert found["opencv"]["level"] == "ok"

    mosquitto.kill()
    found = checks(doctor("--config", str(config), "--json"))
    assert found["broker"]["level"] == "warning"


def test_libraries_that_crash_cost_their_lines_and_the_exit_code_tells(tmp_path: Path) -> None:
    for name, code in (
        ("cv2", "import os; os.abort()"),
        ("tensorrt", "import ctypes; ctypes.string_at(0)"),
        ("pycuda", "raise SystemExit(3)"),
    ):
        (tmp_path / f"{name}.py").write_text(code)
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    done = doctor("--json", PYTHONPATH=path)
    found = checks(done)
    assert done.returncode == 1
    assert "SIGABRT" in found["opencv"]["found"]
    assert "SIGSEGV" in found["tensorrt"]["found"]
    assert "ended with" in found["pycuda"]["found"]
    assert found["onnxruntime"]["level"] == "ok"


def test_an_interrupt_ends_it_at_once_and_its_probes_with_it(tmp_path: Path) -> None:
    begun = tmp_path / "pid"
    (tmp_path / "cv2.py").write_text(
        f"import os, pathlib, time\npathlib.Path({str(begun)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", "edge_server", "doctor"]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}) as process:
        pid = int(wait_until(lambda: begun.exists() and begun.read_text(), TIMEOUT_S))
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130
    wait_until(lambda: not is_running(pid), TIMEOUT_S)


def test_a_wrong_configuration_is_a_fault_with_its_remedy(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[mqtt]\nhsot = 1\n")
    done = doctor("--config", str(config))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("fault   settings"))
    assert 'did you mean "host"?' in lines[place]
    assert f"-> fix it; then edge-server check --config {config}" in lines[place + 1]
    assert done.stdout.isascii()


def test_a_terminal_gets_marks_and_colours_unless_it_wants_none(tmp_path: Path) -> None:
    for environment, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "edge_server", "doctor"],
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            env={
                **{k: v for k, v in os.environ.items() if k != "NO_COLOR"},
                "TERM": "xterm",
                "PYTHONUTF8": "1",
                **environment,
            },
        )
        os.close(theirs)
        said = b""
        # The terminal's end is an error on Linux, once nobody holds its other side.
        try:
            while part := os.read(ours, 4096):
                said += part
        except OSError:
            pass
        os.close(ours)
        process.wait(TIMEOUT_S)
        assert "✔".encode() in said
        assert (b"\x1b[" in said) is coloured
