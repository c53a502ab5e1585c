"""A GPU that is lost ends the daemon with its own exit code; systemd starts it anew.

The driver is simulated, the daemon is a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from support.simulated_gpu import SimulatedGpu

TIMEOUT_S = 60.0

# As a request's thread would: nobody of the daemon sees what it caught.
DAEMON = """
import contextlib, sys, threading
import edge_server.daemon.daemon
from edge_server.cli.main import run_command
from edge_server.errors import DeviceLost
from edge_server.gpu.memory import DeviceMemory
from edge_server.gpu.stream import Module, Stream

class Daemon(edge_server.daemon.daemon.Daemon):
    def start(self, stop):
        super().start(stop)
        threading.Thread(target=self.request).start()

    def request(self):
        device = self.devices.gpu(0)
        stream, memory = Stream(device), DeviceMemory(device, 64)
        kernel = Module(device, b"").kernel("resize", "P")
        with contextlib.suppress(DeviceLost):
            while True:
                stream.launch(kernel, (1,), (1,), memory)
                stream.synchronize()

edge_server.daemon.daemon.Daemon = Daemon
sys.exit(run_command(["run", *sys.argv[1:]]))
"""


def test_the_daemon_ends_with_its_own_exit_code_when_any_thread_meets_a_lost_gpu(
    simulated_libcuda: SimulatedGpu, tmp_path: Path
) -> None:
    daemon = tmp_path / "daemon.py"
    daemon.write_text(DAEMON)
    (tmp_path / "models").mkdir()
    ports = ["--grpc-port", "0", "--metrics-port", "0", "--http-port", "0"]
    done = subprocess.run(
        [sys.executable, str(daemon), "--model-repository", str(tmp_path / "models"), *ports],
        env=simulated_libcuda.environment("fail=kernel:719:3"),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 86, done.stderr
    assert (
        "edge-server: GPU 0: synchronize: cuEventSynchronize failed: unspecified launch failure "
        "(CUDA error 719): the process must be restarted"
    ) in done.stderr
    assert "Traceback" not in done.stderr
