"""Updates from the repository: stage a confirmed change, load it, publish it, commit it."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from edge_server.errors import (
    EdgeServerError,
    InternalError,
    ModelConfigError,
    Unavailable,
    may_pass,
)
from edge_server.lifecycle.load_retry import LoadRetry
from edge_server.lifecycle.model_states import told
from edge_server.repository.content import TornModel
from edge_server.repository.store import StagedModel

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from edge_server.lifecycle.budget import MemoryBudget
    from edge_server.lifecycle.deployment_state import DeploymentState
    from edge_server.lifecycle.loader import RepositoryLoader
    from edge_server.repository.change_detector import Change
    from edge_server.repository.store import ModelStore

log = logging.getLogger(__name__)

# A longer load hangs or is of a slow model; the other models must not wait for it.
LOAD_PATIENCE_S = 20.0


class Updates:
    """Applies changes: one after another for one model, in parallel for different models.

    All changes of one scan are staged before the first is loaded, so an ensemble and its members
    that changed together are read together. One model loads at a time; a load longer than
    `LOAD_PATIENCE_S` continues, and the next load starts beside it. If a model changes again
    during its update, only the latest change counts.

    A change that cannot be staged or loaded leaves the serving versions as they are, with the
    reason on the index, and is not retried until the model's files change. Three failures are
    retried: too little memory, once there is enough; a store that could not copy the model (a full
    disk, for example); and a model that served before the daemon started and now fails for a
    reason that may pass (a Python model's `initialize` raised, no GPU yet).

    Args:
        loader: loads and unloads the models.
        deployment_state: records the outcome of each update.
        store: the store that the changes are staged in.
        budget: the memory budget of the loader.
        patience_s: the time after which a load no longer delays the next one.
    """

    def __init__(
        self,
        loader: RepositoryLoader,
        deployment_state: DeploymentState,
        store: ModelStore,
        *,
        budget: MemoryBudget | None = None,
        patience_s: float = LOAD_PATIENCE_S,
    ) -> None:
        self._load_retry: LoadRetry[StagedModel] = LoadRetry(budget)
        self._staging_retry: LoadRetry[None] = LoadRetry(None)
        self._loader = loader
        self._deployment_state = deployment_state
        self._store = store
        self._turn = LoadSlot(patience_s)
        self._changed = threading.Condition()
        self._waiting: dict[str, _Work] = {}
        self._busy: set[str] = set()
        self._closed = False
        self._noting = threading.Lock()

    def load_last_good(self, stop: threading.Event | None) -> dict[str, StagedModel]:
        """Load the last known good copies; return them by name, including those that failed.

        Copies during whose load a process may have died are loaded last, each alone.

        Args:
            stop: once set, no further copy is loaded.
        """
        kept = self._store.last_good()
        rollback_set = [staged for staged in kept.values() if self._store.suspected(staged.digest)]
        others = [staged for staged in kept.values() if staged not in rollback_set]
        with ExitStack() as loading:
            for staged in others:
                self._deployment_state.accept(staged)
                loading.enter_context(self._store.loading(staged))
            entries = self._loader.load_all(stop)
        failed = {entry.name: entry.reason for entry in entries}
        passing = {entry.name for entry in entries if entry.may_pass}
        for staged in rollback_set:
            if stop is not None and stop.is_set():
                break
            self._deployment_state.accept(staged)
            with self._store.loading(staged):
                failures = self._loader.load(staged.name)
            failed |= {name: told(failure) for name, failure in failures.items()}
            passing |= {name for name, failure in failures.items() if may_pass(failure.error)}
        for name, staged in kept.items():
            if name not in failed:
                self._deployment_state.serves_again(staged)
            else:
                waits = self._load_retry.keep(
                    name, staged, time.monotonic(), passes=name in passing
                )
                self._deployment_state.failed(name, failed[name], staged.digest, waits=waits)
        return kept

    def carry_out(self, changes: Sequence[Change]) -> list[str]:
        """Start the updates for `changes`; return once all of them are staged.

        Returns:
            The models whose files changed during staging; no update was started for them.
        """
        torn = []
        works = []
        for change in changes:
            self._load_retry.forget(change.name)
            try:
                works.append((change.name, self._prepare(change)))
                self._staging_retry.forget(change.name)
            except TornModel as error:
                log.debug("model %s: %s", change.name, error)
                self._deployment_state.count("torn")
                torn.append(change.name)
            except QuarantinedModel as error:
                self._refuse(change.name, error, error.digest)
            except EdgeServerError as error:
                waits = may_pass(error)
                if waits:
                    now = time.monotonic()
                    self._staging_retry.keep(change.name, None, now, passes=True)
                else:
                    self._staging_retry.forget(change.name)
                self._refuse(change.name, error, waits=waits)
        with self._changed:
            for name, work in works:
                if self._closed:
                    break
                self._begin(name, work)
        return torn

    def retry(self, now: float) -> None:
        """Start the load retries that are due at `now` (`time.monotonic()`)."""
        for name, staged in self._load_retry.due(now).items():
            if self._serves(staged):
                # The retry of an ensemble has loaded this member already, or the reverse.
                self._load_retry.forget(name)
                continue
            with self._changed:
                if self._closed or name in self._busy:
                    continue
                log.info("model %s: loaded again: what it failed for may have passed", name)
                self._begin(name, _Work(staged, self._deployment_state.accept(staged)))

    def to_stage_again(self, now: float) -> Collection[str]:
        """Return the models to stage again at `now` (`time.monotonic()`), after a full or failing
        disk."""
        return self._staging_retry.due(now).keys()

    def note_what_serves(self) -> None:
        """Record the serving copies in the deployment state, including copies that were published
        or rolled back with another model.

        Raises:
            InternalError: a copy serves, but the store could not commit it for a restart.
        """
        for name in self._loader.names_on_disk():
            model_spec = self._loader.serves(name)
            staged = None if model_spec is None else model_spec.files.holder
            with self._noting:
                if (
                    isinstance(staged, StagedModel)
                    and self._deployment_state.serving(name) is not staged
                    and not self._store.quarantined(staged.digest)
                ):
                    self._deployment_state.serves(staged, on_trial=self._loader.on_trial(name))

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait for all updates to end; return whether they ended within `timeout_s` (None waits
        forever)."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy, timeout_s)

    def close(self) -> None:
        """Start no further update."""
        with self._changed:
            self._closed = True
            self._waiting.clear()

    def _begin(self, name: str, work: _Work) -> None:
        """Queue `work` for `name` and start its thread; the caller holds the lock."""
        self._waiting[name] = work
        if name not in self._busy:
            thread = threading.Thread(
                target=self._work, args=(name,), name=f"update-{name}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                log.warning("model %s: updated with its next change: %s", name, error)
                return
            self._busy.add(name)

    def _prepare(self, change: Change) -> _Work:
        """Stage `change` and return the work for it.

        Raises:
            TornModel: the files changed during staging.
            EdgeServerError: the model cannot be staged, or must not be loaded.
        """
        tree = change.tree
        if tree is None:
            return _Work(None, None)
        if tree.fault:
            raise ModelConfigError(tree.fault)
        staged = self._store.stage(tree)
        if reason := self._store.quarantined(staged.digest):
            raise QuarantinedModel(
                f"{tree.directory}: quarantined: {reason}; put another model there, or let it out "
                f"with `edge-server models release {tree.name}`",
                staged.digest,
            )
        return _Work(staged, self._deployment_state.accept(staged, tree.directory))

    def _work(self, name: str) -> None:
        """Apply the queued updates of `name` until the queue is empty."""
        while True:
            with self._changed:
                work = self._waiting.pop(name, None)
                if work is None:
                    self._busy.discard(name)
                    self._changed.notify_all()
                    return
            try:
                self._carry_out(name, work)
            except Unavailable:
                log.debug("model %s: not updated: the server ends", name)
            except Exception as error:
                log.exception("model %s: updating failed", name)
                text = f"model '{name}': unexpected {type(error).__name__}: {error}; see the log"
                digest = "" if work.staged is None else work.staged.digest
                self._refuse(name, InternalError(text), digest)

    def _carry_out(self, name: str, work: _Work) -> None:
        staged, serving = work.staged, self._deployment_state.serving(name)
        if staged is None:
            log.info("model %s: taken out of the repository", name)
            self._loader.unload(name)
            self._deployment_state.gone(name)
            return
        if serving is not None and staged.digest == serving.digest:
            # Files touched, moved or copied again, content the same: the verdict is written again.
            self._deployment_state.same_as_before(staged, serving)
            self._loader.load(name)
            return
        with self._turn.take(name), self._store.loading(staged):
            failures = self._loader.load(name)
        failure = failures.get(name)
        if failure is None:
            self._load_retry.forget(name)
            self._deployment_state.count("loaded")
            self.note_what_serves()
            return
        self._deployment_state.count("failed")
        is_short = isinstance(failure.error, Unavailable)
        passes = may_pass(failure.error) and self._served_before(staged)
        if is_short or passes:
            self._load_retry.keep(name, staged, time.monotonic(), passes=passes)
        else:
            self._load_retry.forget(name)
        waits = is_short or passes or failure.misfit
        self._deployment_state.failed(name, told(failure), staged.digest, waits=waits)
        if not failure.misfit:
            # A model that does not fit yet may fit after the next change of another model.
            self._deployment_state.decline(name, work.before)

    def _served_before(self, staged: StagedModel) -> bool:
        """Return whether `staged` served last, and no version of that name serves now."""
        is_away = self._loader.serves(staged.name) is None
        return is_away and self._store.has_served(staged.name, staged.digest)

    def _serves(self, staged: StagedModel) -> bool:
        model_spec = self._loader.serves(staged.name)
        return model_spec is not None and model_spec.files.holder is staged

    def _refuse(
        self, name: str, error: EdgeServerError, digest: str = "", *, waits: bool = False
    ) -> None:
        self._deployment_state.count("failed")
        self._deployment_state.failed(name, str(error), digest, waits=waits)
        try:
            self._loader.refuse(name, error)
        except Unavailable:
            log.debug("model %s: not refused: the server ends", name)


class QuarantinedModel(ModelConfigError):
    """The delivered content is quarantined; `digest` is the digest of that content."""

    def __init__(self, text: str, digest: str) -> None:
        super().__init__(text)
        self.digest = digest


class _Work:
    """One queued update: the copy to load, and the copy accepted before it.

    `staged` None means that the model was removed from the repository.
    """

    def __init__(self, staged: StagedModel | None, before: StagedModel | None) -> None:
        self.staged = staged
        self.before = before


class LoadSlot:
    """Allows one load at a time; a load longer than `patience_s` no longer blocks the next."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._holder: str | None = None
        self._since = 0.0

    @contextmanager
    def take(self, name: str) -> Iterator[None]:
        """Wait for the slot and hold it inside the block, at most until `patience_s` is over."""
        with self._changed:
            while self._holder is not None:
                left_s = self._since + self._patience_s - time.monotonic()
                if left_s <= 0:
                    log.warning("model %s: still loads; others load beside it", self._holder)
                    break
                self._changed.wait(left_s)
            self._holder, self._since = name, time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                if self._holder == name:
                    self._holder = None
                    self._changed.notify_all()
