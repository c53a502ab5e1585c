"""Updates from the repository, in mode POLL: stage a change, load it, report and commit it."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from edge_server.errors import (
    EdgeServerError,
    InternalError,
    ModelConfigError,
    Unavailable,
    may_pass,
)
from edge_server.lifecycle.loader import LoadSlot
from edge_server.lifecycle.model_spec import LoadFailure
from edge_server.lifecycle.records import Retry, Update
from edge_server.process.threads import GivenUp, start_thread
from edge_server.repository.content import TornModel
from edge_server.repository.scan import files_in
from edge_server.repository.store import StagedModel
from edge_server.repository.verdicts import GOOD, ON_TRIAL, REFUSED, WAITS, VerdictFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from edge_server.lifecycle.build import MemoryBudget
    from edge_server.lifecycle.loader import RepositoryLoader
    from edge_server.lifecycle.model_spec import ModelSpec
    from edge_server.lifecycle.records import ModelRecord, ModelTable
    from edge_server.model_config.files import ModelFiles
    from edge_server.repository.change_detector import Change
    from edge_server.repository.scan import ModelTree
    from edge_server.repository.store import ModelStore
    from edge_server.repository.verdicts import Verdict

log = logging.getLogger(__name__)

# `torn`: the model changed while the store copied it, and is scanned again; `failed`: the
# predecessor continues to serve.
OUTCOMES = ("loaded", "unchanged", "removed", "torn", "failed", "rolled_back")
# A longer load hangs or is of a slow model; the other models must not wait for it.
LOAD_TIMEOUT_S = 20.0
# Each staging writes the whole model to the disk.
STAGE_AGAIN_S = 300.0


class Deployments:
    """Keeps the store and the verdicts consistent with the records. Thread-safe.

    As a `ModelSource` it finds the copies that the records accept.
    """

    where = "the accepted copies of the model repositories"

    def __init__(self, table: ModelTable, store: ModelStore, repositories: Sequence[Path]) -> None:
        self.table = table
        self.store = store
        self._verdicts = VerdictFile(store.directory, repositories)
        self._noting = threading.Lock()
        self._outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))

    def all(self) -> Mapping[str, ModelFiles | ModelConfigError]:
        """See `ModelSource.all`."""
        found = {name: self.find(name) for name in self.names()}
        return {name: files for name, files in found.items() if files is not None}

    def find(self, name: str) -> ModelFiles | ModelConfigError | None:
        """See `ModelSource.find`."""
        with self.table.lock:
            record = self.table.get(name)
            copy, shown = record.accepted, record.shown
        if copy is None:
            return None
        try:
            files = replace(files_in(copy.directory), fingerprint=copy.fingerprint)
        except ModelConfigError as error:
            return error
        return replace(files, holder=copy, shown=shown)

    def names(self) -> Mapping[str, int]:
        """See `ModelSource.names`."""
        with self.table.lock:
            names = sorted(record.name for record in self.table if record.accepted is not None)
        return dict.fromkeys(names, 1)

    def count(self, outcome: str) -> None:
        """Count one more change with `outcome`, one of `OUTCOMES`."""
        with self.table.lock:
            self._outcomes[outcome] += 1

    def outcomes(self) -> dict[str, int]:
        """Return the number of changes by outcome."""
        with self.table.lock:
            return dict(self._outcomes)

    @contextmanager
    def reporting(self, name: str) -> Iterator[ModelRecord]:
        """Give the record of `name`, locked, and write the verdicts after the block."""
        with self.table.lock:
            yield self.table[name]
        self._write()

    def failed(self, name: str, reason: str, digest: str = "", *, waits: bool = False) -> None:
        """Report that the new content of `name` does not serve; the predecessor still does.

        Args:
            digest: the digest of the content; empty if the content could not be read.
            waits: True if the daemon retries the load.
        """
        with self.reporting(name) as record:
            record.report(WAITS if waits else REFUSED, digest, reason)

    def serves_again(self, copy: StagedModel) -> None:
        """Report that `copy`, the last known good copy, serves again after a restart."""
        with self.reporting(copy.name) as record:
            record.deployed = copy
            record.is_good(copy)

    def unchanged(self, copy: StagedModel, serving: StagedModel) -> None:
        """Report that `copy` has the content of `serving`, so a restart need not copy it again."""
        self.count("unchanged")
        with self.table.lock:
            record = self.table[copy.name]
            record.unchanged(copy, serving)
            is_good = record.last_good is serving
        if is_good:
            try:
                self.store.commit(copy)
            except EdgeServerError as error:
                log.warning("model %s: is copied again after a restart: %s", copy.name, error)
        with self.reporting(copy.name) as record:
            outcome = GOOD if is_good else WAITS if record.stays else ON_TRIAL
            record.report(outcome, copy.digest, record.stays)

    def note_serving(self) -> None:
        """Report the copies that serve now, also those that were published or rolled back with
        another model, and commit those without a canary as last known good.

        A copy that the store could not commit is tried again by the next call.
        """
        with self._noting:
            with self.table.lock:
                copies = [
                    r.serving_copy
                    for r in self.table
                    if r.deployed is not r.serving_copy or r.not_kept is r.serving_copy
                ]
            new = [c for c in copies if c is not None and not self.store.quarantined(c.digest)]
            if not new:
                return
            with self.table.lock:
                due = [copy for copy in new if self.table[copy.name].report_serving(copy)]
            self._write()
            for copy in due:
                self._commit(copy)

    def passed(self, model_spec: ModelSpec) -> None:
        """Commit the copy of `model_spec`, which passed its canary, as last known good."""
        copy = model_spec.files.holder
        if not isinstance(copy, StagedModel):
            return
        with self.table.lock:
            record = self.table.get(copy.name)
            is_due = record.serving_copy is copy and record.last_good is not copy
        if is_due:
            self._commit(copy)

    def quarantine(self, model_spec: ModelSpec, reason: str) -> None:
        """Quarantine the content of `model_spec`, which is rolled back for `reason`."""
        copy = model_spec.files.holder
        if isinstance(copy, StagedModel):
            self.store.quarantine(copy.digest, f"rolled back: {reason}", copy.name)

    def rolled_back(self, model_spec: ModelSpec, reason: str) -> None:
        """Report the rollback of `model_spec`, whose content is in quarantine."""
        copy = model_spec.files.holder
        if not isinstance(copy, StagedModel):
            return
        self.count("rolled_back")
        with self.reporting(copy.name) as record:
            record.rolled_back(copy, reason)

    def has_served(self, model_spec: ModelSpec) -> bool:
        """Return whether the store still holds the content as one that served under this name."""
        copy = model_spec.files.holder
        return isinstance(copy, StagedModel) and self.store.has_served(copy.name, copy.digest)

    def release_noted(self) -> set[str]:
        """Release what is noted to leave quarantine; return the models to stage again: those that
        had the content, and those that were refused for it."""
        released = self.store.release_noted()
        with self.table.lock:
            refused = {record.name for record in self.table if record.digest in released}
        return refused | set(released.values())

    def removed(self, name: str) -> None:
        """Forget `name`, which was removed from the repository."""
        self.count("removed")
        with self.reporting(name) as record:
            record.removed()
        self.store.forget(name)

    def write_again(self) -> None:
        """Write the verdicts again if the last write failed, for example on a full disk."""
        if self._verdicts.failed:
            self._write()

    def _commit(self, copy: StagedModel) -> None:
        try:
            self.store.commit(copy)
        except EdgeServerError as error:
            with self.reporting(copy.name) as record:
                is_news = record.cannot_keep(copy, str(error))
            if is_news:
                log.warning("model %s: is not kept for a restart: %s", copy.name, error)
            return
        with self.reporting(copy.name) as record:
            record.is_good(copy)
        log.info("model %s: last known good is now %.12s", copy.name, copy.digest)

    def _write(self) -> None:
        # At the end of the daemon nothing serves any more, which is no news of a model.
        if not self.table.over:
            self._verdicts.write(self._by_name)

    def _by_name(self) -> dict[str, Verdict]:
        directory = self.store.directory
        with self.table.lock:
            return {r.name: r.verdict(directory) for r in self.table if r.outcome}


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
        passes = isinstance(error, Unavailable) or (may_pass(error) and self._served_before(copy))
        with self._table.lock:
            retry = self._table[name].retry
        if not passes or (retry is not None and retry.copy is not copy):
            self._forget_load(name, copy)
        with self._table.lock:
            record = self._table[name]
            if passes and (record.retry is None or record.retry.copy is copy):
                record.keep_retry(copy, failure.needed_bytes, time.monotonic())
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
