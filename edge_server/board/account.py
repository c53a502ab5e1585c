"""Accounts, and their rights to device files."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from edge_server.board.kernel_files import read_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_READ_AND_WRITE = 6


class Group(NamedTuple):
    """A group of /etc/group."""

    name: str
    gid: int


@dataclass(frozen=True)
class Account:
    """A user and all groups of that user's processes."""

    name: str
    uid: int
    gids: frozenset[int]

    def may_use(self, path: Path) -> bool:
        """Return whether the account may read and write the existing file `path`.

        For the account of this process the kernel decides; for another one owner, group and mode
        decide, and access control lists are ignored.
        """
        if self.uid == os.geteuid():
            return os.access(path, os.R_OK | os.W_OK)
        try:
            status = path.stat()
        except OSError:
            return False
        if self.uid == status.st_uid:
            bits = status.st_mode >> 6
        elif status.st_gid in self.gids:
            bits = status.st_mode >> 3
        else:
            bits = status.st_mode
        return self.uid == 0 or bits & _READ_AND_WRITE == _READ_AND_WRITE


def this_account(root: Path) -> Account:
    """Return the account of this process, with its name in /etc/passwd below `root`."""
    uid = os.geteuid()
    names = {int(row[2]): row[0] for row in _rows(root / "etc/passwd") if row[2].isdecimal()}
    return Account(names.get(uid, str(uid)), uid, frozenset({os.getegid(), *os.getgroups()}))


def find_account(root: Path, name: str) -> Account | None:
    """Return the account `name` of /etc/passwd and /etc/group below `root`."""
    for row in _rows(root / "etc/passwd"):
        if row[0] == name and row[2].isdecimal() and row[3].isdecimal():
            member_of = (
                int(group[2])
                for group in _rows(root / "etc/group")
                if group[2].isdecimal() and name in group[3].split(",")
            )
            return Account(name, int(row[2]), frozenset({int(row[3]), *member_of}))
    return None


def group_that_may(root: Path, path: Path) -> Group | None:
    """Return the group whose members may open `path`, if only to read; None where only its owner
    may."""
    try:
        status = path.stat()
    except OSError:
        return None
    if not status.st_mode & stat.S_IRGRP or not status.st_gid:
        return None
    names = {int(row[2]): row[0] for row in _rows(root / "etc/group") if row[2].isdecimal()}
    return Group(names.get(status.st_gid, str(status.st_gid)), status.st_gid)


def _rows(path: Path) -> Iterator[list[str]]:
    for line in (read_text(path) or "").splitlines():
        row = line.split(":")
        if len(row) >= 4:
            yield row
