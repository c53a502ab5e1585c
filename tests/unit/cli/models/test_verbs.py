"""The command line of delivery is light until it has something to do."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from edge_server.cli.main import run_command
from edge_server.cli.model_push import Progress

if TYPE_CHECKING:
    from pathlib import Path


def test_help_names_each_verb_and_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        run_command(["models", "--help"])
    text = capsys.readouterr().out
    for word in (
        "push",
        "accept",
        "pull",
        "list",
        "verify",
        "rollback",
        "release",
        "sign",
        "keygen",
        "exit codes: 0",
    ):
        assert word in text


@pytest.mark.parametrize("version", ["0", "01", "-1", "x", "1.0", ""])
def test_a_version_is_a_whole_number_from_one(
    version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run_command(["models", "push", str(tmp_path), "--to", "x", f"--version={version}"])
    assert caught.value.code == 2
    assert "a version is a whole number from 1" in capsys.readouterr().err


def test_progress_is_shown_on_a_terminal_only_and_only_of_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = os.openpty()
    reading, writing = os.pipe()
    now = [0.0]

    def copy(*sizes: int) -> None:
        with Progress(100 << 20, lambda: now[0]) as progress:
            for size in sizes:
                now[0] += 1.0
                progress(size << 20)

    with os.fdopen(theirs, "w") as terminal, os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        copy(20, 20)
        monkeypatch.setattr(sys, "stderr", terminal)
        copy(1, 1)
        copy(20, 30)
        terminal.flush()
        shown = ""
        while shown.count("\033[K") < 3:  # a terminal gives what it has
            shown += os.read(ours, 1000).decode()
    assert shown == "\r\033[K20 of 100 MiB, 20 MiB/s\r\033[K50 of 100 MiB, 25 MiB/s\r\033[K"
    assert os.read(reading, 1000) == b""
    os.close(ours)
    os.close(reading)
