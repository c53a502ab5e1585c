"""Start to READY, and the memory held after it, with the shipped models and a rendered camera.

    python benchmarks/start.py [--runs 5]

READY is heard as systemd hears it. Memory is the process's proportional share (PSS) after 3 s.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import add_option, record

MODELS = Path(__file__).parent.parent / "models"
COMMAND = [
    *(
        sys.executable,
        "-m",
        "edge_server",
        "run",
        "--grpc-port=0",
        "--metrics-port=0",
        "--http-port=0",
    ),
    *("--model-repository", str(MODELS), "--camera", "road=synthetic://road?seed=7&fps=10"),
]


def start_once() -> tuple[float, float]:
    """Seconds to READY, and PSS in MB."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
    ):
        manager.bind(f"{folder}/notify")
        environment = {**os.environ, "NOTIFY_SOCKET": f"{folder}/notify"}
        begun = time.monotonic()
        daemon = subprocess.Popen(COMMAND, env=environment, stderr=subprocess.DEVNULL)
        while b"READY=1" not in manager.recv(4096):
            pass
        ready_s = time.monotonic() - begun
        while time.monotonic() < begun + ready_s + 3.0:
            manager.recv(4096)
        lines = Path(f"/proc/{daemon.pid}/smaps_rollup").read_text().splitlines()
        pss_kb = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        daemon.terminate()
        daemon.wait()
    return ready_s, pss_kb / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    add_option(parser)
    arguments = parser.parse_args()
    runs = [start_once() for _ in range(arguments.runs)]
    found = {}
    for name, values in zip(("READY s", "PSS MB"), zip(*runs, strict=True), strict=True):
        middle, most = statistics.median(values), max(values)
        print(f"{name:8} median {middle:7.2f}  most {most:7.2f}")
        found |= {f"{name} p50": middle, f"{name} max": most}
    record(arguments.record, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
