"""Files that a kernel or a boot makes: short, and not there where the thing itself is not."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_MOST_BYTES = 64 * 1024


def read_text(path: Path) -> str | None:
    """What `path` says, without space and NUL around it; None where it cannot be read.

    A sensor that is switched off is a file that cannot be read, too.
    """
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace").strip("\0 \n\t")
    except OSError:
        return None


def read_number(path: Path) -> int | None:
    """The whole number in `path`; None where there is none."""
    text = read_text(path) or ""
    try:
        return int(text)
    except ValueError:
        return None


def is_there(path: Path) -> bool:
    """Whether `path` leads to something; not, where nobody may look."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def is_directory(path: Path) -> bool:
    """Whether `path` leads to a directory; not, where nobody may look."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError:
        return False


def listed(directory: Path, pattern: str) -> list[Path]:
    """What fits `pattern` in `directory`, in the order of people: video2 before video10."""
    try:
        found = list(directory.glob(pattern))
    except OSError:
        return []
    return sorted(found, key=lambda path: (len(path.name), str(path)))
