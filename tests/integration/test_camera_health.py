"""Real roads by day, by night, through a tunnel and parked are well; made faults are found.

At full length: `python benchmarks/camera_health.py`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLIPS = ROOT.parent / "shared" / "data" / "lanes" / "clips"
BENCHMARK = ROOT / "benchmarks" / "camera_health.py"
TIMEOUT_S = 600


@pytest.mark.skipif(not CLIPS.is_dir(), reason=f"no road clips in {CLIPS}")
@pytest.mark.parametrize(
    ("scenes", "count"),
    [
        pytest.param("960x540: raw", 4, marks=pytest.mark.long),
        pytest.param("960x540: night", 2, marks=pytest.mark.long),
        ("960x540: tunnel", 1),
        ("960x540: lower half covered", 1),
        pytest.param(
            "960x540: H.264",
            11,
            # Half a minute, most of it the encoder's.
            marks=(
                pytest.mark.long,
                pytest.mark.skipif(
                    shutil.which("gst-launch-1.0") is None, reason="gst-launch-1.0 is missing"
                ),
            ),
        ),
    ],
)
def test_good_scenes_are_well_and_faults_are_found(scenes: str, count: int) -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--json", "--seconds", "8", "--only", scenes],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout)
    assert len(results) == count
    for result in results.values():
        assert result["frames"] == 200
        if result["fault"]:
            assert result["detected_s"] <= 2.0
