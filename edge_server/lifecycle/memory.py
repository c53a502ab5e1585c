"""Reads the memory that is still available under the limits of the board and of this process."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from edge_server.board.kernel_files import read_number, read_text
from edge_server.board.resources import read_memory

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Names(NamedTuple):
    """The relevant files of a control group, and the mount point of such groups."""

    mount: str
    limits: tuple[str, ...]
    usage: str
    cache: str


# Beyond memory.high a group is slowed down until it uses less.
_V2 = _Names("", ("memory.max", "memory.high"), "memory.current", "inactive_file")
_V1 = _Names("memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the available memory in bytes; None if the system reports neither of its sources.

    The result is the minimum of the memory that the kernel can allocate without swapping and of the
    remainder in each control group of this process and its parents.

    Args:
        root: the root of the file system with /proc and /sys.
    """
    return min(_said(root), default=None)


def _said(root: Path) -> Iterator[int]:
    of_board = read_memory(root).available_bytes
    if of_board is not None:
        yield of_board
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        names = _V1 if "memory" in controllers.split(",") else None if controllers else _V2
        if names is not None:
            for group in _with_all_above(PurePosixPath(path)):
                yield from _left(root / "sys/fs/cgroup" / names.mount / group, names)


def _with_all_above(path: PurePosixPath) -> list[PurePosixPath]:
    """Return the group and its parents, relative to the mount point.

    In a container only the topmost group may exist; it is the container's own.
    """
    top = PurePosixPath()
    if not path.is_absolute() or ".." in path.parts:
        return [top]
    inside = path.relative_to("/")
    return [inside, *(parent for parent in inside.parents if parent != inside)]


def _left(group: Path, names: _Names) -> Iterator[int]:
    used = read_number(group / names.usage)
    # `max` means no limit and does not parse as a number.
    limits = [n for name in names.limits if (n := read_number(group / name)) is not None]
    if used is None or not limits:
        return
    for line in (read_text(group / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == names.cache and value.isdecimal():
            # Page cache of inactive files; the kernel drops it first at the limit of a group.
            used -= int(value)
    yield max(0, min(limits) - max(0, used))
