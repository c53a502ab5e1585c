"""The daemon needs no writable file system but its own three directories."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from support.free_ports import free_ports
from support.waiting import wait_until

MODELS = Path(__file__).parents[2] / "models"
TIMEOUT_S = 60.0
# The root is read-only in a mount namespace of its own; systemd's directories are in memory.
_SCRIPT = """
set -e
mount --make-rprivate /
mount -t tmpfs none "$0"
mkdir "$0/state" "$0/run" "$0/cache"
cp -r "$1" "$0/run/models"
mount -o remount,bind,ro /
! touch /read_only_root_is_writable 2>/dev/null
export STATE_DIRECTORY="$0/state" TMPDIR="$0/cache" CUDA_CACHE_PATH="$0/cache" HOME=/nonexistent
shift
exec "$@"
"""


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_lanes_come_and_state_is_kept_on_a_read_only_root(tmp_path: Path, mode: str) -> None:
    if os.geteuid():
        pytest.skip("a mount namespace needs root")
    own = tmp_path / "own"
    own.mkdir()
    grpc, metrics = free_ports(2)
    run = [sys.executable, "-m", "edge_server", "run", f"--grpc-port={grpc}"]
    run += [f"--metrics-port={metrics}", "--http-port=0", f"--grpc-socket={own}/run/grpc.sock"]
    run += [f"--model-repository={own}/run/models", f"--model-control-mode={mode}"]
    run += ["--camera=road=synthetic://road?seed=7&fps=4"]
    command = ["unshare", "-m", "sh", "-c", _SCRIPT, str(own), str(MODELS), *run]
    with (tmp_path / "log").open("w") as log:
        daemon = subprocess.Popen(
            command, stderr=log, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        )
    try:
        log = (tmp_path / "log").read_text
        wait_until(
            lambda: daemon.poll() is not None or "ready, " in log(), TIMEOUT_S, otherwise=log
        )
        assert daemon.poll() is None, log()
        name = f"http://127.0.0.1:{metrics}/metrics"
        wait_until(lambda: _lanes(name) >= 5, TIMEOUT_S, otherwise=log, every_s=0.1)
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(TIMEOUT_S) == 0
    finally:
        daemon.kill()
        daemon.wait()
    said = (tmp_path / "log").read_text()
    assert "Read-only" not in said
    assert "WARNING" not in said.replace("clock", ""), said


def _lanes(url: str) -> float:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310 - a loopback address
        for line in answer.read().decode().splitlines():
            if line.startswith("edge_end_to_end_latency_seconds_count"):
                return float(line.rpartition(" ")[2])
    return 0.0
