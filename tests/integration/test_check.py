"""`check` beside real brokers and daemons: what it finds well, and what `run` would meet."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.verb import ANY_PORTS, run_verb

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.daemon_process import Process
    from support.mosquitto import Mosquitto

MODELS = Path(__file__).parents[2] / "models"


@pytest.fixture
def decode(tmp_path: Path) -> str:
    """The argument for a repository with one small model."""
    shutil.copytree(MODELS / "lane_decode", tmp_path / "models" / "lane_decode")
    return f"--model-repository={tmp_path / 'models'}"


@pytest.fixture
def broker(tmp_path: Path, mosquitto_with: Callable[..., Mosquitto]) -> Mosquitto:
    """Lets in who is `edge` with the password `right`."""
    if shutil.which("mosquitto_passwd") is None:
        pytest.skip("no mosquitto_passwd on this machine: apt install mosquitto")
    users = tmp_path / "users"
    subprocess.run(["mosquitto_passwd", "-b", "-c", users, "edge", "right"], check=True)
    return mosquitto_with("allow_anonymous false", f"password_file {users}")


def configured(folder: Path, broker: Mosquitto, password: Path) -> str:
    config = folder / "config.toml"
    config.write_text(
        f'[mqtt]\nhost = "{broker.host}"\nport = {broker.port}\nusername = "edge"\n'
        f'password_file = "{password}"\n'
    )
    return f"--config={config}"


def test_a_wrong_password_is_a_fault_and_the_good_model_is_reported(
    tmp_path: Path, decode: str, broker: Mosquitto
) -> None:
    password = tmp_path / "password"
    password.write_text("wrong\n")
    config = configured(tmp_path, broker, password)
    done = run_verb("check", *ANY_PORTS, decode, config)
    assert done.returncode == 78
    assert f"mqtt {broker.host}:{broker.port}: the broker refuses us: " in done.stderr
    assert "model lane_decode version 1: READY" in done.stdout
    password.write_text("right\n")
    done = run_verb("check", *ANY_PORTS, decode, config)
    assert done.returncode == 0, done.stderr
    assert f"mqtt {broker.host}:{broker.port}: accepts the connection" in done.stdout


def test_a_password_file_that_is_missing_ends_run_with_78(
    tmp_path: Path, decode: str, broker: Mosquitto
) -> None:
    missing = tmp_path / "missing"
    done = run_verb("run", *ANY_PORTS, decode, configured(tmp_path, broker, missing))
    assert done.returncode == 78
    assert f"mqtt.password_file: {missing}: cannot be read: No such file" in done.stderr


def test_check_is_well_beside_the_daemon_that_runs(
    decode: str, start: Callable[..., Process]
) -> None:
    process = start(decode)
    ports = (f"--grpc-port={process.port}", f"--metrics-port={process.metrics_port}")
    done = run_verb("check", decode, *ports)
    assert done.returncode == 0, done.stderr
    assert "the daemon runs" in done.stdout


def test_check_recognises_the_daemon_that_needs_a_token(
    tmp_path: Path, decode: str, start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text("read reads-0123456789abcdef\n")
    config = tmp_path / "config.toml"
    config.write_text(f'[access]\ntokens_file = "{tokens}"\n')
    process = start(decode, f"--config={config}")
    flags = (
        *(decode, f"--config={config}", f"--grpc-port={process.port}"),
        *(f"--metrics-port={process.metrics_port}", f"--http-port={process.http_port}"),
    )
    done = run_verb("check", *flags)
    assert done.returncode == 0, done.stderr
    assert "by the daemon or something else; EDGE_SERVER_TOKEN with a token" in done.stdout
    monkeypatch.setenv("EDGE_SERVER_TOKEN", "reads-0123456789abcdef")
    done = run_verb("check", *flags)
    assert done.returncode == 0, done.stderr
    assert "the daemon runs" in done.stdout
    assert f"settings: {config}" in done.stdout


def test_an_output_on_a_full_disk_ends_with_one_line(decode: str) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = run_verb("check", decode, "--grpc-port=0", stdout=full)
    assert done.returncode == 1
    assert done.stderr == "edge-server: the output cannot be written: No space left on device\n"


IN_VAIN = """
backend: "onnxruntime"
instance_group { kind: KIND_CPU secondary_devices { kind: KIND_NVDLA } host_policy: "cores" }
optimization { priority: PRIORITY_MAX eager_batching: true }
model_operations { op_library_filename: "ops.so" }
parameters { key: "gpu_mem_limit" value { string_value: "1024" } }
parameters { key: "of_nobody" value { string_value: "1" } }
"""


def test_what_of_a_model_has_no_effect_is_printed_and_an_error_if_strict(tmp_path: Path) -> None:
    """Each line is one that `run` logs."""
    directory = tmp_path / "models" / "net"
    shutil.copytree(MODELS / "laneDetect_model", directory)
    (directory / "config.pbtxt").write_text(IN_VAIN)
    models = f"--model-repository={tmp_path / 'models'}"
    done = run_verb("check", *ANY_PORTS, models, "--host-policy=cores,cpu-cores=0-1")
    assert done.returncode == 0, done.stderr
    assert "model net version 1: READY" in done.stdout
    said = [line for line in done.stdout.splitlines() if "has no effect" in line]
    assert {line.partition(" has no effect")[0] for line in said} == {
        "warning: model net: parameter 'of_nobody'",
        "warning: model net: parameter 'gpu_mem_limit'",
        "warning: model net: field 'model_operations'",
        "warning: model net: field 'optimization.priority'",
        "warning: model net: field 'optimization.eager_batching'",
        "warning: model net: field 'instance_group.secondary_devices'",
        "warning: model net: field 'instance_group.host_policy'",
        "note: --host-policy=cores,cpu-cores=0-1",
    }
    done = run_verb("check", "--strict", *ANY_PORTS, models, "--host-policy=cores,cpu-cores=0-1")
    assert done.returncode == 78
    for line in said:
        assert line.partition(": ")[2] in done.stderr
