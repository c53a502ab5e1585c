"""Mode POLL: loads the last known good models at the start, then applies repository changes."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING

from edge_server.errors import EdgeServerError, Unavailable
from edge_server.inference.control import NO_FILES, NOT_ALLOWED
from edge_server.inference.snapshot import ModelState
from edge_server.lifecycle.control import cannot_be_loaded
from edge_server.lifecycle.updates import Updates
from edge_server.repository.change_detector import ChangeDetector
from edge_server.repository.inotify_watch import InotifyWatch
from edge_server.repository.manifest import read_manifest
from edge_server.repository.scan import is_model_name, model_names
from edge_server.repository.watcher import RepositoryWatcher

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from edge_server.inference.registry import ModelRegistry
    from edge_server.inference.snapshot import ModelEntry
    from edge_server.lifecycle.budget import MemoryBudget
    from edge_server.lifecycle.deployment_state import DeploymentState
    from edge_server.lifecycle.loader import RepositoryLoader
    from edge_server.repository.store import ModelStore
    from edge_server.requests import Cancellation

log = logging.getLogger(__name__)

_FIRST_LOOKS_S = 0.2
# The number of scans that a slow disk gets at the first start, however long they take.
_FIRST_LOOKS = 5


class PollControl:
    """The `ModelControl` of mode POLL: follows the repositories and refuses load requests.

    Args:
        loader: the loader that writes `registry`, reads the models that `deployment_state`
            accepts, and reports to it.
        deployment_state: records the accepted, the serving and the good copy of each model.
        store: the store that changes are staged in; closed with the control.
        registry: the registry that the index is read from.
        repositories: the directories to watch.
        poll_s: the time between two scans, in seconds.
        settle_s: the time, in seconds, that a model's files must be unchanged.
        exit_on_error: a model that fails to load before any model has served ends the daemon.
        budget: the memory budget of the loader; a model that it refused is loaded once there is
            enough memory.
    """

    def __init__(
        self,
        loader: RepositoryLoader,
        deployment_state: DeploymentState,
        store: ModelStore,
        registry: ModelRegistry,
        repositories: Sequence[Path],
        *,
        poll_s: float,
        settle_s: float,
        exit_on_error: bool = True,
        budget: MemoryBudget | None = None,
    ) -> None:
        self._loader = loader
        self._registry = registry
        self._repositories = tuple(repositories)
        self._store = store
        self._exit_on_error = exit_on_error
        # Enough for every complete model, and for one whose last file was just written.
        self._first_patience_s = 2 * settle_s + 1.0
        self._deployment_state = deployment_state
        self._change_detector = ChangeDetector(settle_s, read_manifest)
        self._updates = Updates(loader, deployment_state, store, budget=budget)
        self._inotify_watch = InotifyWatch(repositories)
        self.watcher = RepositoryWatcher(
            repositories,
            self._change_detector,
            self._updates.carry_out,
            poll_s=poll_s,
            wait=self._inotify_watch.wait,
            attend=self._attend,
        )

    def start(self, stop: threading.Event | None = None) -> None:
        """Load the last known good models; without any, load the models of the repositories.

        The start does not wait for a model whose files keep changing.

        Raises:
            ModelConfigError: no model has served yet, and a model fails to load or a repository
                cannot be read.
        """
        kept = self._updates.load_last_good(stop)
        if kept:
            for name, staged in kept.items():
                self._change_detector.accept(name, staged.source)
        else:
            self._load_first(stop or threading.Event())
        self.watcher.worker.start()

    def load(
        self,
        name: str,
        *,
        config: str | None = None,
        files: Mapping[str, bytes] = NO_FILES,
        within: str = "",
        cancellation: Cancellation | None = None,
    ) -> None:
        """See `ModelControl.load`."""
        del name, config, files, within, cancellation
        _refuse()

    def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """See `ModelControl.unload`."""
        del name, unload_dependents
        _refuse()

    def index(self, *, only_ready: bool) -> list[ModelEntry]:
        """See `ModelControl.index`."""
        entries = self._registry.snapshot.entries
        return [
            entry
            for _, entry in sorted(entries.items())
            if entry.state is ModelState.READY or not only_ready
        ]

    def poll_age_s(self, now: float) -> float:
        """Return the age of the last scan in seconds, at `now` (`time.monotonic()`)."""
        return self.watcher.age_s(now)

    def outcomes(self) -> dict[str, int]:
        """Return the number of changes by outcome; see `OUTCOMES`."""
        return self._deployment_state.outcomes()

    def close(self, timeout_s: float) -> None:
        """Stop the scans and clear the registry; wait up to `timeout_s` for models that close or
        load."""
        until = time.monotonic() + timeout_s
        # A disk that hangs may block the watcher; the models need part of the time, too.
        self.watcher.worker.stop(timeout_s / 2)
        self._updates.close()
        self._loader.close(max(0.0, until - time.monotonic()))
        self._inotify_watch.close()
        self._store.close()

    def _attend(self, now: float) -> Collection[str]:
        """Start the load retries that are due; return the models to stage again, which the store
        could not copy or which were released from quarantine."""
        self._updates.retry(now)
        try:
            self._updates.note_what_serves()
        except EdgeServerError as error:
            log.warning("repository: what serves is not kept for a restart: %s", error)
        self._deployment_state.write_again()
        return self._store.release_noted() | set(self._updates.to_stage_again(now))

    def _load_first(self, stop: threading.Event) -> None:
        looks, until = 0, math.inf
        while self.watcher.look(time.monotonic()):
            looks += 1
            until = min(until, time.monotonic() + self._first_patience_s)
            if looks > _FIRST_LOOKS and time.monotonic() > until:
                for name in sorted(self._change_detector.settling):
                    log.warning(
                        "model %s: its files keep changing; the start goes on without it, and it "
                        "is loaded once they stay as they are",
                        name,
                    )
                break
            if stop.wait(_FIRST_LOOKS_S):
                return
        model_names(self._repositories)  # raises, as in the other modes, where one cannot be read
        while not self._updates.wait_idle(_FIRST_LOOKS_S):
            if stop.is_set():
                return
        entries = self._registry.snapshot.entries.values()
        # As in the other modes, a directory that cannot be a model does not end the daemon.
        failed = [
            entry
            for entry in entries
            if entry.state is ModelState.UNAVAILABLE and is_model_name(entry.name)
        ]
        if failed and self._exit_on_error:
            raise cannot_be_loaded(failed)


def _refuse() -> None:
    raise Unavailable(NOT_ALLOWED)
