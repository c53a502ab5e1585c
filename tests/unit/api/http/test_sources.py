"""The kernel gives the board's numbers, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from edge_server.api.http.sources import ProcessorUse
from edge_server.board.resources import BoardMemory

if TYPE_CHECKING:
    from pathlib import Path


def write_stat(root: Path, busy: int, idle: int, iowait: int = 0) -> None:
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/stat").write_text(f"cpu  {busy} 0 0 {idle} {iowait} 0 0 0 99 99\ncpu0 1 2\n")


def test_utilization_is_the_busy_share_since_the_last_call(tmp_path: Path) -> None:
    write_stat(tmp_path, busy=100, idle=1000)
    use = ProcessorUse(tmp_path)
    write_stat(tmp_path, busy=125, idle=1050, iowait=25)
    assert use.utilization() == pytest.approx(0.25)
    assert use.utilization() == 0.0


def test_memory_is_in_bytes(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\n"
    )
    assert ProcessorUse(tmp_path).memory() == BoardMemory(1_024_000, 409_600)


@pytest.mark.parametrize("text", [None, "", "nothing here", "MemTotal: x kB"])
def test_a_value_that_the_kernel_does_not_report_is_none(tmp_path: Path, text: str | None) -> None:
    (tmp_path / "proc").mkdir()
    if text is not None:
        for name in ("stat", "meminfo"):
            (tmp_path / "proc" / name).write_text(text)
    use = ProcessorUse(tmp_path)
    assert use.utilization() is None
    assert use.memory().total_bytes is None
