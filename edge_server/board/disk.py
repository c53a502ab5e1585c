"""Whether there is room where the daemon keeps things, and whether it may write there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_server.board.kernel_files import is_directory

if TYPE_CHECKING:
    from pathlib import Path

    from edge_server.board.account import Account


@dataclass(frozen=True)
class Disk:
    """A directory, or the nearest one above it that is there.

    Attributes:
        directory: the one that was asked for.
        stands: what is there of it.
        writable: the account may write in `stands`.
        free_bytes: for everybody but root.
    """

    directory: Path
    stands: Path
    writable: bool
    total_bytes: int
    free_bytes: int


def read_disk(directory: Path, account: Account) -> Disk | None:
    """What holds `directory`; None where the file system does not tell."""
    stands = directory
    while not is_directory(stands) and stands != stands.parent:
        stands = stands.parent
    try:
        numbers = os.statvfs(stands)
    except OSError:
        return None
    read_only = bool(numbers.f_flag & os.ST_RDONLY)
    return Disk(
        directory,
        stands,
        account.may_use(stands) and not read_only,
        numbers.f_blocks * numbers.f_frsize,
        numbers.f_bavail * numbers.f_frsize,
    )
