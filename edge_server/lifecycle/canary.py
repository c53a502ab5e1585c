"""The canary: keeps the predecessor of a new version open until the new version has passed."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from edge_server.inference.canary_monitor import CanaryMonitor, CanaryTerms, recorded
from edge_server.lifecycle.records import CanaryRun, Predecessor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from edge_server.inference.snapshot import LoadedModel
    from edge_server.lifecycle.model_spec import LoadedVersions, ModelSpec
    from edge_server.lifecycle.records import ModelTable

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
            members: the members of `serving`, see `Predecessor`; open until the method returns.
        """
        terms, name = self._terms, built.model_spec.name
        if terms is None:
            return built
        new = {model.version for model in built.models} - built.kept
        former = self._end(name)
        if former is not None:
            new |= former.versions
        watched = [model for model in built.models if model.version in new]
        before = None
        if watched and serving is not None:
            # The former canary may pass at this moment and give up its predecessor.
            kept = None if former is None else self._take(former)
            if kept is None:
                before = Predecessor(_held(serving), ensembles, _shared(members))
            else:
                before = replace(kept, ensembles={**ensembles, **kept.ensembles})
        if former is not None:
            former.monitor.stop()
        if before is None or not before.built.models:
            if before is not None:
                before.close()
            return replace(built, models=tuple(recorded(m, terms) for m in built.models))
        run = self._new_run(terms, built.model_spec, before, frozenset(m.version for m in watched))
        models = [
            run.monitor.watch(m, _predecessor(m, before.built), before.members)
            if m in watched
            else recorded(m, terms)
            for m in built.models
        ]
        self._table[name].canary = run
        self._alive.add(run)
        run.monitor.start()
        return replace(built, models=tuple(models))

    def record(self, built: LoadedVersions) -> LoadedVersions:
        """Return `built` ready to publish without a canary; end the canary of its predecessor."""
        self.forget([built.model_spec.name])
        terms = self._terms
        if terms is None:
            return built
        return replace(built, models=tuple(recorded(m, terms) for m in built.models))

    def has_change(self, model_spec: ModelSpec) -> bool:
        """Return whether `model_spec` is in a canary and its predecessor has another spec."""
        with self._table.lock:
            return self._changed(model_spec) is not None

    def fault(self, model_spec: ModelSpec) -> str:
        """Return the fault found so far in the responses of a changed `model_spec`, or ""."""
        with self._table.lock:
            run = self._changed(model_spec)
        return "" if run is None else run.monitor.fault()

    def has(self, name: str) -> bool:
        """Return whether versions of the model are in a canary."""
        with self._table.lock:
            return self._table.get(name).canary is not None

    def take(self, model_spec: ModelSpec) -> Predecessor | None:
        """End the canary of `model_spec` and return its predecessor, or None if none is kept."""
        run = self._end(model_spec.name, model_spec)
        if run is None:
            return None
        before = self._take(run)
        run.monitor.stop()
        return before

    def forget(self, names: Collection[str]) -> None:
        """End the canaries of the unloaded models; their threads soon close the predecessors."""
        for name in names:
            run = self._end(name)
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

    def _new_run(
        self,
        terms: CanaryTerms,
        model_spec: ModelSpec,
        before: Predecessor,
        versions: frozenset[int],
    ) -> CanaryRun:
        run = CanaryRun(model_spec, before, versions)
        run.monitor = CanaryMonitor(
            model_spec.name,
            terms,
            on_failed=partial(self._failed, run),
            on_passed=partial(self._on_passed, model_spec),
            on_over=partial(self._over, run),
            on_news=partial(self._on_news, model_spec),
        )
        return run

    def _failed(self, run: CanaryRun, reason: str) -> None:
        model_spec = run.model_spec
        end_s = time.monotonic() + _SETTLES_S
        # Only comparisons of both distinguish a faulty member from a faulty ensemble.
        while model_spec.is_ensemble and self._have_doubts() and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        with self._table.lock:
            # The rollback of a member in the meantime starts another canary for its ensemble.
            is_current = self._table.get(model_spec.name).canary is run
        if is_current:
            self._roll_back(model_spec, reason)

    def _have_doubts(self) -> bool:
        with self._table.lock:
            running = [record.canary for record in self._table if record.canary is not None]
        return any(run.monitor.is_comparing for run in running)

    def _changed(self, model_spec: ModelSpec) -> CanaryRun | None:
        run = self._table.get(model_spec.name).canary
        if run is None or run.model_spec is not model_spec or run.before is None:
            return None
        return None if run.before.built.model_spec is model_spec else run

    def _end(self, name: str, model_spec: ModelSpec | None = None) -> CanaryRun | None:
        """Remove and return the canary of the model, or only that of `model_spec` if given."""
        with self._table.lock:
            record = self._table.get(name)
            run = record.canary
            if run is None or model_spec not in (None, run.model_spec):
                return None
            record.canary = None
            return run

    def _take(self, run: CanaryRun) -> Predecessor | None:
        """Return the predecessor and pass its ownership to the caller."""
        with self._table.lock:
            before, run.before = run.before, None
            return before

    def _over(self, run: CanaryRun) -> None:
        with self._table.lock:
            record = self._table.get(run.model_spec.name)
            if record.canary is run:
                record.canary = None
        before = self._take(run)
        if before is not None:
            before.close()
        with self._table.lock:
            self._alive.discard(run)


def _held(serving: LoadedVersions) -> LoadedVersions:
    return replace(serving, models=_shared(serving.models))


def _shared(models: Iterable[LoadedModel]) -> tuple[LoadedModel, ...]:
    """Return a share of each model that is still open."""
    shared = (model.shared(model.config) for model in models)
    return tuple(model for model in shared if model is not None)


def _predecessor(model: LoadedModel, before: LoadedVersions) -> LoadedModel:
    """Return the same version of the predecessor, or its latest version."""
    return max(before.models, key=lambda old: (old.version == model.version, old.version))
