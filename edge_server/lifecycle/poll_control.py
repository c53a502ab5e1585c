"""Mode POLL: loads the last known good models at the start, then follows the repositories."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING

from edge_server.errors import ModelConfigError, Unavailable
from edge_server.inference.data_plane import NOT_ALLOWED
from edge_server.inference.registry import ModelState
from edge_server.lifecycle.control import cannot_be_loaded
from edge_server.lifecycle.updates import Updates
from edge_server.process.worker import Worker
from edge_server.repository.change_detector import (
    ChangeDetector,
    InotifyWatch,
    SeenFiles,
    read_repositories,
)
from edge_server.repository.manifest import read_manifest
from edge_server.repository.scan import is_model_name, model_names

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from edge_server.inference.registry import ModelEntry
    from edge_server.lifecycle.budget import MemoryBudget
    from edge_server.lifecycle.deployments import Deployments
    from edge_server.lifecycle.loader import RepositoryLoader

log = logging.getLogger(__name__)

_FIRST_SCANS_S = 0.2
# The number of scans that a slow disk gets at the first start, however long they take.
_FIRST_SCANS = 5
# The scan interval while a model is changing, so that the wait for the next poll does not add to
# the settling time.
_SETTLING_S = 0.5


class PollControl:
    """The `ModelControl` of mode POLL: follows the repositories and refuses load requests.

    It scans every `poll_s` seconds, more often while a model is changing. Polling finds every
    change; inotify only makes a scan start earlier.

    Args:
        loader: the loader, which reads the models that `deployments` finds, and reports to it.
        deployments: the copies of each model, and the store, which is closed with the control.
        repositories: the directories to follow.
        poll_s: the time between two scans, in seconds; 0 scans until the models of the start are
            complete, and never again.
        settle_s: the time, in seconds, that a model's files must be unchanged.
        exit_on_error: a model that fails to load before any model has served ends the daemon.
        budget: the memory budget of the loader; a model that it refused is loaded once there is
            enough memory.

    Attributes:
        worker: the thread that follows the repositories.
        updates: the changes that are carried out.
    """

    def __init__(
        self,
        loader: RepositoryLoader,
        deployments: Deployments,
        repositories: Sequence[Path],
        *,
        poll_s: float,
        settle_s: float,
        exit_on_error: bool = True,
        budget: MemoryBudget | None = None,
    ) -> None:
        # No deadline: a disk that hangs must not end the process, as the loaded models still serve.
        self.worker = Worker("repository", self._tick, deadline_s=math.inf)
        self.updates = Updates(loader, deployments, budget=budget)
        self._loader = loader
        self._deployments = deployments
        self._table = deployments.table
        self._repositories = tuple(repositories)
        self._poll_s = poll_s or math.inf
        self._exit_on_error = exit_on_error
        # Enough for every complete model, and for one whose last file was just written.
        self._first_timeout_s = 2 * settle_s + 1.0
        self._change_detector = ChangeDetector(settle_s, read_manifest)
        self._inotify_watch = InotifyWatch(repositories)
        self._unreadable: dict[Path, str] = {}
        self._scanned_s = time.monotonic()
        self._next_s = 0.0
        self._arrived: set[str] = set()
        self._kept: frozenset[str] = frozenset()

    def start(self, stop: threading.Event | None = None) -> None:
        """Load the last known good models; without any, load the models of the repositories.

        The start does not wait for a model whose files keep changing, nor for one that `awaits`
        returns True for.

        Raises:
            ModelConfigError: no model has served yet, and a model fails to load or a repository
                cannot be read.
        """
        if not self.load_last_good(stop):
            self._load_first(stop or threading.Event())
        self.worker.start()

    def load_last_good(self, stop: threading.Event | None) -> bool:
        """Load the last known good copies of an earlier run; return whether there were any."""
        kept = self.updates.load_last_good(stop)
        self._kept = frozenset(kept)
        with self._table.lock:
            for name, copy in kept.items():
                self._table[name].seen = SeenFiles.of_earlier_run(copy.source)
        return bool(kept)

    def awaits(self, name: str) -> bool:
        """Return whether the first scan may still load `name`: the start has loaded last known good
        copies, and had none of this model or of a member, which the repositories hold."""
        if not self._kept:
            return False
        with self._table.lock:
            specs = self._table.get(name).specs
            needed = {name, *(member for spec in specs for member in self._table.below(spec))}
        lacking = needed - self._kept
        try:
            return bool(lacking) and lacking <= model_names(self._repositories).keys()
        except ModelConfigError:
            return True  # not mounted yet: the model may be there

    def scan(self, now: float, arrived: Collection[str] = ()) -> bool:
        """Scan the repositories once and start the updates; return whether a model may still be
        changing.

        Args:
            now: `time.monotonic()`.
            arrived: the models that were renamed into place since the last scan.
        """
        found = read_repositories(self._repositories)
        self._log_unreadable(found.unreadable)
        with self._table.lock:
            seen = self._table.seen()
        seen, changes = self._change_detector.detect(found, seen, now, arrived)
        with self._table.lock:
            self._table.note_seen(seen)
        if changes:
            self._report_again(self.updates.carry_out(changes))
        self._scanned_s = time.monotonic()
        return bool(self._settling())

    @property
    def loads_on_request(self) -> bool:
        """See `ModelControl.loads_on_request`."""
        return False

    def load(self, name: str, **_: object) -> None:
        """Refuse the request; see `ModelControl.load`."""
        del name
        raise Unavailable(NOT_ALLOWED)

    def unload(self, name: str, **_: object) -> None:
        """Refuse the request; see `ModelControl.unload`."""
        del name
        raise Unavailable(NOT_ALLOWED)

    def index(self, *, only_ready: bool) -> list[ModelEntry]:
        """See `ModelControl.index`."""
        return self._table.index(only_ready=only_ready)

    def poll_age_s(self, now: float) -> float:
        """Return the age of the last scan in seconds, at `now` (`time.monotonic()`)."""
        return now - self._scanned_s

    def outcomes(self) -> dict[str, int]:
        """Return the number of changes by outcome; see `OUTCOMES`."""
        return self._deployments.outcomes()

    def close(self, timeout_s: float) -> None:
        """Stop the scans and clear the registry; wait up to `timeout_s` for models that close or
        load."""
        until = time.monotonic() + timeout_s
        # A disk that hangs may block the scan; the models need part of the time, too.
        self.worker.stop(timeout_s / 2)
        self.updates.close()
        self._loader.close(max(0.0, until - time.monotonic()))
        self._inotify_watch.close()
        self._deployments.store.close()

    def _tick(self, now: float) -> None:
        """Called about every second."""
        if again := self._tend(now):
            self._report_again(again)
            self._next_s = 0.0
        if now >= self._next_s:
            changing = self.scan(now, self._arrived)
            self._arrived = set()
            self._next_s = now + min(self._poll_s, _SETTLING_S if changing else self._poll_s)
        arrived = self._inotify_watch.wait(max(0.0, min(1.0, self._next_s - time.monotonic())))
        if arrived is not None and self._poll_s < math.inf:
            self._arrived.update(arrived)
            self._next_s = 0.0

    def _tend(self, now: float) -> Collection[str]:
        """Start the load retries that are due; return the models to stage again, which the store
        could not copy or which were released from quarantine."""
        self._deployments.note_serving()
        self._deployments.write_again()
        return self._deployments.release_noted() | self.updates.retry(now)

    def _report_again(self, names: Collection[str]) -> None:
        """Let the next scans report the last change of `names` once more."""
        with self._table.lock:
            for name in names:
                record = self._table.get(name)
                if record.seen is not None:
                    record.seen = record.seen.doubted()

    def _settling(self) -> list[str]:
        """Return the models that may still be changing."""
        with self._table.lock:
            seen = self._table.seen()
        return sorted(name for name, files in seen.items() if files.candidate is not None)

    def _log_unreadable(self, unreadable: Mapping[Path, str]) -> None:
        for repository, reason in unreadable.items():
            if self._unreadable.get(repository) != reason:
                log.warning("repository %s: %s; what is loaded of it serves on", repository, reason)
        for repository in self._unreadable.keys() - unreadable.keys():
            log.info("repository %s: can be read again", repository)
        self._unreadable = dict(unreadable)

    def _load_first(self, stop: threading.Event) -> None:
        scans, until = 0, math.inf
        while self.scan(time.monotonic()):
            scans += 1
            until = min(until, time.monotonic() + self._first_timeout_s)
            if scans > _FIRST_SCANS and time.monotonic() > until:
                for name in self._settling():
                    log.warning(
                        "model %s: its files keep changing; the start goes on without it, and it "
                        "is loaded once they stay as they are",
                        name,
                    )
                break
            if stop.wait(_FIRST_SCANS_S):
                return
        try:
            model_names(self._repositories)  # raises, as in the other modes
        except ModelConfigError:
            if self._exit_on_error:
                raise
        while not self.updates.wait_idle(_FIRST_SCANS_S):
            if stop.is_set():
                return
        # As in the other modes, a directory that cannot be a model does not end the daemon.
        failed = [
            entry
            for entry in self._table.registry.snapshot.entries.values()
            if entry.state is ModelState.UNAVAILABLE and is_model_name(entry.name)
        ]
        if failed and self._exit_on_error:
            raise cannot_be_loaded(failed)
