"""Mode POLL follows the repositories: a change is detected, staged, loaded and committed."""

from __future__ import annotations

import logging
import math
import threading
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
from edge_server.inference.registry import ModelState
from edge_server.lifecycle.control import RepositoryControl, cannot_be_loaded
from edge_server.lifecycle.deployment import Loading, Uncopied, Waiting
from edge_server.lifecycle.model_spec import LoadFailure
from edge_server.process.threads import GivenUp, Worker, start_thread
from edge_server.repository.change_detector import ChangeDetector, InotifyWatch
from edge_server.repository.content import TornModel
from edge_server.repository.scan import Repositories, is_model_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from pathlib import Path

    from edge_server.lifecycle.deployment import Delivery, ModelRecord
    from edge_server.lifecycle.loader import RepositoryLoader
    from edge_server.lifecycle.model_spec import ModelSpec
    from edge_server.lifecycle.records import Deployments
    from edge_server.repository.change_detector import Change
    from edge_server.repository.scan import ModelTree
    from edge_server.repository.store import StagedModel

log = logging.getLogger(__name__)

_FIRST_SCANS_S = 0.2
# The number of scans that a slow disk gets at the first start, however long they take.
_FIRST_SCANS = 5
# The scan interval while a model is changing, so that the wait for the next poll does not add to
# the settling time.
_SETTLING_S = 0.5
# A longer load hangs or is of a slow model; the other models must not wait for it.
LOAD_TIMEOUT_S = 20.0


