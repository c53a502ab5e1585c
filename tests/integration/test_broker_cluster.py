"""A fleet on three nodes of NATS that are cut off, killed, filled and restarted: no event is lost
or out of order, and a vehicle has its own topics alone.

With more vehicles, and what it costs: `python benchmarks/fleet_broker.py`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "fleet_broker.py"
LIMIT_S = 900.0


@pytest.mark.long
@pytest.mark.serial
def test_no_event_is_lost_whatever_happens_to_the_nodes() -> None:
    if not shutil.which("nats-server", path=f"{os.environ.get('PATH', '')}:/usr/sbin"):
        pytest.skip("no nats-server on this machine: apt install nats-server")
    own = ["unshare", "--net", "--mount", "--pid", "--fork", "ip", "link", "set", "lo", "up"]
    if subprocess.run(own, capture_output=True, check=False).returncode:
        pytest.skip("no network of its own is allowed here: run as root")
    command = [sys.executable, str(BENCHMARK), "--vehicles=8", "--lanes=4", "--faults"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin"},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "a vehicle has its own topics alone" in done.stdout
    assert " events: 0 lost, 0 out of order, " in done.stdout
