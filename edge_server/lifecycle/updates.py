"""Believed changes are carried out: staged, loaded beside what serves, swapped, kept."""

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

# A load that takes longer hangs, or is of a model that need not hold the others up.
LOAD_PATIENCE_S = 20.0


class Updates:
    """Carries out changes, each model's one after another, different models' beside each other.

    All changes of one look are staged before any of them is loaded, so that an ensemble and its
    members that changed together are found together. One model loads at a time; one that takes
    longer than `LOAD_PATIENCE_S` loads on, but holds the others up no more. Of the changes of a
    model that come meanwhile, the last one counts.

    What cannot be staged or loaded leaves what serves as it is, with the reason on the index, and
    is not tried again until its files change. Tried again are a model that there was no memory for,
    when there is; one that the store could not copy, its disk being full perhaps; and one that
    served before the daemon started and does not now, for a reason that may pass (a Python model's
    `initialize` raised, no GPU yet).

    Args:
        ledger: hears what becomes of each model.
        budget: the loader's.
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
        """Load what served last; by name, whether it could be loaded again or not.

        Those that a process has died of before, perhaps, are loaded last and each alone.
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
        """Begin with `changes`; returns once all of them are staged.

        Returns:
            The models that changed meanwhile: nothing was begun with them.
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
        """Load again what is due at `now` (`time.monotonic()`)."""
        for name, staged in self._load_retry.due(now).items():
            if self._serves(staged):
                # A retry of an ensemble that uses it has brought it along, or the other way round.
                self._load_retry.forget(name)
                continue
            with self._changed:
                if self._closed or name in self._busy:
                    continue
                log.info("model %s: loaded again: what it failed for may have passed", name)
                self._begin(name, _Work(staged, self._deployment_state.accept(staged)))

    def to_stage_again(self, now: float) -> Collection[str]:
        """The models that are to be staged again at `now` (`time.monotonic()`): the disk was full,
        or failed."""
        return self._staging_retry.due(now).keys()

    def note_what_serves(self) -> None:
        """Let the ledger know what serves by now, also what came or went back with another model.

        Raises:
            InternalError: it serves, but is not kept for a restart.
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
        """Whether within that time every change has been carried out."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy, timeout_s)

    def close(self) -> None:
        """Begin with nothing more."""
        with self._changed:
            self._closed = True
            self._waiting.clear()

    def _begin(self, name: str, work: _Work) -> None:
        """The caller holds the lock."""
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
        """What is to be done for `change`.

        Raises:
            TornModel: it changed meanwhile.
            EdgeServerError: it cannot be staged, or must not be loaded.
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
        """Carry out what waits for `name` until nothing does."""
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
            # Touched, moved or copied again, and still the same: that it serves is said again.
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
            # What fits nothing yet may fit with the next change of another model.
            self._deployment_state.decline(name, work.before)

    def _served_before(self, staged: StagedModel) -> bool:
        """Whether it is what served last, and nothing of that name serves now."""
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
    """What was delivered is in quarantine; `digest` is of its content."""

    def __init__(self, text: str, digest: str) -> None:
        super().__init__(text)
        self.digest = digest


class _Work:
    """What is to become of a model; no `staged` is: nothing any more."""

    def __init__(self, staged: StagedModel | None, before: StagedModel | None) -> None:
        self.staged = staged
        self.before = before


class LoadSlot:
    """Lets one load at a time; one that has taken its time holds the next up no more."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._holder: str | None = None
        self._since = 0.0

    @contextmanager
    def take(self, name: str) -> Iterator[None]:
        """Wait for the turn; it is the caller's inside, or until its patience is over."""
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