class PollControl(RepositoryControl):
    """The control of mode POLL: follows the repositories, and refuses requests as NONE. It scans
    every `poll_s` seconds, more often while a model is changing; inotify only makes a scan start
    earlier.

    Args:
        poll_s: 0 scans until the models of the start are complete, and never again.
        settle_s: for how long a model's files must be unchanged.
        exit_on_error: a model that fails to load before any model has served ends the daemon."""

    def __init__(
        self,
        loader: RepositoryLoader,
        deployments: Deployments,
        repositories: Sequence[Path],
        *,
        poll_s: float,
        settle_s: float,
        exit_on_error: bool = True,
    ) -> None:
        super().__init__(loader, exit_on_error=exit_on_error)
        # No deadline: a disk that hangs must not end the process, as the loaded models still serve.
        self.worker = Worker("repository", self._tick, deadline_s=math.inf)
        self.updates = Updates(loader, deployments)
        self.deployments = deployments
        self._repositories = tuple(repositories)
        self._poll_s = poll_s or math.inf
        # Enough for every complete model, and for one whose last file was just written.
        self._first_timeout_s = 2 * settle_s + 1.0
        # Used by `start`, then by the worker alone.
        self._change_detector = ChangeDetector(self._repositories, settle_s)
        self._inotify_watch = InotifyWatch(repositories)
        self._scanned_s = time.monotonic()
        self._next_s = 0.0
        self._arrived: set[str] = set()
        self._kept: frozenset[str] = frozenset()

    def start(self, stop: threading.Event | None = None) -> None:
        """Load the last known good models; without any, load the models of the repositories, but
        for those whose files keep changing. Raises ModelConfigError where no model has served yet,
        and one fails to load or a repository cannot be read."""
        self._loader.take_over.start()
        with self._loader.until(stop):
            if not self.load_last_good():
                self._load_first()
        self.worker.start()

    def load_last_good(self) -> bool:
        """Load the last known good copies of an earlier run; return whether there were any."""
        kept = self.updates.load_last_good()
        self._kept = frozenset(kept)
        self._change_detector.resume({name: copy.source for name, copy in kept.items()})
        return bool(kept)

    def awaits(self, name: str) -> bool:
        """Return whether the first scan may still load `name`: the start has loaded last known good
        copies, and had none of this model or of a member, which the repositories hold."""
        if not self._kept:
            return False
        with self.deployments.lock:
            specs = self.deployments.get(name).specs
            needed = {name, *(member for spec in specs for member in self.deployments.below(spec))}
        lacking = needed - self._kept
        try:
            return bool(lacking) and lacking <= Repositories(self._repositories).names().keys()
        except ModelConfigError:
            return True  # not mounted yet: the model may be there

    def scan(self, now: float, arrived: Collection[str] = ()) -> bool:
        """Scan the repositories once and start the updates; return whether a model may still be
        changing.
        """
        changes = self._change_detector.scan(now, arrived)
        self._change_detector.report_again(self.updates.carry_out(changes))
        self._scanned_s = time.monotonic()
        return bool(self._change_detector.changing)

    def poll_age_s(self, now: float) -> float:
        return now - self._scanned_s

    def close(self, timeout_s: float) -> None:
        """Stop the scans and clear the registry; wait up to `timeout_s` for models that close or
        load."""
        until = time.monotonic() + timeout_s
        # A disk that hangs may block the scan; the models need part of the time, too.
        self.worker.stop(timeout_s / 2)
        self.updates.close()
        super().close(max(0.0, until - time.monotonic()))
        self._inotify_watch.close()
        self.deployments.store.close()

    def _tick(self, now: float) -> None:
        """Called about every second."""
        self.deployments.commit()
        # What the store could not copy, or was released from quarantine, is staged again.
        if again := self.deployments.release_noted() | self.updates.retry(now):
            self._change_detector.report_again(again)
            self._next_s = 0.0
        if now >= self._next_s:
            changing = self.scan(now, self._arrived)
            self._arrived = set()
            self._next_s = now + min(self._poll_s, _SETTLING_S if changing else self._poll_s)
        arrived = self._inotify_watch.wait(max(0.0, min(1.0, self._next_s - time.monotonic())))
        if arrived is not None and self._poll_s < math.inf:
            self._arrived.update(arrived)
            self._next_s = 0.0

    def _load_first(self) -> None:
        stop, scans, until = self._loader.stop, 0, math.inf
        while self.scan(time.monotonic()):
            scans += 1
            until = min(until, time.monotonic() + self._first_timeout_s)
            if scans > _FIRST_SCANS and time.monotonic() > until:
                for name in self._change_detector.changing:
                    log.warning(
                        "model %s: its files keep changing; the start goes on without it, and it "
                        "is loaded once they stay as they are",
                        name,
                    )
                break
            if stop.wait(_FIRST_SCANS_S):
                return
        try:
            Repositories(self._repositories).names()  # raises, as in the other modes
        except ModelConfigError:
            if self._exit_on_error:
                raise
        while not (stop.is_set() or self.updates.wait_idle(_FIRST_SCANS_S)):
            pass
        if stop.is_set():
            return  # a load that is given up has not failed
        # As in the other modes, a directory that cannot be a model does not end the daemon.
        failed = [
            entry
            for entry in self.deployments.registry.snapshot.entries.values()
            if entry.state is ModelState.UNAVAILABLE and is_model_name(entry.name)
        ]
        if failed and self._exit_on_error:
            raise cannot_be_loaded(failed)


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
    the board lacks now (memory, also of the GPU, or space on a disk); a store that could not copy
    the model (a full disk); and a model that served before the daemon started and now fails for a
    reason that may pass, until a version serves."""

    def __init__(self, loader: RepositoryLoader, deployments: Deployments) -> None:
        self._loader = loader
        self._table = deployments
        self._store = deployments.store
        self._slot = threading.Semaphore()
        self._closed = False

    def load_last_good(self) -> dict[str, StagedModel]:
        """Load the last known good copies; return them by name, including those that failed. Copies
        during whose load a process may have died are loaded last, each alone."""
        stop = self._loader.stop
        kept = self._store.last_good()
        suspects = [copy for copy in kept.values() if self._store.suspected(copy.digest)]
        with ExitStack() as loading:
            for copy in kept.values():
                if copy not in suspects:
                    self._accept(copy)
                    loading.enter_context(self._store.loading(copy))
            self._loader.load_all()
        for copy in suspects:
            if stop.is_set():
                break
            self._accept(copy)
            with self._store.loading(copy):
                self._loader.load(copy.name)
        if stop.is_set():
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
        self._table.report()
        return kept

    def _accept(self, copy: StagedModel) -> None:
        with self._table.lock:
            self._table[copy.name].delivery = Loading(copy)

    def carry_out(self, changes: Iterable[Change]) -> list[str]:
        """Start the updates for `changes`; return once all of them are staged.
        Returns: The models whose files changed during staging; no update was started for them."""
        torn: list[str] = []
        due: dict[str, Callable[[str], None]] = {}
        for change in changes:
            name, tree = change.name, change.tree
            try:
                if tree is None:
                    with self._table.lock:
                        self._table[name].withdraw()
                else:
                    self._stage(tree)
                due[name] = self._remove if tree is None else self._load
            except TornModel as error:
                log.debug("model %s: %s", name, error)
                self._table.count("torn")
                torn.append(name)
            except EdgeServerError as error:
                self._refuse(name, error, waits=may_pass(error))
        with self._table.lock:
            for name, job in due.items():
                self._queue(self._table[name], job)
        return torn

    def _stage(self, tree: ModelTree) -> None:
        """Make a private copy of the model that `tree` describes, which is loaded next."""
        tree.require_usable()
        copy = self._store.stage(tree)
        if reason := self._store.quarantined(copy.digest):
            held = self._store.quarantined_as(copy.digest) or tree.name
            raise QuarantinedModel(
                f"{tree.directory}: quarantined: {reason}; put another model there, or let it out "
                f"with `edge-server models release {held}`",
                copy.digest,
            )
        with self._table.lock:
            self._table[tree.name].deliver(copy, tree.directory)
        self._table.report()

    def retry(self, now: float) -> set[str]:
        """Start the load retries that are due at `now` (`time.monotonic()`); return the models to
        stage again, after a full or failing disk. The pause before the next retry of each of these
        models grows."""
        with self._table.lock:
            # What served last comes first.
            failed = [(r, each) for r in self._table for each in (r.again, r.delivery)]
        to_stage = set()
        for record, each in failed:
            retry = each.retry if isinstance(each, Waiting | Uncopied) else None
            if retry is None or not retry.is_due(now):
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
                    self._queue(record, self._load)
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

    def _queue(self, record: ModelRecord, job: Callable[[str], None]) -> None:
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
                job(name)
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
        self._table.count("removed")
        with self._table.lock:
            self._table[name].removed()
        self._table.report()
        self._store.forget(name)
        self._loader.unload_absent(name)

    def _load(self, name: str) -> None:
        with self._table.lock:
            record = self._table[name]
            copy, serving = record.accepted, record.serving_copy
        if copy is None:
            return  # removed by now
        if serving is not None and copy.digest == serving.digest:
            # Files touched, moved or copied again, content the same: the verdict is written again.
            self._table.unchanged(copy, serving)
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
            self._table.count("loaded")
            self._table.commit()
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
                    self._queue(record, self._load)

    def _failed(self, copy: StagedModel, failure: LoadFailure) -> None:
        self._table.count("failed")
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
        self._table.report()

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
        self._table.count("failed")
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
        self._table.report()
