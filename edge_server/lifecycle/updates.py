"""Believed changes are carried out: staged, loaded beside what serves, swapped, kept."""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from edge_server.errors import EdgeServerError, InternalError, ModelConfigError, Unavailable
from edge_server.lifecycle.memory_retry import MemoryRetry
from edge_server.lifecycle.model_states import told
from edge_server.process.backoff import Backoff
from edge_server.repository.content import TornModel
from edge_server.repository.store import StagedModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from edge_server.lifecycle.budget import MemoryBudget
    from edge_server.lifecycle.deployment_state import DeploymentState
    from edge_server.lifecycle.loader import RepositoryLoader
    from edge_server.repository.change_detector import Change
    from edge_server.repository.store import ModelStore

log = logging.getLogger(__name__)

# A load that takes longer hangs, or is of a model that need not hold the others up.
LOAD_PATIENCE_S = 20.0
# Between two tries to stage a model that the store had no room for.
_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 60.0


class Updates:
    """Carries out changes, each model's one after another, different models' beside each other.

    All changes of one look are staged before any of them is loaded, so that an ensemble and its
    members that changed together are found together. One model loads at a time; one that takes
    longer than `LOAD_PATIENCE_S` loads on, but holds the others up no more. Of the changes of a
    model that come meanwhile, the last one counts.

    What cannot be staged or loaded leaves what serves as it is, with the reason on the index, and
    is not tried again until its files change; but what there was no memory for is, when there is,
    and what the store could not take is staged again after longer and longer pauses.

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
        self._staging_retry: dict[str, _StagingRetry] = {}
        self._memory_retry: MemoryRetry[StagedModel] = MemoryRetry(budget)
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
            failed = {entry.name: entry.reason for entry in self._loader.load_all(stop)}
        for staged in rollback_set:
            if stop is not None and stop.is_set():
                break
            self._deployment_state.accept(staged)
            with self._store.loading(staged):
                failures = self._loader.load(staged.name)
                failed |= {name: told(failure) for name, failure in failures.items()}
        for name, staged in kept.items():
            if name not in failed:
                self._deployment_state.serves_again(staged)
            else:
                self._deployment_state.failed(name, failed[name], staged.digest)
                self._memory_retry.keep(name, staged, time.monotonic())
        return kept

    def carry_out(self, changes: Sequence[Change]) -> list[str]:
        """Begin with `changes`; returns once all of them are staged.

        Returns:
            The models that changed meanwhile: nothing was begun with them.
        """
        torn = []
        works = []
        for change in changes:
            self._memory_retry.forget(change.name)
            try:
                works.append((change.name, self._prepare(change)))
                self._staging_retry.pop(change.name, None)
            except TornModel as error:
                log.debug("model %s: %s", change.name, error)
                self._deployment_state.count("torn")
                torn.append(change.name)
            except QuarantinedModel as error:
                self._refuse(change.name, error, error.digest)
            except InternalError as error:
                # The disk is full or ails: nothing is wrong with the model.
                retry = self._staging_retry.setdefault(change.name, _StagingRetry())
                retry.pause(time.monotonic())
                self._refuse(change.name, error, waits=True)
            except EdgeServerError as error:
                self._staging_retry.pop(change.name, None)
                self._refuse(change.name, error)
        with self._changed:
            for name, work in works:
                if self._closed:
                    break
                self._begin(name, work)
        return torn

    def due_for_staging(self, now: float) -> set[str]:
        """The models that the store could not take, to be staged again by `now` (monotonic).

        `carry_out` and this are called by one thread.
        """
        due = {name for name, retry in self._staging_retry.items() if now >= retry.not_before}
        for name in due:
            self._staging_retry[name].not_before = math.inf  # until `carry_out` has tried
        return due

    def retry(self, now: float) -> None:
        """Begin with what there was no memory for and is by now (`time.monotonic()`)."""
        for name, staged in self._memory_retry.due(now).items():
            with self._changed:
                if self._closed or name in self._busy:
                    continue
                log.info("model %s: there is memory for it by now: loaded again", name)
                self._begin(name, _Work(staged, self._deployment_state.accept(staged)))

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
            self._memory_retry.forget(name)
            self._deployment_state.count("loaded")
            self.note_what_serves()
            return
        self._deployment_state.count("failed")
        is_short = isinstance(failure.error, Unavailable)
        waits = is_short or failure.misfit
        self._deployment_state.failed(name, told(failure), staged.digest, waits=waits)
        if is_short:
            self._memory_retry.keep(name, staged, time.monotonic())
        else:
            self._memory_retry.forget(name)
        if not failure.misfit:
            # What fits nothing yet may fit with the next change of another model.
            self._deployment_state.decline(name, work.before)

    def _refuse(
        self, name: str, error: EdgeServerError, digest: str = "", *, waits: bool = False
    ) -> None:
        self._deployment_state.count("failed")
        self._deployment_state.failed(name, str(error), digest, waits=waits)
        try:
            self._loader.refuse(name, error)
        except Unavailable:
            log.debug("model %s: not refused: the server ends", name)


class _StagingRetry:
    """`not_before` is a time of `time.monotonic()`."""

    def __init__(self) -> None:
        self.not_before = 0.0
        self._pauses = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)

    def pause(self, now: float) -> None:
        self.not_before = now + self._pauses.next_s()


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
