"""Updates from the repository, in mode POLL: stage a change, load it, report and commit it."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter
from contextlib import ExitStack, nullcontext
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
from edge_server.lifecycle.deployment import Loading, Uncopied, Waiting
from edge_server.lifecycle.lifecycle import CanaryOutcomes
from edge_server.lifecycle.model_spec import LoadFailure
from edge_server.lifecycle.records import copy_of
from edge_server.process.threads import GivenUp, start_thread
from edge_server.repository.content import TornModel
from edge_server.repository.scan import files_in
from edge_server.repository.verdicts import VerdictFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from edge_server.lifecycle.deployment import Delivery
    from edge_server.lifecycle.loader import RepositoryLoader
    from edge_server.lifecycle.model_spec import ModelSpec
    from edge_server.lifecycle.records import ModelRecord, ModelTable
    from edge_server.model_config.files import ModelFiles
    from edge_server.repository.change_detector import Change
    from edge_server.repository.scan import ModelTree
    from edge_server.repository.store import ModelStore, StagedModel
    from edge_server.repository.verdicts import Verdict

log = logging.getLogger(__name__)

# `torn`: the model changed while the store copied it, and is scanned again; `failed`: the
# predecessor continues to serve.
OUTCOMES = ("loaded", "unchanged", "removed", "torn", "failed", "rolled_back")
# A longer load hangs or is of a slow model; the other models must not wait for it.
LOAD_TIMEOUT_S = 20.0


class Deployments(CanaryOutcomes):
    """Keeps the store and the verdicts consistent with the records. Thread-safe. As a `ModelSource`
    it finds the copies that the records accept."""

    where = "the accepted copies of the model repositories"

    def __init__(self, table: ModelTable, store: ModelStore, repositories: Sequence[Path]) -> None:
        self.table = table
        self.store = store
        self._verdicts = VerdictFile(store.directory, repositories)
        self._noting = threading.Lock()
        self._outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))

    def all(self) -> Mapping[str, ModelFiles | ModelConfigError]:
        found = {name: self.find(name) for name in self.names()}
        return {name: files for name, files in found.items() if files is not None}

    def find(self, name: str) -> ModelFiles | ModelConfigError | None:
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
        with self.table.lock:
            names = sorted(record.name for record in self.table if record.accepted is not None)
        return dict.fromkeys(names, 1)

    def count(self, outcome: str) -> None:
        with self.table.lock:
            self._outcomes[outcome] += 1

    def outcomes(self) -> dict[str, int]:
        with self.table.lock:
            return dict(self._outcomes)

    def report(self) -> None:
        """Write the verdicts that differ from the written ones."""
        # At the end of the daemon nothing serves any more, which is no news of a model.
        if not self.table.over:
            self._verdicts.write(self._by_name)

    def judge(self, name: str, served: str, text: str) -> None:
        """Note what was found of the serving content of `name` as a candidate for `served`."""
        with self.table.lock:
            record = self.table[name]
            if (copy := record.serving_copy) is not None:
                record.candidate = copy.digest, text, served
        self.report()

    def verdict(self, name: str) -> Verdict:
        with self.table.lock:
            return self.table.get(name).verdict(self.store.directory)

    def unchanged(self, copy: StagedModel, serving: StagedModel) -> None:
        """Note that `copy` has the content of `serving`, so a restart need not copy it again."""
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
        self.report()

    def note_serving(self) -> None:
        """Commit the copies that serve without a canary as last known good, and report all. A copy
        that the store could not commit is tried again by the next call."""
        with self._noting:
            with self.table.lock:
                copies = [record.uncommitted for record in self.table]
            for copy in copies:
                if copy is not None and not self.store.quarantined(copy.digest):
                    self._commit(copy)
        self.report()

    def passed(self, model_spec: ModelSpec) -> None:
        """Commit the copy of `model_spec`, which passed its canary, as last known good."""
        copy = copy_of(model_spec)
        if copy is None:
            return
        with self.table.lock:
            record = self.table.get(copy.name)
            is_due = record.serving_copy is copy and record.last_good is not copy
        if is_due:
            self._commit(copy)
            self.report()

    def quarantine(self, model_spec: ModelSpec, reason: str, *, only_this: bool) -> None:
        """Quarantine the content of `model_spec`, or only its configuration of that content, which
        is rolled back for `reason`."""
        copy = copy_of(model_spec)
        if copy is not None:
            digest = _digest_of(model_spec, copy) if only_this else copy.digest
            self.store.quarantine(digest, f"rolled back: {reason}", copy.name)
            if not only_this:
                self.table[copy.name].rolled_back(copy, reason)

    def why_not(self, model_spec: ModelSpec) -> str:
        copy = copy_of(model_spec)
        if copy is None or model_spec.fallback is None:
            return ""
        reason = self.store.quarantined(_digest_of(model_spec, copy))
        hint = f"let it out with `edge-server models release {copy.name}`"
        return f"quarantined: {reason}; {hint}" if reason else ""

    def loading(self, model_spec: ModelSpec) -> AbstractContextManager[None]:
        copy = copy_of(model_spec)
        if copy is None or model_spec.fallback is None:
            return nullcontext()
        return self.store.loading(copy, _digest_of(model_spec, copy))

    def rolled_back(self, model_spec: ModelSpec) -> None:
        if copy_of(model_spec) is not None:
            self.count("rolled_back")
            self.report()

    def has_served(self, model_spec: ModelSpec) -> bool:
        copy = copy_of(model_spec)
        return copy is not None and self.store.has_served(copy.name, copy.digest)

    def release_noted(self) -> set[str]:
        """Release what is noted to leave quarantine; return the models to stage again: those that
        had the content, and those that were refused for it."""
        released = self.store.release_noted()
        with self.table.lock:
            refused = {record.name for record in self.table if record.outcome.digest in released}
        return refused | set(released.values())

    def removed(self, name: str) -> None:
        self.count("removed")
        with self.table.lock:
            self.table[name].removed()
        self.report()
        self.store.forget(name)

    def _commit(self, copy: StagedModel) -> None:
        record = self.table[copy.name]
        try:
            self.store.commit(copy)
        except EdgeServerError as error:
            with self.table.lock:
                is_news, record.late = not record.late, str(error)
            if is_news:
                log.warning("model %s: is not kept for a restart: %s", copy.name, error)
            return
        with self.table.lock:
            record.is_good(copy)
        log.info("model %s: last known good is now %.12s", copy.name, copy.digest)

    def _by_name(self) -> dict[str, Verdict]:
        with self.table.lock:
            found = {record.name: record.verdict(self.store.directory) for record in self.table}
        return {name: verdict for name, verdict in found.items() if verdict.outcome}


def _digest_of(model_spec: ModelSpec, copy: StagedModel) -> str:
    """Return the digest of one of the configurations of `copy`."""
    text = f"{copy.digest} {model_spec.files.config_name}"
    return hashlib.sha256(text.encode()).hexdigest()


class QuarantinedModel(ModelConfigError):
    """The delivered content is quarantined; `digest` is the digest of that content."""

    def __init__(self, text: str, digest: str) -> None:
        super().__init__(text)
        self.digest = digest


class Updates:
    """Applies changes: one after another for one model, in parallel for different models.

    All changes of one scan are staged before the first is loaded, so an ensemble and its members
    that changed together are read together. One model loads at a time; a load longer than
    `LOAD_TIMEOUT_S` continues, and the next starts beside it. Only the latest change of a model
    counts: a load that takes long is given up for it.

    A change that cannot be staged or loaded leaves the serving versions as they are, with the
    reason on the index. Three failures are retried without a change of the files: something that
    the board lacks now (memory, also of the GPU); a store that could not copy the model (a full
    disk); and a model that served before the daemon started and now fails for a reason that may
    pass, until a version serves."""

    def __init__(self, loader: RepositoryLoader, deployments: Deployments) -> None:
        self._loader = loader
        self._deployments = deployments
        self._table = deployments.table
        self._store = deployments.store
        self._budget = loader.lifecycle.build.budget
        self._slot = threading.Semaphore()
        self._closed = False

    def load_last_good(self, stop: threading.Event | None) -> dict[str, StagedModel]:
        """Load the last known good copies; return them by name, including those that failed. Copies
        during whose load a process may have died are loaded last, each alone."""
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
        with self._table.lock:
            for name, copy in kept.items():
                record = self._table[name]
                if record.serving is not None:
                    record.is_good(copy)
                    continue
                kind = Unavailable if record.may_pass else ModelConfigError
                # An ensemble without a member that fits is served as soon as there is one.
                failure = LoadFailure(kind(record.reason), misfit=record.coming is not None)
                now = time.monotonic()
                record.not_loaded(copy, failure, now, passes=record.may_pass, served=True)
        self._deployments.report()
        return kept

    def _accept(self, copy: StagedModel) -> None:
        with self._table.lock:
            self._table[copy.name].delivery = Loading(copy)

    def carry_out(self, changes: Iterable[Change]) -> list[str]:
        """Start the updates for `changes`; return once all of them are staged.
        Returns: The models whose files changed during staging; no update was started for them."""
        torn: list[str] = []
        due: dict[str, Callable[[], None]] = {}
        for change in changes:
            name = change.name
            try:
                due[name] = self._stage(name, change.tree)
            except TornModel as error:
                log.debug("model %s: %s", name, error)
                self._deployments.count("torn")
                torn.append(name)
            except EdgeServerError as error:
                self._refuse(name, error, waits=may_pass(error))
        with self._table.lock:
            for name, job in due.items():
                self._queue(self._table[name], job)
        return torn

    def _stage(self, name: str, tree: ModelTree | None) -> Callable[[], None]:
        """Make a private copy of the model that `tree` describes; return what loads it, or without
        a tree, what removes the model."""
        if tree is None:
            with self._table.lock:
                self._table[name].withdraw()
            return partial(self._remove, name)
        tree.require_usable()
        copy = self._store.stage(tree)
        if reason := self._store.quarantined(copy.digest):
            held = self._store.quarantined_as(copy.digest) or name
            raise QuarantinedModel(
                f"{tree.directory}: quarantined: {reason}; put another model there, or let it out "
                f"with `edge-server models release {held}`",
                copy.digest,
            )
        with self._table.lock:
            self._table[name].deliver(copy, tree.directory)
        self._deployments.report()
        return partial(self._load, name)

    def retry(self, now: float) -> set[str]:
        """Start the load retries that are due at `now` (`time.monotonic()`) and for which there is
        enough memory; return the models to stage again, after a full or failing disk. The pause
        before the next retry of each of these models grows."""
        with self._table.lock:
            # What served last comes first.
            failed = [(r, each) for r in self._table for each in (r.again, r.delivery)]
        to_stage = set()
        for record, each in failed:
            retry = each.retry if isinstance(each, Waiting | Uncopied) else None
            if retry is None or now < retry.not_before:
                continue
            if self._budget is not None and not self._budget.has(retry.needs_bytes):
                continue
            with self._table.lock:
                if each not in (record.again, record.delivery):
                    continue
                if isinstance(each, Uncopied):
                    retry.pause(now)
                    to_stage.add(record.name)
                elif isinstance(each, Waiting) and not (self._closed or record.updating):
                    retry.pause(now)
                    log.info(
                        "model %s: loaded again: what it failed for may have passed", record.name
                    )
                    record.load_again(each)
                    self._queue(record, partial(self._load, record.name))
        return to_stage

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait for all updates to end; return whether they ended within `timeout_s` (None waits
        forever)."""
        with self._table.changed:
            return self._table.changed.wait_for(
                lambda: not any(record.updating for record in self._table), timeout_s
            )

    def close(self) -> None:
        with self._table.lock:
            self._closed = True
            for record in self._table:
                record.job = None

    def _queue(self, record: ModelRecord, job: Callable[[], None]) -> None:
        """Queue a job; the caller holds the lock of the table."""
        if self._closed:
            return
        record.job = job
        if not record.updating:
            name = record.name
            record.updating = start_thread(f"update-{name}", partial(self._work, name))
            if not record.updating:
                log.warning("model %s: updated with its next change: no thread is left", name)

    def _work(self, name: str) -> None:
        """Do what is due for `name` until nothing is."""
        while True:
            with self._table.changed:
                record = self._table[name]
                before, job, record.job = record.spec, record.job, None
                delivery = record.delivery
                if job is None:
                    record.updating = False
                    self._table.changed.notify_all()
                    return
            try:
                job()
                self._load_misfits(before, name)
            except Unavailable:
                log.debug("model %s: not updated: the server ends", name)
            except EdgeServerError as error:
                self._refuse(name, error, of=delivery)
            except Exception as error:
                log.exception("model %s: updating failed", name)
                text = f"model '{name}': unexpected {type(error).__name__}: {error}; see the log"
                self._refuse(name, InternalError(text), of=delivery)

    def _remove(self, name: str) -> None:
        log.info("model %s: taken out of the repository", name)
        self._loader.lifecycle.unload(name)
        self._deployments.removed(name)
        self._loader.unload_absent(name)

    def _load(self, name: str) -> None:
        with self._table.lock:
            record = self._table[name]
            copy, serving = record.accepted, record.serving_copy
        if copy is None:
            return  # removed by now
        if serving is not None and copy.digest == serving.digest:
            # Files touched, moved or copied again, content the same: the verdict is written again.
            self._deployments.unchanged(copy, serving)
            self._loader.load(name)
            return
        if reason := self._store.quarantined(copy.digest):
            # It was rolled back after this copy of it was staged.
            error = ModelConfigError(f"model '{name}': quarantined: {reason}")
            self._failed(copy, LoadFailure(error))
            return
        is_alone = self._slot.acquire(timeout=LOAD_TIMEOUT_S)
        if not is_alone:
            log.warning("model %s: loaded beside another one, which still loads", name)
        try:
            with self._store.loading(copy):
                failure = self._loader.load(name).get(name)
        finally:
            if is_alone:
                self._slot.release()
        if failure is None:
            self._deployments.count("loaded")
            self._deployments.note_serving()
        else:
            self._failed(copy, failure)

    def _load_misfits(self, before: ModelSpec | None, name: str) -> None:
        """Load the members of the ensemble `before` that waited for its change; without a change do
        nothing."""
        with self._table.lock:
            if before is None or self._table.get(name).spec is before:
                return
            for record in map(self._table.get, self._table.below(before)):
                each = record.delivery
                if isinstance(each, Waiting) and each.retry is None and not record.updating:
                    record.load_again(each)
                    self._queue(record, partial(self._load, record.name))

    def _failed(self, copy: StagedModel, failure: LoadFailure) -> None:
        self._deployments.count("failed")
        if isinstance(failure.error, GivenUp):
            return  # the later change is reported
        error, name = failure.error, copy.name
        served = self._table.serving_spec(name) is None and self._store.has_served(
            name, copy.digest
        )
        passes = isinstance(error, Unavailable) or (may_pass(error) and served)
        with self._table.lock:
            record, now = self._table[name], time.monotonic()
            record.not_loaded(copy, failure, now, passes=passes, served=served)
        self._deployments.report()

    def _refuse(
        self,
        name: str,
        error: EdgeServerError,
        *,
        waits: bool = False,
        of: Delivery | None = None,
    ) -> None:
        """Report that the newest delivery cannot be staged, loaded or removed; where `of` is given
        and a newer one has come since, only the log does."""
        self._deployments.count("failed")
        failure = LoadFailure(error)
        with self._table.lock:
            record = self._table[name]
            if of is not None and record.delivery is not of and record.job is not None:
                log.warning("model %s: %s", name, failure.reason)
                return
            if waits:
                record.cannot_copy(failure.reason, time.monotonic())
            else:
                record.refuse(getattr(error, "digest", ""), failure.reason)
            if not record.is_loading:
                record.fail(failure)
                self._table.publish([name])
        self._deployments.report()
