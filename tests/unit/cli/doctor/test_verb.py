"""The verb is light until it runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from edge_server.cli.main import run_command


def test_help_imports_nothing_heavy_and_tells_the_exit_codes() -> None:
    code = (
        "import sys\n"
        "from edge_server.cli.main import run_command\n"
        "try: run_command(['doctor', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'grpc', 'cv2', 'paho', 'msgspec', 'ctypes'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "0 no fault" in done.stdout
    assert "1 at least one fault" in done.stdout


def test_the_matrix_is_told_without_looking_at_the_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(["doctor", "--matrix"]) == 0
    assert "TensorRT" in capsys.readouterr().out


def test_a_mistyped_flag_is_a_usage_error_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command(["doctor", "--jsno"])
    assert ended.value.code == 2
    assert "did you mean --json?" in capsys.readouterr().err
