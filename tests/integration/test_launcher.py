"""What a line of tritonserver did on somebody's device, `edge-server run` does."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.verb import ANY_PORTS, run_verb

if TYPE_CHECKING:
    from collections.abc import Callable

    import tritonclient.grpc as triton
    from support.daemon_process import Process

MODELS = Path(__file__).parents[2] / "models"


@pytest.fixture
def one_broken(tmp_path: Path) -> Path:
    models = Path(shutil.copytree(MODELS, tmp_path / "models"))
    (models / "lane_decode" / "config.pbtxt").write_text("no config")
    return models


def test_a_usual_line_of_tritonserver_serves(
    start: Callable[..., Process], client: Callable[..., triton.InferenceServerClient]
) -> None:
    process = start(
        f"--model-store={MODELS}",
        *("--model-control-mode", "none", "--exit-on-error", "true", "--strict-readiness=1"),
        *("--allow-http=false", "--allow-metrics=true", "--metrics-interval-ms=2000"),
        *("--backend-directory=/opt/tritonserver/backends", "--id", "orin-7"),
        *("--backend-config=tensorrt,version-compatible=true", "--log-verbose=0"),
        *("--pinned-memory-pool-byte-size=268435456", "--cuda-memory-pool-byte-size=0:67108864"),
        *("--grpc-infer-allocation-pool-size=16", "--exit-timeout-secs=5"),
        *("--grpc-keepalive-time=10000", "--strict-model-config=false", "--trace-config=rate=7"),
    )
    server = client(process)
    assert server.get_trace_settings().settings["trace_rate"].value == ["7"]
    assert server.is_server_ready()
    assert server.get_server_metadata().name == "orin-7"
    assert process.terminate() == 0
    told = process.log.read_text()
    for flag in (
        "--backend-config=tensorrt,version-compatible=true has no effect: ",
        "--pinned-memory-pool-byte-size=268435456 has no effect: ",
        "--strict-model-config is deprecated: ",
    ):
        assert told.count(flag) == 1


def test_a_broken_model_may_be_let_pass(
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
    one_broken: Path,
) -> None:
    server = client(start("--model-repository", str(one_broken), "--exit-on-error=false"))
    assert server.is_server_live()
    assert not server.is_server_ready()
    states = {model.name: model.state for model in server.get_model_repository_index().models}
    assert (states["lane_decode"], states["laneDetect_model"]) == ("UNAVAILABLE", "READY")


def test_readiness_that_is_not_strict_is_that_of_the_server(
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
    one_broken: Path,
) -> None:
    flags = ("--exit-on-error=false", "--strict-readiness=false")
    assert client(start("--model-repository", str(one_broken), *flags)).is_server_ready()


def test_without_grpc_nobody_listens_there(start: Callable[..., Process]) -> None:
    process = start("--model-repository", str(MODELS), "--allow-grpc=false")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", process.port))
    assert process.terminate() == 0


def test_the_log_goes_where_and_how_it_was_set_and_clients_can_read_it(
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
    tmp_path: Path,
) -> None:
    path = tmp_path / "chosen.log"
    process = start(
        f"--model-repository={MODELS}",
        f"--log-file={path}",
        "--log-format=ISO8601",
        "--log-info=false",
        "--pinned-memory-pool-byte-size=1",
    )
    told = client(process).get_log_settings().settings
    assert not told["log_info"].bool_param
    assert told["log_format"].string_param == "ISO8601"
    assert told["log_file"].string_param == str(path)
    assert process.terminate() == 0
    (line,) = path.read_text().splitlines()
    assert line[10] == "T"
    assert line[19:].startswith("Z W --pinned-memory-pool-byte-size=1 has no effect: ")
    assert process.log.read_text() == ""


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--http-address=0.0.0.0"], "http: 0.0.0.0 is beyond the loopback"),
        (["--grpc-address=0.0.0.0"], "0.0.0.0 is beyond the loopback"),
        (["--metrics-address=0.0.0.0"], "0.0.0.0 is beyond the loopback"),
        (["--grpc-use-ssl=true"], "TLS needs certificate and key (of gRPC: --grpc-server-cert"),
        (
            ["--grpc-use-ssl=true", "--grpc-server-cert=/nowhere.pem", "--grpc-server-key=/k.pem"],
            "grpc.tls.certificate: /nowhere.pem: cannot be read: No such file or directory",
        ),
    ],
)
def test_what_cannot_be_done_ends_with_78_and_the_remedy(flags: list[str], says: str) -> None:
    assert says in _refused(flags, 78)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--log-file=/nowhere/log"], "log.file: /nowhere/log: cannot be written: No such file"),
        (["--grpc-socket=/nowhere/grpc.sock"], "grpc.socket: /nowhere: No such file or directory"),
        (
            ["--trace-config=triton,file=/nowhere/trace"],
            "trace.file: /nowhere/trace: No such file or directory",
        ),
        (
            ["--model-control-mode=poll", "--repository-copies=/proc/nowhere"],
            "model store /proc/nowhere: No such file or directory",
        ),
    ],
)
def test_a_place_that_may_be_mounted_later_ends_with_69(flags: list[str], says: str) -> None:
    assert says in _refused(flags, 69)


def _refused(flags: list[str], code: int) -> str:
    """What `run` says with these flags, which ends with `code`."""
    done = run_verb("run", f"--model-repository={MODELS}", *ANY_PORTS, *flags)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    return done.stderr
