"""Deployments, in mode POLL: the private copies that models load from, and what becomes of each."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from edge_server.errors import EdgeServerError, ModelConfigError
from edge_server.repository.scan import files_in
from edge_server.repository.store import StagedModel
from edge_server.repository.verdicts import GOOD, ON_TRIAL, REFUSED, WAITS, VerdictFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from edge_server.lifecycle.model_spec import ModelSpec
    from edge_server.lifecycle.model_table import ModelTable
    from edge_server.lifecycle.records import ModelRecord
    from edge_server.model_config.files import ModelFiles
    from edge_server.repository.store import ModelStore
    from edge_server.repository.verdicts import Verdict

log = logging.getLogger(__name__)

# `torn`: the model changed while the store copied it, and is scanned again; `failed`: the
# predecessor continues to serve.
OUTCOMES = ("loaded", "unchanged", "removed", "torn", "failed", "rolled_back")


class Deployments:
    """Keeps the store and the verdicts consistent with the records. Thread-safe.

    As a `ModelSource` it finds the copies that the records accept.

    Args:
        table: the records of all models.
        store: keeps the last known good copies across a restart.
        repositories: the directories that the daemon watches, for the verdicts.
    """

    where = "the accepted copies of the model repositories"

    def __init__(self, table: ModelTable, store: ModelStore, repositories: Sequence[Path]) -> None:
        self.table = table
        self.store = store
        self._verdicts = VerdictFile(store.directory, repositories)
        self._noting = threading.Lock()
        self._counting = threading.Lock()
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
        with self._counting:
            self._outcomes[outcome] += 1

    def outcomes(self) -> dict[str, int]:
        """Return the number of changes by outcome."""
        with self._counting:
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
            name: the model.
            reason: the reason of the failure.
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
        """Forget `name`, which was removed from the repository.

        Raises:
            InternalError: the store cannot be written.
        """
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
