"""Updates from the repository: stage a confirmed change, load it, publish it, commit it."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from edge_server.errors import (
    EdgeServerError,
    InternalError,
    ModelConfigError,
    Unavailable,
    may_pass,
)
from edge_server.lifecycle.budget import TooLittleMemory
from edge_server.lifecycle.model_locks import LoadSlot
from edge_server.lifecycle.model_spec import LoadFailure
from edge_server.lifecycle.records import Retry, Update
from edge_server.process.threads import GivenUp, start_thread
from edge_server.repository.content import TornModel

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable

    from edge_server.lifecycle.budget import MemoryBudget
    from edge_server.lifecycle.deployments import Deployments
    from edge_server.lifecycle.loader import RepositoryLoader
    from edge_server.lifecycle.model_spec import ModelSpec
    from edge_server.lifecycle.records import ModelRecord
    from edge_server.repository.change_detector import Change
    from edge_server.repository.store import StagedModel
    from edge_server.repository.tree import ModelTree

log = logging.getLogger(__name__)

# A longer load hangs or is of a slow model; the other models must not wait for it.
LOAD_TIMEOUT_S = 20.0
# Each staging writes the whole model to the disk.
STAGE_AGAIN_S = 300.0


class QuarantinedModel(ModelConfigError):
    """The delivered content is quarantined; `digest` is the digest of that content."""

    def __init__(self, text: str, digest: str) -> None:
        super().__init__(text)
        self.digest = digest


class Updates:
    """Applies changes: one after another for one model, in parallel for different models.

    All changes of one scan are staged before the first is loaded, so an ensemble and its members
    that changed together are read together. One model loads at a time; a load longer than
    `LOAD_TIMEOUT_S` continues, and the next load starts beside it. If a model changes again
    during its update, only the latest change counts: a load that takes long is given up for it.

    A change that cannot be staged or loaded leaves the serving versions as they are, with the
    reason on the index, and is not retried until the model's files change. Three failures are
    retried: something that the board lacks now (memory, once there is enough; memory of the GPU);
    a store that could not copy the model (a full disk, for example); and a model that served before
    the daemon started and now fails for a reason that may pass (a Python model's `initialize`
    raised, no GPU yet), whatever becomes of a later change until one serves.

    Args:
        loader: loads and unloads the models.
        deployments: stages each change, and reports its outcome.
        budget: the memory budget of the loader.
    """

    def __init__(
        self,
        loader: RepositoryLoader,
        deployments: Deployments,
        *,
        budget: MemoryBudget | None = None,
    ) -> None:
        self._loader = loader
        self._deployments = deployments
        self._table = deployments.table
        self._store = deployments.store
        self._budget = budget
        self._slot = LoadSlot(LOAD_TIMEOUT_S)
        self._closed = False

    def load_last_good(self, stop: threading.Event | None) -> dict[str, StagedModel]:
        """Load the last known good copies; return them by name, including those that failed.

        Copies during whose load a process may have died are loaded last, each alone.

        Args:
            stop: once set, no further copy is loaded.
        """
        kept = self._store.last_good()
        suspects = [copy for copy in kept.values() if self._store.suspected(copy.digest)]
        with ExitStack() as loading:
            for copy in kept.values():
                if copy not in suspects:
                    self._accept(copy)
                    loading.enter_context(self._store.loading(copy))
            self._loader.load_all(stop)
        for copy in suspects:
            if stop is not None and stop.is_set():
                break
            self._accept(copy)
            with self._store.loading(copy):
                self._loader.load(copy.name, stop=stop)
        if stop is not None and stop.is_set():
            return kept  # what was not loaded has not failed
        for name, copy in kept.items():
            with self._table.lock:
                record = self._table[name]
                serves, reason = record.serving is not None, record.reason
                waits = not serves and (record.may_pass or bool(record.needs_bytes))
                if waits:
                    record.keep_retry(copy, record.needs_bytes, time.monotonic())
            if serves:
                self._deployments.serves_again(copy)
            else:
                self._deployments.failed(name, reason, copy.digest, waits=waits)
        return kept

    def carry_out(self, changes: Iterable[Change]) -> list[str]:
        """Start the updates for `changes`; return once all of them are staged.

        Returns:
            The models whose files changed during staging; no update was started for them.
        """
        torn = []
        updates: dict[str, Update] = {}
        for change in changes:
            name = change.name
            self._forget_load(name)
            try:
                updates[name] = self._stage(name, change.tree)
                self._forget_staging(name)
            except TornModel as error:
                log.debug("model %s: %s", name, error)
                self._deployments.count("torn")
                torn.append(name)
            except QuarantinedModel as error:
                self._forget_staging(name)
                self._refuse(name, error, error.digest)
            except EdgeServerError as error:
                waits = may_pass(error)
                if waits:
                    with self._table.lock:
                        record = self._table[name]
                        record.staging = record.staging or Retry(time.monotonic())
                else:
                    self._forget_staging(name)
                self._refuse(name, error, waits=waits)
        with self._table.lock:
            for name, update in updates.items():
                self._begin(name, update)
        return torn

    def _stage(self, name: str, tree: ModelTree | None) -> Update:
        """Make a private copy of the model that `tree` describes; return the update to load it.

        Without a tree, return the update that removes the model.

        Raises:
            TornModel: the files changed during the copy.
            QuarantinedModel: the content must not be loaded.
            EdgeServerError: the model cannot be copied.
        """
        if tree is None:
            with self._table.lock:
                return self._table[name].withdraw()
        tree.require_usable()
        copy = self._store.stage(tree)
        if reason := self._store.quarantined(copy.digest):
            held = self._store.quarantined_as(copy.digest) or name
            raise QuarantinedModel(
                f"{tree.directory}: quarantined: {reason}; put another model there, or let it out "
                f"with `edge-server models release {held}`",
                copy.digest,
            )
        with self._deployments.reporting(name) as record:
            return record.deliver(copy, tree.directory)

    def retry(self, now: float) -> set[str]:
        """Start the load retries that are due at `now` (`time.monotonic()`) and for which there is
        enough memory; return the models to stage again, after a full or failing disk.

        The pause before the next retry of each of these models grows.
        """
        with self._table.lock:
            due = [
                (record.name, retry)
                for record in self._table
                for retry in (record.retry, record.staging)
                if retry is not None and now >= retry.not_before
            ]
        to_stage = set()
        for name, retry in due:
            if self._budget is not None and not self._budget.has(retry.needs_bytes):
                continue
            with self._table.lock:
                record, copy = self._table[name], retry.copy
                retry.pause(now)
                if retry not in (record.retry, record.staging):
                    continue
                if copy is None:
                    to_stage.add(name)
                elif record.serving_copy is copy:
                    # The retry of an ensemble has loaded this member already, or the reverse.
                    record.retry = None
                elif not (self._closed or record.updating):
                    log.info("model %s: loaded again: what it failed for may have passed", name)
                    self._begin(name, Update(copy, record.accept(copy)))
        return to_stage

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait for all updates to end; return whether they ended within `timeout_s` (None waits
        forever)."""
        with self._table.changed:
            return self._table.changed.wait_for(
                lambda: not any(record.updating for record in self._table), timeout_s
            )

    def close(self) -> None:
        """Start no further update."""
        with self._table.lock:
            self._closed = True
            for record in self._table:
                record.update = record.refusal = None

    def _accept(self, copy: StagedModel) -> None:
        with self._table.lock:
            self._table[copy.name].accept(copy)

    def _forget_staging(self, name: str) -> None:
        with self._table.lock:
            self._table.get(name).staging = None

    def _forget_load(self, name: str, failed: StagedModel | None = None) -> None:
        """Forget the retry of a load, unless nothing serves and it is of another copy than
        `failed`, which served last."""
        with self._table.lock:
            retry = self._table.get(name).retry
        copy = None if retry is None else retry.copy
        if copy is None or copy is failed or not self._served_before(copy):
            with self._table.lock:
                record = self._table.get(name)
                record.retry = None if record.retry is retry else record.retry

    def _begin(self, name: str, update: Update) -> None:
        """Queue `update` and start its thread; the caller holds the lock of the table."""
        if self._closed:
            return
        record = self._table[name]
        record.update, record.refusal = update, None
        self._start(record)

    def _start(self, record: ModelRecord) -> None:
        if not record.updating:
            name = record.name
            record.updating = start_thread(f"update-{name}", partial(self._work, name))
            if not record.updating:
                log.warning("model %s: updated with its next change: no thread is left", name)

    def _work(self, name: str) -> None:
        """Apply the queued updates of `name` until there is none, a refusal last."""
        while True:
            with self._table.changed:
                record = self._table[name]
                before = record.spec
                update, record.update = record.update, None
                if update is None:
                    update, record.refusal = record.refusal, None
                if update is None:
                    record.updating = False
                    self._table.changed.notify_all()
                    return
            digest = "" if update.copy is None else update.copy.digest
            try:
                self._apply(name, update)
                self._load_refused(name, before)
            except Unavailable:
                log.debug("model %s: not updated: the server ends", name)
            except EdgeServerError as error:
                self._refuse(name, error, digest)
            except Exception as error:
                log.exception("model %s: updating failed", name)
                text = f"model '{name}': unexpected {type(error).__name__}: {error}; see the log"
                if update.refusal is None:
                    self._refuse(name, InternalError(text), digest)

    def _apply(self, name: str, update: Update) -> None:
        if update.refusal is not None:
            self._loader.refuse(name, update.refusal)
            return
        copy = update.copy
        if copy is None:
            log.info("model %s: taken out of the repository", name)
            self._loader.lifecycle.unload(name)
            self._deployments.removed(name)
            self._loader.unload_absent(name)
            return
        with self._table.lock:
            serving = self._table[name].serving_copy
        if serving is not None and copy.digest == serving.digest:
            # Files touched, moved or copied again, content the same: the verdict is written again.
            self._deployments.unchanged(copy, serving)
            self._loader.load(name)
            return
        if reason := self._store.quarantined(copy.digest):
            # It was rolled back after this copy of it was staged.
            error = ModelConfigError(f"model '{name}': quarantined: {reason}")
            self._failed(name, update, copy, LoadFailure(error))
            return
        with self._slot.take(name), self._store.loading(copy):
            failure = self._loader.load(name).get(name)
        if failure is None:
            self._forget_load(name)
            self._deployments.count("loaded")
            self._deployments.note_serving()
        elif isinstance(failure.error, GivenUp):
            self._deployments.count("failed")  # the later change is reported
        else:
            self._failed(name, update, copy, failure)

    def _load_refused(self, name: str, before: ModelSpec | None) -> None:
        """Load the members of the ensemble `before` that waited for its change; without a change do
        nothing."""
        with self._table.lock:
            if before is None or self._table.get(name).spec is before:
                return
            for each in map(self._table.get, self._table.below(before)):
                copy, serves = each.accepted, each.serving_copy
                waits = copy is not None and serves is not None and copy is not serves
                if waits and not (each.updating or each.retry):
                    self._begin(each.name, Update(copy, serves))

    def _failed(self, name: str, update: Update, copy: StagedModel, failure: LoadFailure) -> None:
        error = failure.error
        needs_bytes = error.needed_bytes if isinstance(error, TooLittleMemory) else 0
        passes = isinstance(error, Unavailable) or (may_pass(error) and self._served_before(copy))
        with self._table.lock:
            retry = self._table[name].retry
        if not passes or (retry is not None and retry.copy is not copy):
            self._forget_load(name, copy)
        with self._table.lock:
            record = self._table[name]
            if passes and (record.retry is None or record.retry.copy is copy):
                record.keep_retry(copy, needs_bytes, time.monotonic())
            elif passes:
                # What served last comes first.
                record.staging = Retry(time.monotonic() + STAGE_AGAIN_S)
            if not failure.misfit:
                # A model that does not fit yet may fit after the next change of another model.
                record.decline(update)
        self._deployments.count("failed")
        self._deployments.failed(name, failure.reason, copy.digest, waits=passes or failure.misfit)

    def _served_before(self, copy: StagedModel) -> bool:
        """Return whether `copy` served last, and no version of that name serves now."""
        return self._table.serves(copy.name) is None and self._store.has_served(
            copy.name, copy.digest
        )

    def _refuse(
        self, name: str, error: EdgeServerError, digest: str = "", *, waits: bool = False
    ) -> None:
        self._deployments.count("failed")
        self._deployments.failed(name, str(error), digest, waits=waits)
        with self._table.lock:
            if not self._closed:
                # Not here: a load of the model, which may hang, would hold up the other models.
                self._table[name].refusal = Update(None, refusal=error)
                self._start(self._table[name])
