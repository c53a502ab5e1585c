"""`check` finds what `run` would trip over, all of it in one go."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from unit.cli.test_check import IDENTITY, check_with, checked

if TYPE_CHECKING:
    from pathlib import Path

    from support.model_folders import WriteModel


# Any port: the usual ones may be taken on this machine.
PORTS: dict[str, Any] = {"grpc": {"port": 0}, "metrics": {"port": 0}}


def test_a_model_that_may_load_next_time_is_unavailable_and_none_where_the_start_goes_on(
    repository: Path, write_model: WriteModel
) -> None:
    folder = write_model("flaky", IDENTITY.replace("identity", "python"))
    (folder / "1" / "model.py").write_text(
        "class TritonPythonModel:\n    def initialize(self, args):\n        raise OSError('busy')\n"
    )
    settings = {"paths": [str(repository)]}
    findings = checked(repository=settings)
    (reported,) = findings.unavailable
    assert "flaky" in reported
    assert not findings.faults
    findings = checked(repository={**settings, "exit_on_error": False})
    assert not findings.unavailable + findings.faults
    (line,) = findings.well
    assert line.startswith("warning: ")
    assert line.endswith("; the daemon goes on without it")


def test_a_broker_that_is_away_is_a_warning(repository: Path, write_model: WriteModel) -> None:
    write_model("echo", IDENTITY)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    model, broker = check_with(repository, mqtt={"host": "127.0.0.1", "port": port})
    assert model == "model echo version 1: READY, config.pbtxt on CPU"
    assert broker.startswith(f"warning: mqtt 127.0.0.1:{port}: Connection refused; ")


def test_a_taken_port_is_reported(repository: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as grpc,
        socket.create_server(("127.0.0.1", 0)) as metrics,
    ):
        ports = [each.getsockname()[1] for each in (grpc, metrics)]
        findings = checked(
            repository={"paths": [str(repository)]},
            grpc={"port": ports[0]},
            metrics={"port": ports[1]},
        )
    told_grpc, told_metrics = findings.unavailable
    assert told_grpc.startswith(f"gRPC cannot listen on 127.0.0.1:{ports[0]}: Address already in")
    assert told_metrics.startswith(f"metrics cannot listen on 127.0.0.1:{ports[1]}: Address alr")
