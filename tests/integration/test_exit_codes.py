"""The command line is light, and each kind of failure has its exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_server.cli.main import run_command

LANES = Path(__file__).parents[2] / "models/laneDetect_model"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["check", "--config", "/nowhere.toml"], 78, "/nowhere.toml: cannot be read"),
        (["check", "--model-repository", "/nowhere"], 69, "model repository cannot be read"),
        (["check", "--camera", "front"], 78, "give it as NAME=URI"),
        (["check", "--camera", "a=x", "--camera", "a=y"], 78, "camera 'a' is given twice"),
        (["check", "--mqtt="], 78, "--mqtt : give it as HOST"),
        (["check", "--mqtt", "host:port"], 78, "--mqtt host:port: give it as HOST"),
        (["demo", "--mqtt", ":1883"], 78, "--mqtt :1883: give it as HOST"),
        (["demo", "--mqtt", "broker:99999"], 78, "--mqtt broker:99999: give it as HOST, HOST:PORT"),
        (["demo", "--mqtt", "broker:0"], 78, "mqtt: port must be 1 to 65535"),
        (["plan", "build", str(LANES), "--fp16", "--int8"], 78, "give one of the two"),
        (["check", "--reuse-http-port=true"], 78, "a second server on the port"),
        (["check", "--load-model=*", "--load-model=a"], 78, "Wildcard model name '*' must be"),
    ],
)
def test_each_kind_of_failure_has_its_exit_code(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(arguments) == code
    assert message in capsys.readouterr().err
