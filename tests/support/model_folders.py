"""What writes models for a test."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path


class WriteModel(Protocol):
    def __call__(self, name: str, config: str, version: int = 1) -> Path: ...


def write_manifest(folder: Path, name: str) -> None:
    """Write manifest.json for `folder` as it is."""
    files = {
        str(path.relative_to(folder)): {
            "sha256": sha256(path.read_bytes()).hexdigest(),
            "size": path.stat().st_size,
        }
        for path in folder.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    text = json.dumps({"format": 1, "model": name, "files": files})
    (folder / "manifest.json").write_text(text)
