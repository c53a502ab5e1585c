"""Write files atomically and durably, also across a power cut."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def atomic_write(path: Path, data: bytes) -> None:
    """Return when `path` durably holds `data`; until then its content is unchanged.

    Raises:
        OSError: the write failed, and the content is unchanged.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_bytes(data)
        atomic_replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def atomic_replace(written: Path, path: Path) -> None:
    """Atomically and durably replace `path` by `written`, on the same file system.

    Raises:
        OSError: the replacement failed.
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
