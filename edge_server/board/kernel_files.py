"""Read short files of the kernel, which are absent where the device is absent."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_MOST_BYTES = 64 * 1024


def read_text(path: Path) -> str | None:
    """Return the text of `path`, without surrounding space and NUL; None where it cannot be read.

    The file of a sensor that is switched off cannot be read either.
    """
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace").strip("\0 \n\t")
    except OSError:
        return None


def read_number(path: Path) -> int | None:
    """Return the whole number in `path`; None if the file holds none."""
    text = read_text(path) or ""
    try:
        return int(text)
    except ValueError:
        return None


def is_there(path: Path) -> bool:
    """Return whether `path` exists; False where access is denied."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def is_directory(path: Path) -> bool:
    """Return whether `path` is a directory; False where access is denied."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError:
        return False


def listed(directory: Path, pattern: str) -> list[Path]:
    """Return the matches of `pattern` in `directory`, in natural order: video2 before video10."""
    try:
        found = list(directory.glob(pattern))
    except OSError:
        return []
    return sorted(found, key=lambda path: (len(path.name), str(path)))
