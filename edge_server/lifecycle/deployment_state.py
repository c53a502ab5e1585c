"""The deployment state: the accepted, the serving and the last known good copy of each model."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import TYPE_CHECKING

from edge_server.errors import EdgeServerError
from edge_server.repository.store import StagedModel
from edge_server.repository.verdicts import LOADING, REFUSED, WAITS

if TYPE_CHECKING:
    from pathlib import Path

    from edge_server.lifecycle.model_spec import ModelSpec
    from edge_server.repository.source import AcceptedModels
    from edge_server.repository.store import ModelStore
    from edge_server.repository.verdicts import Verdicts

log = logging.getLogger(__name__)

# `torn`: the model changed while the store copied it, and is scanned again; `failed`: the
# predecessor continues to serve.
OUTCOMES = ("loaded", "unchanged", "removed", "torn", "failed", "rolled_back")


class DeploymentState:
    """Keeps the source, the store and the verdicts consistent with the serving copies. Thread-safe.

    Args:
        accepted: the copies that the loader finds; the deployment state is their only writer.
        store: keeps the last known good copies across a restart.
        verdicts: receives the outcome of each model.
    """

    def __init__(self, accepted: AcceptedModels, store: ModelStore, verdicts: Verdicts) -> None:
        self._accepted = accepted
        self._store = store
        self._verdicts = verdicts
        self._lock = threading.Lock()
        self._serving: dict[str, StagedModel] = {}
        self._good: dict[str, StagedModel] = {}
        self._outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))

    def count(self, outcome: str) -> None:
        """Count one more change with `outcome`, one of `OUTCOMES`."""
        with self._lock:
            self._outcomes[outcome] += 1

    def outcomes(self) -> dict[str, int]:
        """Return the number of changes by outcome."""
        with self._lock:
            return dict(self._outcomes)

    def serving(self, name: str) -> StagedModel | None:
        with self._lock:
            return self._serving.get(name)

    def accept(self, staged: StagedModel, shown: Path | None = None) -> StagedModel | None:
        """Accept `staged` as the copy to load next; return the copy accepted before.

        Args:
            staged: the copy to load.
            shown: the model's directory in the repository, for texts and logs.
        """
        if shown is not None:
            self._accepted.show(staged.name, shown)
            self._verdicts.tell(staged.name, LOADING, staged.digest)
        return self._accepted.put(staged.name, staged)

    def decline(self, name: str, before: StagedModel | None) -> None:
        """Accept `before` again in place of the copy that failed."""
        self._accepted.put(name, before)

    def failed(self, name: str, reason: str, digest: str = "", *, waits: bool = False) -> None:
        """Record that the new content of `name` does not serve; the predecessor still does.

        Args:
            name: the model.
            reason: the reason of the failure.
            digest: the digest of the content; empty if the content could not be read.
            waits: True if the daemon retries the load.
        """
        self._verdicts.tell(name, WAITS if waits else REFUSED, digest, reason)

    def serves(self, staged: StagedModel, *, on_trial: bool) -> None:
        """Record that `staged` serves; commit it as good unless it is in a canary (`on_trial`)."""
        if self._store.quarantined(staged.digest):
            return  # rolled back in the meantime
        with self._lock:
            self._serving[staged.name] = staged
        self._verdicts.serves(staged.name, staged.digest, on_trial=on_trial)
        if not on_trial:
            self._is_good(staged)

    def serves_again(self, staged: StagedModel) -> None:
        """Record that `staged`, the last known good copy, serves again after a restart."""
        with self._lock:
            self._serving[staged.name] = self._good[staged.name] = staged
        self._verdicts.is_good(staged.name, staged.digest, staged.directory)

    def same_as_before(self, staged: StagedModel, serving: StagedModel) -> None:
        """Record that `staged` has the content of `serving`, so a restart need not stage it."""
        self.count("unchanged")
        self._accepted.put(serving.name, serving)
        with self._lock:
            is_good = self._good.get(serving.name) is serving
        if is_good:
            self._store.commit(staged)
            self._verdicts.is_good(staged.name, staged.digest, staged.directory)
        else:
            self._verdicts.serves(staged.name, staged.digest, on_trial=True)

    def passed(self, model_spec: ModelSpec) -> None:
        """Commit the copy of `model_spec`, which passed its canary, as last known good."""
        staged = model_spec.files.holder
        if not isinstance(staged, StagedModel):
            return
        with self._lock:
            is_known = self._good.get(staged.name) is staged
        if self.serving(staged.name) is staged and not is_known:
            try:
                self._is_good(staged)
            except EdgeServerError as error:
                log.warning("model %s: is not kept for a restart: %s", staged.name, error)

    def rolled_back(self, model_spec: ModelSpec, reason: str) -> None:
        """Record the rollback of `model_spec` and quarantine its content."""
        staged = model_spec.files.holder
        if not isinstance(staged, StagedModel):
            return
        self.count("rolled_back")
        self._store.quarantine(staged.digest, f"rolled back: {reason}", staged.name)
        with self._lock:
            good = self._good.get(staged.name)
            if good is not None:
                self._serving[staged.name] = good
        self._accepted.put(staged.name, good)
        serves = "" if good is None else good.digest
        self._verdicts.rolled_back(staged.name, staged.digest, reason, serves)

    def has_served(self, model_spec: ModelSpec) -> bool:
        """Return whether the store still holds the content as one that served under this name."""
        staged = model_spec.files.holder
        return isinstance(staged, StagedModel) and self._store.has_served(
            staged.name, staged.digest
        )

    def write_again(self) -> None:
        """See `Verdicts.write_again`."""
        self._verdicts.write_again()

    def gone(self, name: str) -> None:
        """Record that `name` was removed from the repository."""
        self.count("removed")
        self._accepted.put(name, None)
        with self._lock:
            self._serving.pop(name, None)
            self._good.pop(name, None)
        self._store.forget(name)
        self._verdicts.gone(name)

    def _is_good(self, staged: StagedModel) -> None:
        self._store.commit(staged)
        with self._lock:
            self._good[staged.name] = staged
        self._verdicts.is_good(staged.name, staged.digest, staged.directory)
        log.info("model %s: last known good is now %.12s", staged.name, staged.digest)
