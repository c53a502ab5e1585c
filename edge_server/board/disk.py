"""Free space and write access of the daemon's directories."""

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
    """A directory, or its nearest existing ancestor.

    Attributes:
        directory: the requested directory.
        stands: the existing directory.
        writable: the account may write in `stands`.
        free_bytes: free for users other than root.
    """

    directory: Path
    stands: Path
    writable: bool
    total_bytes: int
    free_bytes: int


def read_disk(directory: Path, account: Account) -> Disk | None:
    """Return the disk of `directory`; None where the file system does not report it."""
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
