"""What mkdocs needs beside its configuration: the README as first page, and the files of the
repository that the pages link to: protos, examples, settings."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    for page in pages:  # grows by the pages that are linked to
        text, targets = _relinked(page)
        if not page.is_relative_to(DOCS):
            files.append(File.generated(config, _uri(page), content=text))
        for target in targets:
            if target.is_relative_to(DOCS) or target in pages:
                continue
            if target.suffix == ".md":
                pages.append(target)
            elif files.get_file_from_path(_uri(target)) is None:
                files.append(File.generated(config, _uri(target), abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source = DOCS / page.file.src_uri
    return _relinked(source)[0] if source.exists() else markdown


def _uri(path: Path) -> str:
    """Return where the site has a file of the repository."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    place = path.relative_to(ROOT).as_posix()
    return "index.md" if place == "README.md" else f"repository/{place}"


def _relinked(page: Path) -> tuple[str, list[Path]]:
    """Return a page's text with its links as the site has them, and the files that they lead to.

    A link to a folder becomes its name. One that leads nowhere stays: mkdocs warns of it.
    """
    here = PurePosixPath(_uri(page)).parent
    targets: list[Path] = []

    def link(found: re.Match[str]) -> str:
        target = (page.parent / found[3]).resolve()
        if not target.exists() or not target.is_relative_to(ROOT):
            return found[0]
        if target.is_dir():
            return f"{found[2]} (`{target.relative_to(ROOT)}`)"
        targets.append(target)
        place = os.path.relpath(_uri(target), here)
        return f"{found[1]}[{found[2]}]({place}{found[4] or ''})"

    return _LINK.sub(link, page.read_text()), targets
