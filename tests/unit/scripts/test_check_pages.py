"""The pages: code blocks with a language, translations with the same commands, every finding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import check_pages

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_each_fault_of_a_page_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = tmp_path / "docs"
    (docs / "zh-CN").mkdir(parents=True)
    monkeypatch.setattr(check_pages, "ROOT", tmp_path)
    monkeypatch.setattr(check_pages, "DOCS", docs)
    monkeypatch.setattr(check_pages, "TRANSLATIONS", docs / "zh-CN")
    (tmp_path / "README.md").write_text(121 * "line\n")
    (tmp_path / "README.zh-CN.md").write_text("")
    (docs / "start.md").write_text("```\nedge-server status\n```\n```sh\nls   # a\nrm\n```\n")
    (docs / "zh-CN/start.md").write_text("```sh\nls   # b\nedge-server top\n```\n")
    (docs / "troubleshooting.md").write_text("`driver`\n| 69 | ...\n")
    found = list(check_pages.faults())
    for fault in (
        "docs/start.md: a code block names no language: edge-server status",
        "docs/zh-CN/start.md and docs/start.md differ: rm",
        "docs/zh-CN/start.md and docs/start.md differ: edge-server top",
        "docs/troubleshooting.md: does not mention `model_unavailable`",
        "docs/troubleshooting.md: has no row of exit code 78",
        "README.md: 121 lines, more than 120; move some into docs/",
    ):
        assert fault in found
    assert not [fault for fault in found if "`driver`" in fault or "code 69" in fault]
    assert not [fault for fault in found if "differ: ls" in fault]
