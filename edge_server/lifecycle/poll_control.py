"""Mode POLL: what served last is there at once, and every change that is believed follows."""

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
# A slow disk gets so many looks at the first start, however long they take.
_FIRST_LOOKS = 5


class PollControl:
    """A `ModelControl` that follows repositories; nothing is loaded or unloaded on request.

    Args:
        loader: of the same registry, over what `ledger` accepts, and telling it.
        exit_on_error: a model that cannot be loaded when nothing has served yet ends the daemon.
        budget: the loader's; what it refused is loaded when there is memory.
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
        # Time for every model that nobody writes to, and for one that was just finished.
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
        """Serve what served last; where there is nothing of the kind, what is in the repositories.

        A model that somebody keeps writing to is not waited for.

        Raises:
            ModelConfigError: nothing has served yet, and a model cannot be loaded or a repository
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
        """How long ago, at `time.monotonic()`, the repositories were looked at."""
        return self.watcher.age_s(now)

    def outcomes(self) -> dict[str, int]:
        """How many changes have come to which end; see `OUTCOMES`."""
        return self._deployment_state.outcomes()

    def close(self, timeout_s: float) -> None:
        """Look no more, forget every model; wait that long for what closes and loads."""
        until = time.monotonic() + timeout_s
        # A disk that does not answer may hold it; models need some of the time, too.
        self.watcher.worker.stop(timeout_s / 2)
        self._updates.close()
        self._loader.close(max(0.0, until - time.monotonic()))
        self._inotify_watch.close()
        self._store.close()

    def _attend(self, now: float) -> Collection[str]:
        """The models that are to be staged again: the store had no room for them, or they were
        released from quarantine. Loads that are due again begin."""
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
        # As in the other modes, a directory that can be no model ends nothing.
        failed = [
            entry
            for entry in entries
            if entry.state is ModelState.UNAVAILABLE and is_model_name(entry.name)
        ]
        if failed and self._exit_on_error:
            raise cannot_be_loaded(failed)


def _refuse() -> None:
    raise Unavailable(NOT_ALLOWED)
