"""The command line is light, and each kind of failure has its exit code."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from edge_server.cli import run_command

if TYPE_CHECKING:
    from pathlib import Path


def test_help_imports_neither_numpy_nor_grpc() -> None:
    code = (
        "import sys\n"
        "from edge_server.cli import run_command\n"
        "try: run_command(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'grpc', 'cv2', 'paho', 'msgspec', 'google'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "exit codes:" in done.stdout


def test_a_wrong_flag_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as caught:
        run_command(["run", "--grpc-prot", "1"])
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["check", "--config", "/nowhere.toml"], 78, "/nowhere.toml: cannot be read"),
        (["check", "--model-repository", "/nowhere"], 78, "model repository cannot be read"),
        (["check", "--camera", "front"], 78, "give it as NAME=URI"),
        (["check", "--mqtt", "host:port"], 78, "give it as HOST or HOST:PORT"),
        (["check", "--model-control-mode", "poll"], 78, "repository.mode: Invalid enum value"),
    ],
)
def test_each_kind_of_failure_has_its_exit_code(
    arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(arguments) == code
    assert says in capsys.readouterr().err


def test_check_passes_an_empty_repository(tmp_path: Path) -> None:
    assert run_command(["check", "--model-repository", str(tmp_path)]) == 0
