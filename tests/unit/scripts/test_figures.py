"""docs/figures.md: a figure has the values, the commit and the date of the run that gave it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import record
import reference_pages

if TYPE_CHECKING:
    from pathlib import Path


def result(text: str, **more: object) -> str:
    figures = [{"figure": "start", "value": text}]
    given = {"command": "b.py", "commit": "c0ffee00", "date": "2026-01-02", "machine": "a PC"}
    return json.dumps({**given, "values": {}, "figures": figures, **more})


def test_a_run_replaces_what_was_measured_and_keeps_what_people_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path / "benchmarks/results")
    monkeypatch.setattr("sys.argv", [str(tmp_path / "benchmarks/b.py"), "--runs=5", "--record=it"])
    for module, name in ((record, "_output"), (record, "_machine")):
        monkeypatch.setattr(module, name, lambda *_: "said")
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    path = tmp_path / "benchmarks/results/it.json"
    path.write_text(result("{READY_s_p50:.1f} s"))
    record.record("it", {"READY s p50": 1.25, "not measured": float("nan")})
    kept = json.loads(path.read_text())
    assert kept["values"] == {"READY_s_p50": 1.25}
    assert kept["command"] == "benchmarks/b.py --runs=5"
    assert (kept["commit"], kept["machine"]) == ("said", "said")
    assert kept["figures"] == [{"figure": "start", "value": "{READY_s_p50:.1f} s"}]
    monkeypatch.setattr(reference_pages, "RESULTS", path.parent)
    assert "| start | 1.2 s | `benchmarks/b.py --runs=5` |" in reference_pages.figures_page()


def test_the_page_names_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_pages, "RESULTS", tmp_path)
    (tmp_path / "new.json").write_text(result("1 s"))
    (tmp_path / "old.json").write_text(result("2 s", date="2025-12-31"))
    assert "The oldest are of 2025-12-31: `old`." in reference_pages.figures_page()


def test_a_text_without_a_place_for_the_new_values_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_pages, "RESULTS", tmp_path)
    (tmp_path / "it.json").write_text(result("0.9 s", values={"READY_s_p50": 1.25}))
    with pytest.raises(SystemExit, match=r"it\.json: no value has a place in “0\.9 s”"):
        reference_pages.figures_page()
