"""The detection of changes: the scan of the repositories, and which changes are complete."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from inotify_simple import INotify, flags

from edge_server.errors import ModelConfigError, may_pass
from edge_server.repository.manifest import NAME as MANIFEST
from edge_server.repository.manifest import read_manifest
from edge_server.repository.scan import APPEARS_TWICE, FileSet, ModelTree, is_model_name, models_in

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from edge_server.repository.manifest import Manifest
    from edge_server.repository.scan import SeenFile

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
class _SeenFiles:
    """The files of one model that the scans found.

    Attributes:
        reported: those of the last complete change, and `repository` its repository, None if that
            was of an earlier run; None before the first.
        candidate: those of a change that may be incomplete, None where the model is missing: first
            found at `since` (monotonic, s), in `scans` scans; 0 without such a change.
    """

    reported: FileSet | None = None
    repository: Path | None = None
    candidate: FileSet | None = None
    since: float = 0.0
    scans: int = 0

    def scanned(self, files: FileSet | None, now: float) -> _SeenFiles:
        if self.scans and self.candidate == files:
            return replace(self, scans=self.scans + 1)
        return replace(self, candidate=files, since=now, scans=1)

    def is_settled(self, now: float, window_s: float) -> bool:
        return self.scans >= _SCANS and now - self.since >= window_s


_UNSEEN = _SeenFiles()


class ChangeDetector:
    """Distinguishes complete changes from changes in progress. For one thread at a time.

    A change is complete at once if the model was renamed into place, or if its manifest.json names
    exactly the files that are there. Any other change is complete after two scans, and all scans
    during `window_s`, have found the same set of (path, size, mtime, inode, ctime). Times are never
    compared with a clock: an older file is a change, too.

    A missing model counts as removed only if its repository can be read and holds other models,
    because a repository that is not mounted looks empty. Each change is reported once."""

    def __init__(
        self,
        repositories: Sequence[Path],
        window_s: float,
        read_manifest: Callable[[ModelTree], Manifest] = read_manifest,
    ) -> None:
        self._repositories = repositories
        self._window_s = window_s
        self._read_manifest = read_manifest
        self._seen: dict[str, _SeenFiles] = {}
        self._unreadable: Mapping[Path, str] = {}

    @property
    def changing(self) -> list[str]:
        """The models with a change that may be incomplete, sorted."""
        return sorted(name for name, files in self._seen.items() if files.scans)

    def resume(self, models: Mapping[str, tuple[SeenFile, ...]]) -> None:
        """Begin with the files that these models serve already, from an earlier run. A model that
        also has empty directories is reported once more."""
        for name, files in models.items():
            self._seen[name] = _SeenFiles(FileSet(files, _directories(files)))

    def report_again(self, names: Collection[str]) -> None:
        """Let the next scans report the last change of these models, if there was one, again."""
        for name in self._seen.keys() & names:
            if self._seen[name].reported is not None:
                # A file set that equals no scanned one.
                self._seen[name] = replace(self._seen[name], reported=FileSet((), (), "doubted"))

    def scan(self, now: float, arrived: Collection[str] = ()) -> list[Change]:
        """Scan the repositories, at `now` (monotonic, s); return what has changed since the last
        scan, completely. Args: arrived: the models that were renamed into place since."""
        found = read_repositories(self._repositories)
        for repository, reason in found.unreadable.items():
            if self._unreadable.get(repository) != reason:
                log.warning("repository %s: %s; what is loaded of it serves on", repository, reason)
        for repository in self._unreadable.keys() - found.unreadable.keys():
            log.info("repository %s: can be read again", repository)
        self._unreadable = found.unreadable
        return self.detect(found, now, arrived)

    def detect(
        self, repository_scan: RepositoryScan, now: float, arrived: Collection[str] = ()
    ) -> list[Change]:
        """See `scan`; does no I/O but to read manifests."""
        now_seen: dict[str, _SeenFiles] = {}
        changes = []
        for name, tree in repository_scan.models.items():
            files, before = tree.file_set, self._seen.get(name, _UNSEEN)
            if files == before.reported:
                now_seen[name] = _SeenFiles(files, tree.repository)
                continue
            now_seen[name] = after = before.scanned(files, now)
            settled = after.is_settled(now, self._window_s)
            complete = self._complete(tree, settled=settled, renamed=name in arrived)
            if complete is not None:
                now_seen[name] = _SeenFiles(files, tree.repository)
                changes.append(Change(name, complete))
        unreadable = repository_scan.unreadable
        for name, before in self._seen.items():
            if name in now_seen or before.reported is None:
                continue
            if unreadable and (before.repository is None or before.repository in unreadable):
                now_seen[name] = replace(before, scans=0)
                continue
            after = before.scanned(None, now)
            if after.is_settled(now, self._window_s):
                changes.append(Change(name, None))
            else:
                now_seen[name] = after
        self._seen = now_seen
        return changes

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
    found: set[str] = set()
    for file in files:
        parts = file.path.split("/")[:-1]
        found.update("/".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return tuple(sorted(found))
