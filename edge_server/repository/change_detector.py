"""The change detector: decides, without I/O of its own, which repository changes are complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_server.errors import ModelConfigError
from edge_server.repository.manifest import NAME as MANIFEST
from edge_server.repository.tree import FileSet

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from edge_server.repository.manifest import Manifest
    from edge_server.repository.tree import ModelTree, RepositoryScan, SeenFile

    ReadManifest = Callable[[ModelTree], Manifest]

# A file set is complete after so many equal scans, and after the window.
_LOOKS = 2


@dataclass(frozen=True)
class Change:
    """A complete change of one model.

    Attributes:
        name: the model.
        tree: the model's directory; None if it was removed; with a fault if it is unusable.
    """

    name: str
    tree: ModelTree | None


@dataclass(frozen=True)
class _Candidate:
    """A change that may be incomplete: first seen at `since` (monotonic, s), in `looks` scans."""

    file_set: FileSet | None
    since: float
    looks: int = 1


class ChangeDetector:
    """Distinguishes complete changes from changes in progress.

    A change is complete at once if the model was renamed into place, or if its manifest.json names
    exactly the files that are there. Any other change is complete after two scans, and all scans
    during the window, have found the same set of (path, size, mtime, inode, ctime). Times are
    compared only with each other, never with a clock: an older file is a change, too.

    A missing model counts as removed only if its repository can be read and holds other models,
    because a repository that is not mounted looks empty.

    Each change is reported once; its outcome does not matter.

    Args:
        window_s: the time, in seconds, that a file set must stay the same.
        read_manifest: reads the manifest of a tree that has one; raises ModelConfigError if the
            manifest is invalid.
    """

    def __init__(self, window_s: float, read_manifest: ReadManifest) -> None:
        self._window_s = window_s
        self._read_manifest = read_manifest
        self._known: dict[str, FileSet] = {}
        self._homes: dict[str, Path | None] = {}
        self._candidates: dict[str, _Candidate] = {}

    def accept(self, name: str, files: tuple[SeenFile, ...]) -> None:
        """Record `files` as the files that `name` serves already, from an earlier run.

        A model that also has empty directories is reported once more.
        """
        self._known[name] = FileSet(files, _directories(files))
        self._homes[name] = None

    def doubt(self, name: str) -> None:
        """Report `name` again, because its last change could not be staged."""
        # A file set that equals no scanned one.
        self._known[name] = FileSet((), (), "doubted")

    def tell_again(self, name: str) -> None:
        """Report the last change of `name` once more, if there was one."""
        if name in self._known:
            self.doubt(name)

    @property
    def settling(self) -> Collection[str]:
        """The names of the models that may still be changing."""
        return self._candidates.keys()

    def look(
        self, repository_scan: RepositoryScan, now: float, arrived: Collection[str] = ()
    ) -> list[Change]:
        """Return the changes that are complete after this scan.

        Args:
            repository_scan: the result of the scan.
            now: `time.monotonic()`.
            arrived: the models whose directories were renamed into place since the last scan.
        """
        changes = []
        for name, tree in repository_scan.models.items():
            file_set = tree.file_set
            if file_set == self._known.get(name):
                self._homes[name] = tree.repository
                self._candidates.pop(name, None)
                continue
            believed = self._judge(tree, file_set, now, renamed=name in arrived)
            if believed is not None:
                self._believe(name, file_set, tree.repository)
                changes.append(Change(name, believed))
        for name in self._known.keys() - repository_scan.models.keys():
            home = self._homes[name]
            if repository_scan.blind and (home is None or home in repository_scan.blind):
                self._candidates.pop(name, None)
            elif self._is_settled(name, None, now):
                self._candidates.pop(name, None)
                del self._known[name], self._homes[name]
                changes.append(Change(name, None))
        for name in self._candidates.keys() - repository_scan.models.keys() - self._known.keys():
            del self._candidates[name]
        return changes

    def _judge(
        self, tree: ModelTree, file_set: FileSet, now: float, *, renamed: bool
    ) -> ModelTree | None:
        """Return the tree to report, with its fault, or None while the change is incomplete."""
        settled = self._is_settled(tree.name, file_set, now)
        if tree.fault:
            return tree if settled else None
        unfinished = ""
        if any(file.path == MANIFEST for file in tree.files):
            try:
                lacks = self._read_manifest(tree).missing(tree)
            except ModelConfigError as error:
                unfinished = str(error)
            else:
                if not lacks:
                    return tree
                unfinished = (
                    f"{MANIFEST} does not fit: {lacks}; push the model again, or remove {MANIFEST}"
                )
        elif renamed:
            return tree
        if not settled:
            return None
        return tree.with_fault(f"{tree.directory}: {unfinished}") if unfinished else tree

    def _is_settled(self, name: str, file_set: FileSet | None, now: float) -> bool:
        """Record this scan of `name`; return whether the file set has been stable long enough."""
        before = self._candidates.get(name)
        if before is None or before.file_set != file_set:
            self._candidates[name] = _Candidate(file_set, now)
            return False
        looks = before.looks + 1
        self._candidates[name] = _Candidate(file_set, before.since, looks)
        return looks >= _LOOKS and now - before.since >= self._window_s

    def _believe(self, name: str, file_set: FileSet, repository: Path) -> None:
        self._known[name] = file_set
        self._homes[name] = repository
        self._candidates.pop(name, None)


def _directories(files: tuple[SeenFile, ...]) -> tuple[str, ...]:
    """Return the directories that hold `files`, with their parents."""
    found: set[str] = set()
    for file in files:
        parts = file.path.split("/")[:-1]
        found.update("/".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return tuple(sorted(found))
