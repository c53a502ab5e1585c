"""Hold the pages against each other and the code, beyond what mkdocs sees.

python scripts/check_pages.py

Every code block names its language; a translated page has the commands of the page that it
translates; the troubleshooting page has every finding of the doctor, every exit code and every
ERROR_ID; README.md stays short.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.board.doctor.examination import CHECKS
from edge_server.cli.verbs import EXIT_CODES
from edge_server.process.logs import ENDING, EVENTS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TRANSLATIONS = DOCS / "zh-CN"
README_LINES = 120
_BLOCK = re.compile(r"^ *```(\S*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"(?m)(^| +)#.*$")


def faults() -> Iterator[str]:
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("*/*/README.md")]
    for page in sorted(pages):
        for block in _BLOCK.finditer(page.read_text()):
            if not block[1]:
                first = block[2].partition("\n")[0]
                yield f"{page.relative_to(ROOT)}: a code block names no language: {first}"
    translated = {page: DOCS / page.name for page in TRANSLATIONS.glob("*.md")}
    translated[ROOT / "README.zh-CN.md"] = ROOT / "README.md"
    for page, original in sorted(translated.items()):
        for command in sorted(_commands(page) ^ _commands(original)):
            yield f"{page.relative_to(ROOT)} and {original.relative_to(ROOT)} differ: {command}"
    trouble = (DOCS / "troubleshooting.md").read_text()
    for name in (*CHECKS, *(error_id for error_id, *_ in EVENTS), *ENDING):
        if f"`{name}`" not in trouble:
            yield f"docs/troubleshooting.md: does not mention `{name}`"
    for code in sorted(set(EXIT_CODES.values()) - {0, 1}):
        if f"\n| {code}" not in trouble:
            yield f"docs/troubleshooting.md: has no row of exit code {code}"
    if (lines := (ROOT / "README.md").read_text().count("\n")) > README_LINES:
        yield f"README.md: {lines} lines, more than {README_LINES}; move some into docs/"


def _commands(page: Path) -> set[str]:
    """Return the lines of a page's code blocks without comments, which are translated."""
    blocks = (block[2] for block in _BLOCK.finditer(page.read_text()))
    lines = (_COMMENT.sub("", line).strip() for block in blocks for line in block.splitlines())
    return set(filter(None, lines))


def main() -> None:
    if found := list(faults()):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
