"""The canary: keeps the predecessor of a new version open until the new version has passed; where
it fails, chooses the models to roll back."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from edge_server.inference.canary_monitor import CanaryMonitor, CanaryTerms, recorded
from edge_server.lifecycle.model_spec import CanaryRun, KeptPredecessor, LoadedVersions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from edge_server.inference.registry import LoadedModel
    from edge_server.lifecycle.fit import Fit
    from edge_server.lifecycle.model_spec import ModelSpec
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
        on_passed: Callable[[ModelSpec], None],
        on_news: Callable[[ModelSpec, str], None],
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


@dataclass(frozen=True)
class RollbackSet:
    """The models to roll back.

    Attributes:
        back: model name → its predecessor.
        not_at_fault: ensemble name → predecessor of the ensemble whose canary failed for the fault
            of others.
        reason: the reason of the rollback, for the log and the index.
    """

    back: Mapping[str, KeptPredecessor]
    not_at_fault: Mapping[str, KeptPredecessor]
    reason: str


def find_suspects(
    model_spec: ModelSpec, reason: str, table: ModelTable, canary: Canary
) -> RollbackSet:
    """Return the models to roll back after `model_spec` failed its canary, which ends.

    The caller owns the predecessors in the result.
    """
    before = canary.take(model_spec)
    if before is None:
        return RollbackSet({}, {}, reason)
    name = model_spec.name
    if not model_spec.is_ensemble:
        return RollbackSet({name: before}, {}, reason)
    used = table.serving_below(model_spec)
    faults = {}
    for each in used:
        run = table.get(each.name).changed_canary(each)
        if run is not None and (fault := run.monitor.fault()):
            faults[each.name] = fault
    if faults:
        # The fault of the ensemble shows in its members, so the members are at fault.
        bad = [each for each in used if each.name in faults]
        return RollbackSet(canary.take_changed(bad), {name: before}, next(iter(faults.values())))
    if before.built.model_spec is not model_spec:
        return RollbackSet({name: before}, {}, reason)
    return RollbackSet(canary.take_changed(used), {name: before}, f"in ensemble '{name}': {reason}")


def fit_back(
    model_spec: ModelSpec,
    rollback_set: RollbackSet,
    table: ModelTable,
    canary: Canary,
    *,
    take_down: bool,
) -> tuple[RollbackSet, dict[str, LoadedVersions], Fit]:
    """Extend the rollback until it fits, and return it with the offered versions and their fit.

    If the predecessors do not fit otherwise, the models that changed together with an ensemble are
    rolled back, too.

    Args:
        model_spec: the spec that failed its canary.
        rollback_set: the models to roll back.
        table: the records.
        canary: the canaries, which own the predecessors.
        take_down: True unloads ensembles that do not fit even then.
    """
    back = dict(rollback_set.back)
    waiting = {each.name: LoadedVersions(each) for each in table.waiting(())}
    offered = {**waiting, **{name: before.built for name, before in back.items()}}
    found = table.fit(offered, {})
    if not found.refused.keys().isdisjoint(back):
        back.update(canary.take_changed(table.serving_below(model_spec)))
        for before in back.values():
            offered.update((name, LoadedVersions(each)) for name, each in before.ensembles.items())
        offered.update((name, before.built) for name, before in back.items())
        found = table.fit(offered, {})
    if take_down and not found.refused.keys().isdisjoint(back):
        found = table.fit(offered, {}, take_down=True)
    offered = {name: built for name, built in offered.items() if name not in found.refused}
    return replace(rollback_set, back=back), offered, found
