"""The detection of changes: the scan of the repositories, and which changes are complete.

What the scans found of a model is a `SeenFiles`, which the caller keeps between two scans.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from inotify_simple import INotify, flags

from edge_server.errors import ModelConfigError, may_pass
from edge_server.repository.manifest import NAME as MANIFEST
from edge_server.repository.scan import APPEARS_TWICE, FileSet, ModelTree, is_model_name, models_in

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from edge_server.repository.manifest import Manifest
    from edge_server.repository.scan import SeenFile

    ReadManifest = Callable[[ModelTree], Manifest]

log = logging.getLogger(__name__)

_EVENTS = flags.MOVED_TO | flags.MOVED_FROM | flags.CREATE | flags.DELETE | flags.ONLYDIR
# A file set is complete after so many equal scans, and after the window.
_SCANS = 2


@dataclass(frozen=True)
class RepositoryScan:
    """One scan of all repositories: models by name, sorted, and in `unreadable` why a missing model
    of a repository does not count as removed: it cannot be read, or holds no model at all, as one
    that is not mounted."""

    models: Mapping[str, ModelTree]
    unreadable: Mapping[Path, str]


def read_repositories(repositories: Sequence[Path]) -> RepositoryScan:
    models: dict[str, ModelTree] = {}
    unreadable: dict[Path, str] = {}
    for repository in repositories:
        try:
            found = models_in(repository)
        except OSError as error:
            unreadable[repository] = f"cannot be read: {error.strerror or error}"
            continue
        if not found:
            unreadable[repository] = "holds no model"
        for tree in found:
            twin = models.get(tree.name)
            if twin is not None:
                places = f"{twin.directory}, {tree.directory}"
                fault = f"{APPEARS_TWICE}: {places}; rename or remove all but one"
                tree = ModelTree(tree.name, tree.repository, fault=fault)  # noqa: PLW2901
            models[tree.name] = tree
    return RepositoryScan(dict(sorted(models.items())), unreadable)


@dataclass(frozen=True)
class Change:
    """A complete change of one model.
    Attributes: tree: the model's directory; None if it was removed; with a fault if it is unusable.
    """

    name: str
    tree: ModelTree | None


@dataclass(frozen=True)
class _Candidate:
    """A change that may be incomplete: first seen at `since` (monotonic, s), in `scans` scans.
    `files` None is a model that is missing."""

    files: FileSet | None
    since: float
    scans: int = 1


@dataclass(frozen=True)
class SeenFiles:
    """The files of one model that the scans found.

    Attributes:
        reported: those of the last complete change, and `repository` its repository, None if that
            was of an earlier run; None before the first.
        candidate: a change that may be incomplete.
    """

    reported: FileSet | None = None
    repository: Path | None = None
    candidate: _Candidate | None = None

    @staticmethod
    def of_earlier_run(files: tuple[SeenFile, ...]) -> SeenFiles:
        """Return the files that a model serves already, from an earlier run. A model that also has
        empty directories is reported once more."""
        return SeenFiles(FileSet(files, _directories(files)))

    def doubted(self) -> SeenFiles:
        """Return these files so that the last change, if there was one, is reported again."""
        # A file set that equals no scanned one.
        again = None if self.reported is None else FileSet((), (), "doubted")
        return replace(self, reported=again)

    def scanned(self, files: FileSet | None, now: float) -> SeenFiles:
        """Return these files after a scan that found the change `files`."""
        before = self.candidate
        if before is None or before.files != files:
            return replace(self, candidate=_Candidate(files, now))
        return replace(self, candidate=replace(before, scans=before.scans + 1))

    def is_settled(self, now: float, window_s: float) -> bool:
        """Return whether the candidate has been stable long enough."""
        candidate = self.candidate
        return (
            candidate is not None
            and candidate.scans >= _SCANS
            and now - candidate.since >= window_s
        )


_UNSEEN = SeenFiles()


class ChangeDetector:
    """Distinguishes complete changes from changes in progress; does no I/O and keeps nothing.

    A change is complete at once if the model was renamed into place, or if its manifest.json names
    exactly the files that are there. Any other change is complete after two scans, and all scans
    during `window_s`, have found the same set of (path, size, mtime, inode, ctime). Times are never
    compared with a clock: an older file is a change, too.

    A missing model counts as removed only if its repository can be read and holds other models,
    because a repository that is not mounted looks empty. Each change is reported once."""

    def __init__(self, window_s: float, read_manifest: ReadManifest) -> None:
        self._window_s = window_s
        self._read_manifest = read_manifest

    def detect(
        self,
        repository_scan: RepositoryScan,
        seen: Mapping[str, SeenFiles],
        now: float,
        arrived: Collection[str] = (),
    ) -> tuple[dict[str, SeenFiles], list[Change]]:
        now_seen: dict[str, SeenFiles] = {}
        changes = []
        for name, tree in repository_scan.models.items():
            files, before = tree.file_set, seen.get(name, _UNSEEN)
            if files == before.reported:
                now_seen[name] = SeenFiles(files, tree.repository)
                continue
            now_seen[name] = after = before.scanned(files, now)
            settled = after.is_settled(now, self._window_s)
            complete = self._complete(tree, settled=settled, renamed=name in arrived)
            if complete is not None:
                now_seen[name] = SeenFiles(files, tree.repository)
                changes.append(Change(name, complete))
        unreadable = repository_scan.unreadable
        for name, before in seen.items():
            if name in now_seen or before.reported is None:
                continue
            if unreadable and (before.repository is None or before.repository in unreadable):
                now_seen[name] = replace(before, candidate=None)
                continue
            after = before.scanned(None, now)
            if after.is_settled(now, self._window_s):
                changes.append(Change(name, None))
            else:
                now_seen[name] = after
        return now_seen, changes

    def _complete(self, tree: ModelTree, *, settled: bool, renamed: bool) -> ModelTree | None:
        """Return the tree to report, with its fault, or None while the change is incomplete."""
        if tree.fault:
            return tree if settled else None
        unfinished, passes = "", False
        if any(file.path == MANIFEST for file in tree.files):
            try:
                lacks = self._read_manifest(tree).missing(tree)
            except ModelConfigError as error:
                unfinished, passes = str(error), may_pass(error)
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
        if not unfinished:
            return tree
        return replace(tree, fault=f"{tree.directory}: {unfinished}", may_pass=passes)


class InotifyWatch:
    """Waits for a change among the models of `repositories`. Not thread-safe. Without free inotify
    watches, or on a file system without events, the wait only times out."""

    def __init__(self, repositories: Sequence[Path]) -> None:
        self._repositories = tuple(repositories)
        self._nothing = threading.Event()
        self._inotify: INotify | None = None
        try:
            self._inotify = INotify()
        except OSError as error:
            log.warning("repository: inotify cannot be used, only polled: %s", error)

    def wait(self, seconds: float) -> Collection[str] | None:
        """Wait up to `seconds` for a change; return the models renamed into place, or None without
        a change."""
        if self._inotify is None or not self._watch(self._inotify):
            self._nothing.wait(seconds)
            return None
        # An event is only a hint, so the first batch of a burst is enough.
        events = self._inotify.read(timeout=round(1000 * seconds))
        if not events:
            return None
        arrived = flags.MOVED_TO | flags.ISDIR
        return {e.name for e in events if e.mask & arrived == arrived and is_model_name(e.name)}

    def close(self) -> None:
        if self._inotify is not None:
            self._inotify.close()

    def _watch(self, inotify: INotify) -> bool:
        """Watch the repositories that exist now; return whether any is watched."""
        watched = False
        for repository in self._repositories:
            try:
                inotify.add_watch(repository, _EVENTS)
                watched = True
            except OSError:
                continue  # the repository may be mounted later; polling finds it
        return watched


def _directories(files: tuple[SeenFile, ...]) -> tuple[str, ...]:
    """Return the directories that hold `files`, with their parents."""
    found: set[str] = set()
    for file in files:
        parts = file.path.split("/")[:-1]
        found.update("/".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return tuple(sorted(found))
