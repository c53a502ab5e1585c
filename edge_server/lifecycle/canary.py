"""The canary: keeps the predecessor of a new version open until the new version has passed."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from edge_server.inference.canary_monitor import CanaryMonitor, CanaryTerms, recorded
from edge_server.lifecycle.model_spec import CanaryRun, KeptPredecessor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from edge_server.inference.snapshot import LoadedModel
    from edge_server.lifecycle.model_spec import LoadedVersions, ModelSpec
    from edge_server.lifecycle.model_table import ModelTable

# The verdict on an ensemble waits so long for the comparisons of its members, and polls so often.
_SETTLES_S = 5.0
_LOOK_S = 0.02


class Canary:
    """Runs a canary for each model with new versions, and keeps their predecessors open.

    A version that replaces a version in its canary is compared with the last version that passed.
    A version without a predecessor gets no canary. All versions of an ensemble count as new: the
    ensemble is made again with its members, and may be the one that reveals a faulty member.

    Args:
        table: the records, which hold the canaries.
        terms: the terms of every canary; None runs no canary and keeps no predecessor.
        roll_back: called with spec and reason when a version fails, on a thread of the canary's
            own; at that time the version may be replaced or unloaded already.
        on_passed: called with the spec when a version passes, on the same thread.
        on_news: called with the spec and the progress of its canary, on the same thread; an empty
            text ends the report.
    """

    def __init__(
        self,
        table: ModelTable,
        terms: CanaryTerms | None,
        roll_back: Callable[[ModelSpec, str], object],
        on_passed: Callable[[ModelSpec], None] = lambda _: None,
        on_news: Callable[[ModelSpec, str], None] = lambda *_: None,
    ) -> None:
        self._table = table
        self._terms = terms
        self._roll_back = roll_back
        self._on_passed = on_passed
        self._on_news = on_news
        # Includes ended canaries whose thread has yet to close the predecessor.
        self._alive: set[CanaryRun] = set()

    # The caller of the methods up to `forget` holds the lock of the table.

    def begin(
        self,
        built: LoadedVersions,
        serving: LoadedVersions | None,
        ensembles: Mapping[str, ModelSpec],
        members: Sequence[LoadedModel] = (),
    ) -> LoadedVersions:
        """Start a canary for the new versions of `built`; return `built` ready to publish.

        Args:
            built: the loaded versions that replace `serving`.
            serving: the predecessor; open until the method returns.
            ensembles: the serving specs of the ensembles that change together with `built`.
            members: the members of `serving`, see `KeptPredecessor`; open until the method returns.
        """
        if self._terms is None:
            return built
        record = self._table[built.model_spec.name]
        new = {model.version for model in built.models} - built.kept
        former, record.canary = record.canary, None
        if former is not None:
            new |= former.versions
        watched = frozenset(model.version for model in built.models if model.version in new)
        before = None
        if watched and serving is not None:
            # The former canary may pass at this moment and give up its predecessor.
            kept = None if former is None else former.take()
            if kept is None:
                shares = replace(serving, models=_shared(serving.models))
                before = KeptPredecessor(shares, ensembles, _shared(members))
            else:
                before = replace(kept, ensembles={**ensembles, **kept.ensembles})
        if former is not None:
            former.monitor.stop()
        if before is None or not before.built.models:
            if before is not None:
                before.close()
            return self._recorded(built)
        run = record.canary = CanaryRun(built.model_spec, before, watched)
        run.monitor = CanaryMonitor(
            record.name,
            self._terms,
            on_failed=partial(self._failed, run),
            on_passed=partial(self._on_passed, run.model_spec),
            on_over=partial(self._over, run),
            on_news=partial(self._on_news, run.model_spec),
        )
        models = [
            run.monitor.watch(model, _predecessor(model, before.built), before.members)
            if model.version in watched
            else recorded(model, self._terms)
            for model in built.models
        ]
        self._alive.add(run)
        run.monitor.start()
        return replace(built, models=tuple(models))

    def record(self, built: LoadedVersions) -> LoadedVersions:
        """Return `built` ready to publish without a canary; end the canary of its predecessor."""
        self.forget([built.model_spec.name])
        return self._recorded(built)

    def take(self, model_spec: ModelSpec) -> KeptPredecessor | None:
        """End the canary of `model_spec` and return its predecessor, or None if none is kept."""
        record = self._table.get(model_spec.name)
        run = record.canary
        if run is None or run.model_spec is not model_spec:
            return None
        record.canary = None
        before = run.take()
        run.monitor.stop()
        return before

    def take_changed(self, model_specs: Iterable[ModelSpec]) -> dict[str, KeptPredecessor]:
        """Take the predecessors of those specs that are in a canary and changed."""
        return {
            spec.name: before
            for spec in model_specs
            if self._table.get(spec.name).changed_canary(spec) is not None
            and (before := self.take(spec)) is not None
        }

    def forget(self, names: Collection[str]) -> None:
        """End the canaries of the unloaded models; their threads soon close the predecessors."""
        for name in names:
            record = self._table.get(name)
            run, record.canary = record.canary, None
            if run is not None:
                run.monitor.stop()

    def close(self, timeout_s: float) -> None:
        """End every canary; wait up to `timeout_s` in all until the predecessors are closed."""
        until = time.monotonic() + timeout_s
        with self._table.lock:
            alive = list(self._alive)
        for run in alive:
            run.monitor.stop()
        for run in alive:
            run.monitor.wait_over(max(0.0, until - time.monotonic()))

    def _recorded(self, built: LoadedVersions) -> LoadedVersions:
        terms = self._terms
        if terms is None:
            return built
        return replace(built, models=tuple(recorded(model, terms) for model in built.models))

    def _failed(self, run: CanaryRun, reason: str) -> None:
        model_spec = run.model_spec
        end_s = time.monotonic() + _SETTLES_S
        # Only comparisons of both distinguish a faulty member from a faulty ensemble.
        while model_spec.is_ensemble and self._is_comparing() and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        with self._table.lock:
            # The rollback of a member in the meantime starts another canary for its ensemble.
            is_current = self._table.get(model_spec.name).canary is run
        if is_current:
            self._roll_back(model_spec, reason)

    def _is_comparing(self) -> bool:
        with self._table.lock:
            running = [record.canary for record in self._table if record.canary is not None]
        return any(run.monitor.is_comparing for run in running)

    def _over(self, run: CanaryRun) -> None:
        with self._table.lock:
            record = self._table.get(run.model_spec.name)
            if record.canary is run:
                record.canary = None
            before = run.take()
        if before is not None:
            before.close()
        with self._table.lock:
            self._alive.discard(run)


def _shared(models: Iterable[LoadedModel]) -> tuple[LoadedModel, ...]:
    """Return a share of each model that is still open."""
    shared = (model.shared(model.config) for model in models)
    return tuple(model for model in shared if model is not None)


def _predecessor(model: LoadedModel, before: LoadedVersions) -> LoadedModel:
    """Return the same version of the predecessor, or its latest version."""
    return max(before.models, key=lambda old: (old.version == model.version, old.version))
