"""The command line of delivery is light until it has something to do."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest
from unit.repository.verdict_writer import Verdicts

from edge_server.cli.main import run_command
from edge_server.cli.model_push import copy_progress
from edge_server.repository.content import take_inventory

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("version", ["0", "01", "-1", "x", "1.0", ""])
def test_a_version_is_a_whole_number_from_one(
    version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run_command(["models", "push", str(tmp_path), "--to", "x", f"--version={version}"])
    assert caught.value.code == 2
    assert "a version is a whole number from 1" in capsys.readouterr().err


def test_progress_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    reading, writing = os.pipe()
    with os.fdopen(theirs, "w") as terminal, os.fdopen(writing, "w") as pipe:
        for stream in (pipe, terminal):
            monkeypatch.setattr(sys, "stderr", stream)
            with copy_progress(100 << 20) as progress:
                progress(20 << 20)
                progress(30 << 20)
        terminal.flush()
        shown = ""
        while "50.0/100.0 MiB" not in shown:  # a terminal gives what it has
            shown += os.read(ours, 1000).decode()
    assert os.read(reading, 1000) == b""
    os.close(ours)
    os.close(reading)


@pytest.fixture
def candidate(tmp_path: Path) -> Path:
    """A repository with a lane model, and with a candidate for its place."""
    repository = tmp_path / "models"
    for name in ("lanes", "candidate"):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(
            f'name: "{name}"\nbackend: "identity"\n# of {name}\n'
            'input { name: "candidate" data_type: TYPE_FP32 dims: 1 }\n'
            'output { name: "y" data_type: TYPE_FP32 dims: 1 }\n'
        )
    return repository


def promote(repository: Path, *flags: str) -> int:
    store = str(repository.with_name("store"))
    arguments = ["candidate", f"--to={repository}", f"--store={store}", "--no-wait", *flags]
    return run_command(["models", "promote", *arguments])


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (None, "the daemon has compared nothing of it"),
        ("watching: 7 of 200 frames", "watching: 7 of 200 frames"),
        ("worse: in 90 frames: missed lines 0.4", "worse: in 90 frames"),
    ],
)
def test_a_candidate_without_a_good_verdict_is_not_promoted_unless_forced(
    candidate: Path, capsys: pytest.CaptureFixture[str], found: str | None, why: str
) -> None:
    store = candidate.with_name("store")
    store.mkdir()
    digest = take_inventory(candidate, "candidate").content.digest
    verdicts = Verdicts(store, [candidate])
    if found is not None:
        verdicts.serves("candidate", digest, on_trial=False)
        verdicts.compared("candidate", found, "lanes")
    assert promote(candidate) == 1
    assert f"candidate: no good verdict: {why}" in capsys.readouterr().err
    assert "# of lanes" in (candidate / "lanes/config.pbtxt").read_text()
    assert promote(candidate, "--force", "--as=lanes") == 0
    assert "# of candidate" in (candidate / "lanes/config.pbtxt").read_text()


def test_a_good_candidate_takes_the_place_of_the_model_that_it_was_compared_with(
    candidate: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = candidate.with_name("store")
    store.mkdir()
    digest = take_inventory(candidate, "candidate").content.digest
    verdicts = Verdicts(store, [candidate])
    verdicts.serves("candidate", digest, on_trial=False)
    verdicts.compared("candidate", "good: in 700 frames", "lanes")
    assert promote(candidate) == 0
    text = (candidate / "lanes/config.pbtxt").read_text()
    # Its own name, and no other: an input may be called as the candidate is.
    assert text.startswith('name: "lanes"\n')
    assert 'input { name: "candidate"' in text
    assert (candidate / "candidate").is_dir()
    # The verdict is on that content alone.
    (candidate / "candidate/labels.txt").write_text("another")
    assert promote(candidate) == 1
