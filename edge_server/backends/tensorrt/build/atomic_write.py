"""Files that are there whole or not at all, also after a power cut."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def atomic_write(path: Path, data: bytes) -> None:
    """Returns when `path` has `data` for good; until then it has what it had.

    Raises:
        OSError: it could not be written, and has what it had.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_bytes(data)
        atomic_replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def atomic_replace(written: Path, path: Path) -> None:
    """`written`, on the same file system, becomes `path`, for good.

    Raises:
        OSError: it did not.
    """
    _sync(written)
    written.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
