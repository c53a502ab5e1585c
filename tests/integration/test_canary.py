"""Good models stay and bad ones go back, on a busy machine and whatever clients send.

The same at full size: `python benchmarks/canary.py`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "canary.py"
TIMEOUT_S = 1200


pytestmark = [pytest.mark.serial, pytest.mark.long]


def test_good_models_stay_and_bad_ones_go_back_under_bursts_of_work() -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--good", "2", "--bad", "5", "--load", "bursts"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=BENCHMARK.parent,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "good        2: 2 kept" in done.stdout
