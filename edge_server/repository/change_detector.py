"""Which changes of a repository are to be believed: pure, so that every order can be tried."""

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

# A set of files that was the same in so many looks, and for the window, is complete.
_LOOKS = 2


@dataclass(frozen=True)
class Change:
    """A change that is believed.

    Attributes:
        tree: what the model is now; None where it was taken away; with a fault where it cannot be
            used as it is.
    """

    name: str
    tree: ModelTree | None


@dataclass(frozen=True)
class _Candidate:
    """What a model may have become: since when (monotonic, s) and in how many looks."""

    file_set: FileSet | None
    since: float
    looks: int = 1


class ChangeDetector:
    """Tells complete changes from those that are still under way.

    A change is believed at once where the model was renamed into place, or where its
    manifest.json names exactly the files that are there. Any other is believed once two looks, and
    all looks for the length of the window, have seen the same set of (path, size, mtime, inode,
    ctime). Nobody compares times with a clock: an older file is a change like any other.

    What is missing counts as taken away only where the repository can be read and holds other
    models: one that is not mounted looks like an empty one.

    Each change is told once; what became of it is not asked.

    Args:
        window_s: how long a set must stay the same.
        read_manifest: of a tree that has one; raises ModelConfigError where it is none.
    """

    def __init__(self, window_s: float, read_manifest: ReadManifest) -> None:
        self._window_s = window_s
        self._read_manifest = read_manifest
        self._known: dict[str, FileSet] = {}
        self._homes: dict[str, Path | None] = {}
        self._candidates: dict[str, _Candidate] = {}

    def accept(self, name: str, files: tuple[SeenFile, ...]) -> None:
        """These are what `name` serves already, kept from an earlier run.

        Where it has empty directories beside them it is told once more.
        """
        self._known[name] = FileSet(files, _directories(files))
        self._homes[name] = None

    def doubt(self, name: str) -> None:
        """What was told of `name` last could not be taken as it was: tell it again."""
        # What was there before is gone in any case; nothing looks like this.
        self._known[name] = FileSet((), (), "doubted")

    def tell_again(self, name: str) -> None:
        """What was told of `name` last, if it was, is to be told once more."""
        if name in self._known:
            self.doubt(name)

    @property
    def settling(self) -> Collection[str]:
        """The models that may be changing."""
        return self._candidates.keys()

    def look(
        self, repository_scan: RepositoryScan, now: float, arrived: Collection[str] = ()
    ) -> list[Change]:
        """What is to be believed after this look.

        Args:
            now: `time.monotonic()`.
            arrived: the models whose directories were renamed into place since the last look.
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
        """What is to be acted on, if anything is by now."""
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
        """Whether it was seen so for long enough; remembers that it was."""
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
    """The directories that hold `files`."""
    found: set[str] = set()
    for file in files:
        parts = file.path.split("/")[:-1]
        found.update("/".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return tuple(sorted(found))
