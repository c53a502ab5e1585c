"""A model of a disk that loses at a power cut what was not synced: replays a process's calls.

The calls come from `strace -y -xx -s LONG`, so that every string is whole and in hex.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

TRACED = "write|fsync|fdatasync|rename.*|mkdir.*|unlink.*|rmdir|openat"
_CALL = re.compile(r"(\w+)\((.*)\) += (-?\d+)")
_OF_DESCRIPTOR = {"write", "fsync", "fdatasync"}
_HEX = re.compile(r"\\x([0-9a-f]{2})")


class _Node:
    """A file or a directory: as the process sees it, and as it is on the disk."""

    def __init__(self, is_directory: bool) -> None:
        self.is_directory = is_directory
        self.data = self.kept_data = b""
        self.entries: dict[str, _Node] = {}
        self.kept_entries: dict[str, _Node] = {}

    def sync(self) -> None:
        self.kept_data, self.kept_entries = self.data, dict(self.entries)


class DroppingDisk:
    """The directory `root`, which is on the disk as it is now.

    Args:
        root: holds what is on the disk before the first call.
        names_last: whether names come to the disk with the sync of their directory alone; False
            puts them there at once, before the data that they stand for, as file systems with
            delayed allocation may.
    """

    def __init__(self, root: Path, *, names_last: bool) -> None:
        self._names_last = names_last
        self._root = self._read(root)

    def replay(self, line: str, root: str) -> bool:
        """Do what the call in `line` did below `root`; return whether the disk has changed."""
        call = _CALL.search(line)
        if call is None or int(call[3]) < 0:
            return False
        name, arguments = call[1], call[2]
        named = arguments.partition(", ")[0] if name in _OF_DESCRIPTOR else arguments
        paths = [path for path in _paths(named) if f"{path}/".startswith(f"{root}/")]
        if not paths:
            return False
        before = self._shape(self._root)
        self._do(name, arguments, [path[len(root) + 1 :] for path in paths])
        return self._shape(self._root) != before

    def write_to(self, directory: Path) -> None:
        """Make `directory`, as the disk is after a power cut now."""
        self._write(self._root, directory)

    def _do(self, name: str, arguments: str, paths: list[str]) -> None:
        if name == "openat":
            if "O_CREAT" in arguments and self._find(paths[0]) is None:
                self._put(paths[0], _Node(is_directory=False))
            if "O_TRUNC" in arguments:
                self._require(paths[0]).data = b""
        elif name == "write":
            (data,) = re.findall(r'"([^"]*)"', arguments)
            self._require(paths[0]).data += bytes.fromhex(_HEX.sub(r"\1", data))
        elif name in _OF_DESCRIPTOR:
            self._require(paths[0]).sync()
        elif name.startswith("mkdir"):
            self._put(paths[0], _Node(is_directory=True))
        elif name.startswith("rename"):
            node = self._require(paths[0])
            self._take(paths[0])
            self._put(paths[1], node)
        else:
            self._take(paths[0])

    def _find(self, path: str) -> _Node | None:
        node: _Node | None = self._root
        for part in filter(None, path.split("/")):
            node = None if node is None else node.entries.get(part)
        return node

    def _require(self, path: str) -> _Node:
        node = self._find(path)
        assert node is not None, path
        return node

    def _put(self, path: str, node: _Node | None) -> None:
        above, _, name = path.rpartition("/")
        entries = self._require(above).entries
        if node is None:
            del entries[name]
        else:
            entries[name] = node
        if not self._names_last:
            self._require(above).kept_entries = dict(entries)

    def _take(self, path: str) -> None:
        self._put(path, None)

    def _read(self, path: Path) -> _Node:
        node = _Node(path.is_dir())
        if node.is_directory:
            node.entries = {each.name: self._read(each) for each in path.iterdir()}
        else:
            node.data = path.read_bytes()
        node.sync()
        return node

    def _write(self, node: _Node, path: Path) -> None:
        if not node.is_directory:
            path.write_bytes(node.kept_data)
            return
        path.mkdir()
        for name, each in node.kept_entries.items():
            self._write(each, path / name)

    def _shape(self, node: _Node) -> Any:
        if not node.is_directory:
            return node.kept_data
        return {name: self._shape(each) for name, each in node.kept_entries.items()}


def _paths(arguments: str) -> list[str]:
    """Return the paths that a call names, absolute: `AT_FDCWD<here>, "there"` is one."""
    found = []
    for below, name in re.findall(
        r'(?:(?:AT_FDCWD|\d+)<([^>]*)>)?(?:, )?(?:"([^"]*)")?', arguments
    ):
        below, name = (
            bytes.fromhex(_HEX.sub(r"\1", each)).decode(errors="replace") if "\\x" in each else each
            for each in (below, name)
        )
        if name.startswith("/") or (name and not below):
            found.append(name)
        elif below:
            found.append(f"{below}/{name}" if name else below)
    return found
