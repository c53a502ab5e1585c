"""Every example does what it says, against a real daemon."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.daemon_process import Process

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A daemon with what the examples need; each leaves its models as it found them."""
    process = Process(
        tmp_path_factory.mktemp("examples"),
        f"--model-repository={EXAMPLES / 'models'}",
        "--model-control-mode=explicit",
        "--load-model=*",
        "--allow-client-shm=true",
    )
    try:
        process.wait_for("READY=1")
        yield process
    finally:
        process.close()


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs(example: Path, process: Process) -> None:
    done = subprocess.run(
        [
            *("timeout", "--signal=ABRT", "60"),  # one that hangs tells where
            *(sys.executable, "-X", "faulthandler", "-W", "error"),
            *(str(example), f"127.0.0.1:{process.port}"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{process.log.read_text()}"
    assert done.stdout
