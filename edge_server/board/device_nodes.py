"""The accounts of this system, and the device files and disks that they may use."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edge_server.board.resources import is_directory, listed, nearest_directory, read_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_READ_AND_WRITE = 6
# Names differ between JetPack 6 and 7, and between modules, so the existing files are listed.
_JETSON = ("nvmap", "nvhost-*", "nvgpu/*", "nvgpu/*/*", "dri/renderD*")
# On a desktop a render node may belong to another vendor's GPU.
_DESKTOP = ("nvidiactl", "nvidia-uvm", "nvidia[0-9]*")


class Group(NamedTuple):
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


@dataclass(frozen=True)
class DeviceNode:
    """One file below /dev.

    Attributes:
        usable: the given account may read and write the file.
        group: the group that grants the account access; None where no group does.
        label: the driver's name for a camera.
        for_root: only root may read the file.
    """

    path: str
    usable: bool
    group: str | None
    label: str = ""
    for_root: bool = False

    @property
    def is_csi(self) -> bool:
        return self.label.startswith("vi-output")


def read_gpu_nodes(root: Path, account: Account, *, jetson: bool) -> tuple[DeviceNode, ...]:
    """List the files of NVIDIA's GPU, of NVDLA and codecs below `root`, with the rights of
    `account`."""
    patterns = _JETSON if jetson else _DESKTOP
    return tuple(_node(root, path, account) for path in _files(root, patterns))


def gpu_files(root: Path = Path("/")) -> list[str]:
    """List the paths of `read_gpu_nodes` on a Jetson."""
    return [str(path) for path in _files(root, _JETSON)]


def _files(root: Path, patterns: Iterable[str]) -> list[Path]:
    paths = [path for pattern in patterns for path in listed(root / "dev", pattern)]
    return [path for path in paths if not is_directory(path)]


def read_cameras(root: Path, account: Account) -> tuple[DeviceNode, ...]:
    names = root / "sys/class/video4linux"
    return tuple(
        _node(root, path, account, read_text(names / path.name / "name") or "")
        for path in listed(root / "dev", "video[0-9]*")
    )


def _node(root: Path, path: Path, account: Account, label: str = "") -> DeviceNode:
    name = f"/{path.relative_to(root)}"
    usable, group = account.may_use(path), group_that_may(root, path)
    joined = group is not None and group.gid in account.gids
    return DeviceNode(
        name, usable, None if group is None or joined else group.name, label, group is None
    )


@dataclass(frozen=True)
class Disk:
    """The disk of a directory; `stands` is that, or its nearest ancestor that exists.

    Attributes:
        free_bytes: free for users other than root.
    """

    directory: Path
    stands: Path
    writable: bool
    total_bytes: int
    free_bytes: int


def read_disk(directory: Path, account: Account) -> Disk | None:
    """Return the disk of `directory`; None where the file system does not report it."""
    stands = nearest_directory(directory)
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
