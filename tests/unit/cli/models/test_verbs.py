"""The command line of delivery is light until it has something to do."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from edge_server.cli.main import run_command
from edge_server.cli.model_push import copy_progress

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
