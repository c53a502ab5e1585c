"""Fingerprints of a model's files, to detect a change since the load."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# (path, size in bytes, mtime in ns, inode, ctime in ns) of every file of a model; -1 for a value
# that cannot be read. Fingerprints are compared for equality only: a clock that was set back and an
# older file copied over a newer one are changes, too.
Fingerprint = frozenset[tuple[str, int, int, int, int]]


def fingerprint(directory: Path) -> Fingerprint:
    """Return the fingerprint of the files below `directory`; links are followed once.

    Leftovers of editors and Python do not count.
    """
    return frozenset(_files(str(directory), "", set()))


def content_fingerprint(directory: Path) -> Fingerprint:
    """Return the fingerprint by content, for a copy that never changes: equal for equal files."""
    return frozenset(
        (path, size, 0, _content(directory / path) if inode else 0, 0)
        for path, size, _, inode, _ in fingerprint(directory)
    )


def _content(path: Path) -> int:
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            sha256.update(piece)
    return int.from_bytes(sha256.digest()[:8], "big")


def _files(
    root: str, below: str, seen: set[tuple[int, int]]
) -> Iterator[tuple[str, int, int, int, int]]:
    directory = os.path.join(root, below)  # noqa: PTH118 - a Path per file would cost as much again
    try:
        status = os.stat(directory)  # noqa: PTH116
        entries = list(os.scandir(directory))
    except OSError:
        yield below, -1, -1, -1, -1
        return
    if (status.st_dev, status.st_ino) in seen:
        return
    seen.add((status.st_dev, status.st_ino))
    for entry in entries:
        if entry.name.startswith(".") or entry.name.endswith("~") or entry.name == "__pycache__":
            continue
        path = f"{below}/{entry.name}".lstrip("/")
        try:
            if entry.is_dir():
                # An empty version directory counts, too.
                yield path, 0, 0, 0, 0
                yield from _files(root, path, seen)
                continue
            status = entry.stat()
        except OSError:
            yield path, -1, -1, -1, -1
        else:
            yield path, status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns
