"""Shells complete every verb and every flag that the help shows."""

from __future__ import annotations

import pytest

from edge_server.cli.main import run_command
from edge_server.cli.verbs import SHELLS


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_completes_verbs_flags_and_files(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("status", "bench", "instances", "model-repository", "keygen", "grpc-port"):
        assert word in script
    assert "http-thread-count" not in script
    assert {"bash": "_shtab_compgen_files", "zsh": ":_files", "fish": "__fish_complete_path"}[
        shell
    ] in script


def test_the_script_is_the_same_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    run_command(["completion", "bash"])
    first = capsys.readouterr().out
    run_command(["completion", "bash"])
    assert capsys.readouterr().out == first


def test_another_shell_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command(["completion", "csh"])
    assert ended.value.code == 2
    assert "invalid choice: 'csh'" in capsys.readouterr().err
