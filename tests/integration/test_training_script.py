"""A training run says what it lacks before it begins, and learns from what it was given."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from unit.training.test_training_material import TRAINING, drive

if TYPE_CHECKING:
    from pathlib import Path


def train(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    # As where PyTorch is not installed.
    code = (
        "import runpy, sys; sys.modules['torch'] = None\n"
        f"sys.argv[0] = {str(TRAINING / 'train_lane_model.py')!r}\n"
        f"sys.path.insert(0, {str(TRAINING)!r})\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_help_needs_no_pytorch_and_out_is_not_the_shipped_model() -> None:
    done = train("--help")
    assert done.returncode == 0, done.stderr
    assert "TuSimple's form" in done.stdout
    assert "models/laneDetect_model" not in "".join(done.stdout.split())
    assert "build/laneDetect_model" in "".join(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--data", "/nowhere"], "--data /nowhere: no such folder"),
        (["--data", "{tmp}"], "labels.jsonl: is missing; give a folder of the layout in docs"),
        (["--labels", "/nowhere"], "/nowhere: no such file"),
        (["--images", "{tmp}"], "--images: give --labels too"),
        (["--data", "{tmp}", "--labels", "{labels}"], "--data: give it alone"),
        (["--labels", "{labels}", "--images", "{tmp}"], "0.png: is missing; --images is the"),
        (["--labels", "{wrong}"], "wrong.jsonl:1: is no label; give"),
        (["--labels", "{labels}", "--held-out", "1"], "--held-out 1: give a share"),
        (["--export-only", "--checkpoint", "/nowhere"], "/nowhere: no such file; train first"),
        (["--labels", "{labels}"], "pip install '.[train,onnxruntime]'"),
    ],
)
def test_what_is_missing_is_told_before_pytorch_is_wanted(
    tmp_path: Path, arguments: list[str], says: str
) -> None:
    labels = drive(tmp_path / "drive", 5)
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"raw_file": "a.png", "h_samples": [1, 2], "lanes": [[1]]}')
    places: dict[str, Any] = {"tmp": tmp_path, "labels": labels, "wrong": wrong}
    done = train(*(each.format(**places) for each in arguments))
    assert done.returncode != 0
    assert says in done.stderr
