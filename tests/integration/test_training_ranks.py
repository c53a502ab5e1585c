"""Processes that torchrun starts train as one does, go on from a checkpoint, and end together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.processes import is_running
from support.waiting import wait_until

torch = pytest.importorskip("torch", reason="training alone needs PyTorch")
pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "training" / "train_lane_model.py"
KNOWN = ROOT / "tests" / "support" / "known_batches.py"
SHIPPED = ROOT / "models" / "laneDetect_model" / "1" / "model.onnx"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def started(processes: int, *arguments: object) -> subprocess.Popen[str]:
    command = TORCHRUN if processes > 1 else (sys.executable,)
    path = os.pathsep.join((str(ROOT), str(ROOT / "training")))
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ran(processes: int, *arguments: object) -> str:
    process = started(processes, *arguments)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    return output


def known(processes: int, steps: int, checkpoint: Path, *more: Path) -> tuple[list[float], Any]:
    """The losses and the checkpoint of steps on known images."""
    output = ran(processes, KNOWN, steps, checkpoint, *more)
    return [float(each) for each in output.splitlines()[-1].split()], torch.load(checkpoint)


def moved(state: Any, begun: Any) -> Any:
    return torch.cat([(each - begun[name]).flatten() for name, each in state["network"].items()])


def test_two_processes_learn_what_one_learns(tmp_path: Path) -> None:
    begun = known(1, 1, tmp_path / "begun.pt", SHIPPED)[1]["network"]
    (losses, one), (shared, two) = (
        known(count, 4, tmp_path / f"{count}.pt", SHIPPED) for count in (1, 2)
    )
    assert shared == pytest.approx(losses, rel=0.01)
    alone, together = moved(one, begun), moved(two, begun)
    assert float((together - alone).norm() / alone.norm()) < 0.1
    assert two["device"] == "the CPU, 2 processes"


def test_normalisation_over_half_a_batch_changes_the_loss_by_noise_alone(tmp_path: Path) -> None:
    (losses, _), (shared, _) = (known(count, 24, tmp_path / f"{count}.pt") for count in (1, 2))
    assert losses[-1] < 0.95 * losses[0]
    assert shared[0] - shared[-1] == pytest.approx(losses[0] - losses[-1], rel=0.3)


def test_a_batch_that_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    process = started(2, SCRIPT, "--batch", 3, "--steps", 1, "--checkpoint", tmp_path / "run.pt")
    assert "--batch 3: give a multiple of 2 processes" in process.communicate()[0]
    assert process.returncode != 0


def of_rank(rank: int, checkpoint: Path) -> int | None:
    """The process that trains as `rank`."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(checkpoint).encode() in command and f"RANK={rank}".encode() in environment:
            return int(folder.name)
    return None


def test_a_killed_process_ends_the_others_and_the_run_goes_on_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    checkpoint = tmp_path / "run.pt"
    run = (SCRIPT, "--batch", 4, "--train-only", "--checkpoint", checkpoint)
    process = started(2, *run, "--minutes", 60, "--save-every", 0.1)
    wait_until(checkpoint.exists, 600)
    ranks = [of_rank(number, checkpoint) for number in (0, 1)]
    assert ranks[0] is not None
    assert ranks[1] is not None
    os.kill(ranks[1], 9)
    output = process.communicate()[0]
    assert process.returncode != 0
    assert "exitcode  : -9" in output
    wait_until(lambda: not is_running(ranks[0] or 0))

    step = torch.load(checkpoint)["step"]
    for processes, steps in ((2, step + 2), (1, step + 3)):
        ran(processes, *run, "--steps", steps)
        assert torch.load(checkpoint)["step"] == steps
