"""What only a process of its own shows: what is imported, what signals do, what libc is set to."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_HEAVY = "heavy = {'numpy', 'grpc', 'cv2', 'paho', 'msgspec', 'google'} & set(sys.modules)\n"


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "heavy", "lines"),
    [
        (["plan", "build"], "'numpy', 'msgspec', 'google', 'tensorrt', 'onnxruntime'", []),
        (
            ["doctor"],
            "'numpy', 'grpc', 'cv2', 'paho', 'msgspec', 'ctypes'",
            ["0 no fault", "1 at least one fault"],
        ),
        (["status"], "'numpy', 'grpc', 'cv2', 'msgspec', 'prometheus_client'", ["examples:"]),
        (["infer"], "'numpy', 'grpc', 'cv2', 'msgspec'", ["examples:"]),
    ],
)
def test_the_help_of_a_verb_imports_nothing_heavy(
    arguments: list[str], heavy: str, lines: list[str]
) -> None:
    done = python(
        "import sys\n"
        "from edge_server.cli.main import run_command\n"
        f"try: run_command({[*arguments, '--help']})\n"
        "except SystemExit: pass\n"
        f"heavy = {{{heavy}}} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    assert done.returncode == 0, done.stderr
    assert all(line in done.stdout for line in lines)


def test_help_imports_neither_numpy_nor_grpc() -> None:
    done = python(
        "import sys\n"
        "from edge_server.cli.main import run_command\n"
        "try: run_command(['--help'])\n"
        "except SystemExit: pass\n"
        f"{_HEAVY}"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    assert done.returncode == 0, done.stderr
    assert "exit codes:" in done.stdout


@pytest.mark.parametrize("verb", ["run", "demo"])
def test_a_signal_is_handled_before_anything_heavy_is_imported(verb: str) -> None:
    done = python(
        "import signal, sys\n"
        "from edge_server.cli.main import run_command\n"
        "def see(*_):\n"
        f"    {_HEAVY}"
        "    sys.exit(f'imported: {heavy}' if heavy else 0)\n"
        "signal.signal = see\n"
        f"run_command(['{verb}'])\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_the_first_signal_requests_a_stop_and_the_second_one_ends_the_process(name: str) -> None:
    done = python(
        "import os, signal\n"
        "from edge_server.cli.run import stop_on_signals\n"
        "stop = stop_on_signals()\n"
        f"os.kill(os.getpid(), signal.{name})\n"
        "assert stop.wait(10)\n"
        "print('asked', flush=True)\n"
        f"os.kill(os.getpid(), signal.{name})\n"
        "signal.pause()\n"
    )
    assert (done.stdout, done.stderr) == ("asked\n", "")
    assert done.returncode == -{"SIGTERM": 15, "SIGINT": 2}[name]


def test_hang_ups_in_quick_succession_do_not_interrupt_each_other() -> None:
    done = python(
        "import signal\n"
        "from edge_server.cli.run import reload_on_signal\n"
        "requested = reload_on_signal()\n"
        # Python handles signals at the first line of each of its own functions.
        "assert not hasattr(signal.getsignal(signal.SIGHUP), '__code__')\n"
        "for _ in range(10_000): signal.raise_signal(signal.SIGHUP)\n"
        "assert requested.wait(10)\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_table_of_sources_imports_no_opencv() -> None:
    code = "import sys, edge_server.cameras.source; sys.exit('cv2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this libc has no mallopt")
def test_glibc_takes_every_number() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from edge_server.process.allocator import keep_large_buffers\n"
            "import sys; sys.exit(0 if keep_large_buffers() else 1)",
        ],
        check=False,
    )
    assert done.returncode == 0
