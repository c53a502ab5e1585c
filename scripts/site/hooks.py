"""What mkdocs needs beside its configuration: the README as first page, and links out of docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    text = (ROOT / "README.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=_outside(text, ROOT)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = ROOT / "docs" / Path(page.file.src_uri).parent
    return markdown if page.file.src_uri == "index.md" else _outside(markdown, folder)


def _outside(text: str, folder: Path) -> str:
    """Return `text` with names in the place of links to files of the repository that no page is."""

    def name(link: re.Match[str]) -> str:
        target = (folder / link[3]).resolve()
        in_docs = (ROOT / "docs" / link[3]).resolve() if folder == ROOT else target
        if in_docs.is_relative_to(ROOT / "docs") and in_docs.suffix != ".json" and in_docs.exists():
            return link[0]
        if not (target if target.exists() else in_docs).exists():
            return link[0]  # mkdocs warns of it
        return f"{link[2]} (`{target.relative_to(ROOT)}`)" if "/" in link[3] else f"`{link[2]}`"

    return _LINK.sub(name, text)
