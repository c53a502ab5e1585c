"""The arguments of `convert` say what is wrong with them."""

from __future__ import annotations

import pytest

from edge_server.cli.main import run_command


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--input", "x:3xq"], "give it as NAME:SHAPE"),
        (["--input", "x:1x0"], "a size is 1 or more"),
        (["--input", "x:1x3:FP8"], "types are FP16"),
        (["--limit", "2"], "give a share"),
        (["--samples", "0"], "1 or above"),
        (["--to", "tflite"], "invalid choice"),
        (["--int8-operators", "Conv,"], "give names with commas"),
    ],
)
def test_a_wrong_argument_is_named(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run_command(["convert", "net.onnx", "out", *arguments])
    assert caught.value.code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["net"], ["https://host/net/", "--from", "models"]])
def test_a_pull_takes_a_name_with_its_repository_or_a_url(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["models", "pull", *arguments, "--to", "nowhere"]) == 78
    assert "--from" in capsys.readouterr().err
