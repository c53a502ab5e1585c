"""The model lifecycle: changes the records and the registry in one step; runs the canaries."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet

from edge_server.backends.contract import interrupt
from edge_server.errors import ModelConfigError, Unavailable
from edge_server.inference.canary_monitor import CanaryMonitor, CanaryTerms, recorded
from edge_server.lifecycle.build import Build
from edge_server.lifecycle.deployment import copy_of
from edge_server.lifecycle.fit import USUAL_INTERFACE_RULE
from edge_server.lifecycle.model_spec import CanaryRun, KeptPredecessor, LoadedVersions, LoadFailure

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from edge_server.inference.registry import LoadedModel
    from edge_server.lifecycle.fit import Fit, InterfaceRule
    from edge_server.lifecycle.model_spec import ModelSpec
    from edge_server.lifecycle.records import ModelTable

log = logging.getLogger(__name__)

# The verdict on an ensemble waits so long for the comparisons of its members, and polls so often.
_SETTLES_S = 5.0
_LOOK_S = 0.02
OUTDATED = (
    "Newer operation has been applied to the model lifecycle, current load operation is out-dated."
)


@dataclass(frozen=True)
class _Rollback:
    """The models to roll back, by name, each with its predecessor, which the caller owns.
    Attributes: not_at_fault: the ensemble whose canary failed for the fault of others, likewise."""

    back: Mapping[str, KeptPredecessor]
    not_at_fault: Mapping[str, KeptPredecessor]
    reason: str


class ModelLifecycle:
    """Publishes, rolls back and unloads models.

    At any moment every ensemble in the registry fits its members. No method waits for a model.

    A model with new versions gets a canary, which keeps the predecessor open. A version that
    replaces a version in its canary is compared with the last version that passed; one without a
    predecessor gets no canary. All versions of an ensemble count as new: it is made again with its
    members, and may be the one that reveals a faulty member.

    Args: take_down: an ensemble that no longer fits a new member is unloaded; else that is
        refused."""

    def __init__(
        self,
        table: ModelTable,
        build: Build | None = None,
        terms: CanaryTerms | None = None,
        *,
        take_down: bool = False,
        interface: InterfaceRule = USUAL_INTERFACE_RULE,
    ) -> None:
        self.table = table
        self.has_canaries = terms is not None
        self.build = build or Build()
        self._terms = terms
        self._take_down = take_down
        self._interface = interface
        # What was unloaded while it loaded; the lock of the table guards it.
        self._unloaded: WeakSet[ModelSpec] = WeakSet()
        # Includes ended canaries whose thread has yet to close the predecessor.
        self._canaries: set[CanaryRun] = set()

    def begin_load(
        self, found: Mapping[str, ModelSpec | LoadFailure], explicit: Collection[str]
    ) -> dict[str, ModelSpec | LoadFailure]:
        """Publish the models of `found` that differ from the serving ones as LOADING; return them.
        Raises: Unavailable: the lifecycle has ended."""
        due: dict[str, ModelSpec | LoadFailure] = {}
        changed = []
        with self.table.lock:
            if self.table.over:
                raise Unavailable("Server exiting")
            for name, read in found.items():
                if isinstance(read, LoadFailure):
                    due[name] = read
                    continue
                record = self.table[name]
                if record.begin_load(read, explicit=name in explicit):
                    due[name] = read
                if record.is_loading or name not in due:
                    changed.append(name)
            self.table.publish(changed)
        return due

    def expects(self, model_spec: ModelSpec) -> bool:
        """Whether the load of `model_spec` would be published if it ended now."""
        with self.table.lock:
            record = self.table.get(model_spec.name)
            return not self.table.over and model_spec in record.specs

    def report_progress(self, name: str, text: str) -> None:
        """Report the progress of the load of `name` on the index; without a load do nothing."""
        with self.table.lock:
            if self.table.get(name).report_progress(text):
                self.table.registry.give_reason(name, text)

    def publish(
        self, results: Mapping[str, LoadedVersions | LoadFailure]
    ) -> dict[str, LoadFailure]:
        """Publish the built models that fit, and the ensembles that waited for them; return the
        failures of those `results` that were not published; the predecessor of each still serves. A
        load whose model was unloaded before its end is closed, and has not failed."""
        outdated: dict[str, LoadFailure] = {}
        failed: dict[str, LoadFailure] = {}
        offered: dict[str, LoadedVersions] = {}
        with self.table.lock:
            for name, result in results.items():
                spec = result.model_spec
                if spec is not None and spec not in self.table.get(name).specs:
                    outdated.update(self._overtaken(spec, result))
                elif isinstance(result, LoadFailure):
                    failed[name] = result
                else:
                    offered[name] = result
            for model_spec in self.table.waiting(results.keys()):
                offered.setdefault(model_spec.name, LoadedVersions(model_spec))
            failed.update(self._breaking(offered))
            offered = {name: each for name, each in offered.items() if name not in failed}
            found = self.table.fit(offered, failed, take_down=self._take_down)
            for name, error in found.refused.items():
                spec = offered.pop(name).model_spec
                failed[name] = LoadFailure(error, model_spec=spec, misfit=True)
            names = found.ensembles.keys() | found.taken_down.keys()
            former = {n: each for n in names if (each := self.table.get(n).spec) is not None}
            changed = set(found.taken_down)
            for built in self._fitting(offered, found):
                name = built.model_spec.name
                self.table[name].serve(self._with_canary(built, former))
                changed.add(name)
            for name, failure in failed.items():
                record = self.table[name]
                if name in results or record.is_loading:
                    record.fail(failure)
                    changed.add(name)
                elif name in changed:
                    record.reason = failure.reason
            self.table.publish(changed)
        for name, result in results.items():
            if isinstance(result, LoadedVersions) and offered.get(name) is not result:
                result.close()
        return {name: f for name, f in {**failed, **outdated}.items() if name in results}

    def unload(self, name: str, *, with_members: bool = False) -> None:
        """Close `name`, and the ensembles that use it, to new requests; those are published again
        when `name` is loaded again. A load in progress goes on, and its result is closed.
        `with_members` also unloads the members that were not requested by name and that no other
        ensemble uses."""
        with self.table.lock:
            coming = {record.name: record.coming for record in self.table}
            gone, changed = self.table.unload(name, with_members=with_members)
            found = (coming.get(each) for each in gone if self.table.get(each).coming is None)
            self._unloaded.update(spec for spec in found if spec is not None)
            self.end_canaries(gone)
            for each in changed:
                log.info("model %s: unloading", each)
            self.table.publish(changed)

    def end(self, timeout_s: float = 5.0) -> None:
        """Clear the desired state and the registry for good; loads in progress are closed, and runs
        of requests that still go on are ended where their backends can do that."""
        until = time.monotonic() + timeout_s
        with self.table.lock:
            self.table.end()
        if not self.table.registry.clear(timeout_s):
            log.warning("models: still closing after %.1f s", timeout_s)
        # A run of ONNX Runtime that goes on while the interpreter exits aborts the process.
        for loaded in self.table.registry.models_in_use():
            interrupt(loaded.model)
        with self.table.lock:
            canaries = list(self._canaries)
        for run in canaries:
            run.monitor.stop()
        for run in canaries:
            run.monitor.wait_over(max(0.0, until - time.monotonic()))

    def fall_back(self, model_spec: ModelSpec, stand_in: ModelSpec | None) -> bool:
        """Load `stand_in`, or nothing, where `model_spec` was loading; return False if that load is
        outdated."""
        with self.table.lock:
            record = self.table.get(model_spec.name)
            is_loading = record.coming is model_spec
            if is_loading:
                record.coming = stand_in
            return is_loading

    def wake(self, idle: LoadedVersions, built: LoadedVersions) -> None:
        """Serve `built`, the same versions, where `idle` serves; close them if it does not."""
        name = idle.model_spec.name
        with self.table.lock:
            record = self.table.get(name)
            is_wanted = record.serving is idle
            if is_wanted:
                record.serving = built if built.idle else self._recorded(built)
                self.table.publish([name])
        if not is_wanted:
            built.close()
        elif not built.idle:
            log.info("model %s: READY again, %.0f ms", name, 1e3 * built.took_s)

    def is_serving(self, model_spec: ModelSpec) -> bool:
        with self.table.lock:
            return self.table.get(model_spec.name).spec is model_spec and not self.table.over

    def begin_take_over(self, stand_in: ModelSpec, preferred: ModelSpec) -> bool:
        """Let `preferred` load beside `stand_in`; return False if that does not serve any more, or
        something else loads."""
        with self.table.lock:
            record = self.table.get(stand_in.name)
            may = self.is_serving(stand_in) and record.coming is None
            if may:
                record.coming = preferred
            return may

    def report_shortfall(self, stand_in: ModelSpec, text: str) -> bool:
        """Report why `stand_in` serves, and how far what it stands in for is; return whether that
        is news."""
        with self.table.lock:
            record = self.table.get(stand_in.name)
            is_news = self.is_serving(stand_in) and record.shortfall != text
            if is_news:
                record.shortfall = text
                self.table.publish([record.name])
            return is_news

    def report_canary(self, model_spec: ModelSpec, news: str) -> None:
        with self.table.lock:
            record = self.table.get(model_spec.name)
            if record.spec is model_spec and record.coming is None:
                record.reason = news
                self.table.publish([record.name])

    def roll_back(self, model_spec: ModelSpec, reason: str) -> bool:
        """Publish the predecessor of `model_spec` again, with its ensembles, in one step.

        If `model_spec` is an ensemble that did not change itself, the members that changed are
        rolled back. Models that changed together with a rolled-back model and do not fit its
        predecessor are rolled back too. Returns False if there is no predecessor, or it does not
        fit the ensembles that serve; then what serves stays."""
        with self.table.lock:
            if self.table.over:
                return False
            rollback = self._suspects(model_spec, reason)
            specs = (self.table.get(name).spec for name in rollback.back)
            faulty = [spec for spec in specs if spec is not None]
            rollback, offered, found = self._fit_back(model_spec, rollback)
            back = rollback.back
            misfits = [error for name, error in found.refused.items() if name in back]
            if misfits:
                for name in back:
                    self.table[name].stay(rollback.reason, misfits[0])
                self.table.publish(back)
            elif back:
                for each in faulty:
                    same = back[each.name].built.model_spec.is_same_as(each)
                    self.table.quarantine(each, rollback.reason, only_this=same)
                self._go_back(rollback, offered, found)
        for before in back.values():
            # An ensemble is made anew; a model's versions serve again.
            if misfits or before.built.model_spec.is_ensemble:
                before.close()
            else:
                before.close_members()
        for before in rollback.not_at_fault.values():
            before.close()
        if misfits:
            log.error("model %s: cannot be rolled back: %s", model_spec.name, misfits[0])
            return False
        for each in faulty:
            log.warning("model %s: rolled back: %s", each.name, rollback.reason)
        self.table.commit()
        return bool(back)

    # The caller of the methods below holds the lock of the table.

    def end_canaries(self, names: Iterable[str]) -> None:
        """End the canaries of these models; their threads soon close the predecessors."""
        for name in names:
            record = self.table.get(name)
            run, record.canary = record.canary, None
            if run is not None:
                run.monitor.stop()

    def _overtaken(
        self, model_spec: ModelSpec, result: LoadedVersions | LoadFailure
    ) -> dict[str, LoadFailure]:
        """Return the failure of a load whose model was unloaded, or loaded again, since it began; a
        load that was only to be closed has not failed."""
        name = model_spec.name
        if model_spec not in self._unloaded:
            # Another call's models may have published a waiting ensemble already.
            return {name: LoadFailure(Unavailable(OUTDATED), model_spec=model_spec)}
        log.info("model %s: was unloaded while it loaded", name)
        return {name: result} if isinstance(result, LoadFailure) else {}

    def _breaking(self, offered: Mapping[str, LoadedVersions]) -> dict[str, LoadFailure]:
        broken = {}
        for name, built in offered.items():
            serving = self.table.get(name).serving
            if serving is None:
                continue
            try:
                has_served = self.table.has_served(built.model_spec)
                self._interface.check(serving, built, has_served=has_served)
            except ModelConfigError as error:
                broken[name] = LoadFailure(error, model_spec=built.model_spec)
        return broken

    def _fitting(self, offered: Mapping[str, LoadedVersions], found: Fit) -> list[LoadedVersions]:
        """Take down what no longer fits; return the versions to publish: models first, then each
        ensemble after its members."""
        self.end_canaries(found.taken_down)
        for name, error in found.taken_down.items():
            self.table[name].take_down(error)
        models = [built for built in offered.values() if not built.model_spec.is_ensemble]
        # A serving ensemble is made again, too, when a member changes.
        return [*models, *(self.build.ensemble(part) for part in found.ensembles.values())]

    # Canaries.

    def _watched(
        self,
        built: LoadedVersions,
        ensembles: Mapping[str, ModelSpec],
        beside: KeptPredecessor | None = None,
    ) -> LoadedVersions:
        """Start a canary for the new versions of `built`; return `built` ready to publish.
        `ensembles` are the serving specs of those that change with it; `beside` is the predecessor,
        if not what serves."""
        terms, record = self._terms, self.table[built.model_spec.name]
        if terms is None:
            return built
        serving = record.serving if beside is None else beside.built
        if serving is not None and serving.idle:
            serving = None
        members = () if beside is None else beside.members
        if beside is None and serving is not None:
            members = self.table.members(serving)
        new = {model.version for model in built.models} - built.kept
        former, record.canary = record.canary, None
        if former is not None:
            new |= former.versions
        watched = frozenset(model.version for model in built.models if model.version in new)
        before = None
        if watched and serving is not None:
            # The former canary may pass at this moment and give up its predecessor.
            kept = None if former is None else former.take_predecessor()
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
            terms,
            on_failed=partial(self._failed, run),
            on_passed=partial(self._passed, run),
            on_over=partial(self._over, run),
            on_news=partial(self.report_canary, run.model_spec),
        )
        models = [
            run.monitor.watch(model, _predecessor(model, before.built), before.members)
            if model.version in watched
            else recorded(model, terms)
            for model in built.models
        ]
        self._canaries.add(run)
        run.monitor.start()
        return replace(built, models=tuple(models))

    def _with_canary(
        self, built: LoadedVersions, former: Mapping[str, ModelSpec]
    ) -> LoadedVersions:
        spec = built.model_spec
        if spec is self.table.get(spec.name).spec and not self._is_new(spec):
            return self._unwatched(built)
        return self._watched(built, {n: each for n, each in former.items() if n != spec.name})

    def _unwatched(self, built: LoadedVersions) -> LoadedVersions:
        """Return `built` ready to publish without a canary; end the canary of its predecessor."""
        self.end_canaries([built.model_spec.name])
        return self._recorded(built)

    def _recorded(self, built: LoadedVersions) -> LoadedVersions:
        terms = self._terms
        if terms is None:
            return built
        return replace(built, models=tuple(recorded(model, terms) for model in built.models))

    def _is_new(self, model_spec: ModelSpec) -> bool:
        """Return whether the model or one of its members is still in its canary."""
        names = self.table.below(model_spec)
        return self.table.get(model_spec.name).changed_canary(model_spec) is not None or any(
            self.table.get(name).canary is not None for name in names
        )

    def _failed(self, run: CanaryRun, reason: str) -> None:
        model_spec = run.model_spec
        end_s = time.monotonic() + _SETTLES_S
        # Only comparisons of both distinguish a faulty member from a faulty ensemble.
        while model_spec.is_ensemble and self._is_comparing() and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        with self.table.lock:
            # The rollback of a member in the meantime starts another canary for its ensemble.
            is_current = self.table.get(model_spec.name).canary is run
        if is_current:
            self.roll_back(model_spec, reason)

    def _passed(self, run: CanaryRun) -> None:
        run.has_passed = True
        self.table.commit()

    def _is_comparing(self) -> bool:
        with self.table.lock:
            running = [record.canary for record in self.table if record.canary is not None]
        return any(run.monitor.is_comparing for run in running)

    def _over(self, run: CanaryRun) -> None:
        with self.table.lock:
            record = self.table.get(run.model_spec.name)
            if record.canary is run:
                record.canary = None
            before = run.take_predecessor()
        if before is not None:
            before.close()
        with self.table.lock:
            self._canaries.discard(run)

    # Rollbacks.

    def _end_canary(self, model_spec: ModelSpec) -> KeptPredecessor | None:
        """End the canary of `model_spec` and return its predecessor, or None if none is kept."""
        record = self.table.get(model_spec.name)
        run = record.canary
        if run is None or run.model_spec is not model_spec:
            return None
        record.canary = None
        before = run.take_predecessor()
        run.monitor.stop()
        return before

    def _end_changed_canaries(self, model_specs: Iterable[ModelSpec]) -> dict[str, KeptPredecessor]:
        """Take the predecessors of those specs that are in a canary and changed."""
        return {
            spec.name: before
            for spec in model_specs
            if self.table.get(spec.name).changed_canary(spec) is not None
            and (before := self._end_canary(spec)) is not None
        }

    def _suspects(self, model_spec: ModelSpec, reason: str) -> _Rollback:
        """Return the models to roll back after `model_spec` failed its canary, which ends."""
        before = self._end_canary(model_spec)
        if before is None:
            return _Rollback({}, {}, reason)
        name = model_spec.name
        used = self.table.serving_below(model_spec)
        faults = {}
        for each in used:
            run = self.table.get(each.name).changed_canary(each)
            if run is not None and (fault := run.monitor.fault()):
                faults[each.name] = fault
        if faults:
            # The fault of the ensemble shows in its members, so the members are at fault.
            bad = [each for each in used if each.name in faults]
            return _Rollback(
                self._end_changed_canaries(bad), {name: before}, next(iter(faults.values()))
            )
        if not model_spec.is_ensemble or before.built.model_spec is not model_spec:
            return _Rollback({name: before}, {}, reason)
        return _Rollback(
            self._end_changed_canaries(used), {name: before}, f"in ensemble '{name}': {reason}"
        )

    def _fit_back(
        self, model_spec: ModelSpec, rollback: _Rollback
    ) -> tuple[_Rollback, dict[str, LoadedVersions], Fit]:
        """Extend the rollback until it fits; return it with the offered versions and their fit. If
        the predecessors do not fit otherwise, the models that changed together with an ensemble are
        rolled back, too."""
        back = dict(rollback.back)
        waiting = {each.name: LoadedVersions(each) for each in self.table.waiting(())}
        offered = {**waiting, **{name: before.built for name, before in back.items()}}
        found = self.table.fit(offered, {})
        if not found.refused.keys().isdisjoint(back):
            back.update(self._end_changed_canaries(self.table.serving_below(model_spec)))
            for before in back.values():
                offered.update((n, LoadedVersions(each)) for n, each in before.ensembles.items())
            offered.update((name, before.built) for name, before in back.items())
            found = self.table.fit(offered, {})
        if self._take_down and not found.refused.keys().isdisjoint(back):
            found = self.table.fit(offered, {}, take_down=True)
        offered = {name: built for name, built in offered.items() if name not in found.refused}
        return replace(rollback, back=back), offered, found

    def _go_back(
        self,
        rollback: _Rollback,
        offered: Mapping[str, LoadedVersions],
        found: Fit,
    ) -> None:
        changed = set(found.taken_down)
        for built in self._fitting(offered, found):
            record = self.table[built.model_spec.name]
            spec, coming = record.spec, record.coming
            goes_back = record.name in rollback.back
            record.serve(
                self._watched_again(built, rollback),
                f"rolled back: {rollback.reason}" if goes_back else "",
            )
            is_other = spec is not None and not built.model_spec.is_same_as(spec)
            if spec is not None and is_other and built.model_spec is not coming:
                # One that is not in quarantine only does not fit. A model that were `coming` would
                # hold up its ensembles.
                if not goes_back:
                    record.coming = record.coming or spec
                if (copy := copy_of(spec)) is not None:
                    record.does_not_fit(copy, f"in the way of a rollback: {rollback.reason}")
            changed.add(record.name)
        self.table.publish(changed)

    def _watched_again(self, built: LoadedVersions, rollback: _Rollback) -> LoadedVersions:
        """Return `built` ready to publish in a rollback, which makes only ensembles again."""
        model_spec = built.model_spec
        if not model_spec.is_ensemble:
            return built
        before = {**rollback.not_at_fault, **rollback.back}.get(model_spec.name)
        was_new = before is not None and before.built.model_spec is not model_spec
        if not (was_new or self._is_new(model_spec)):
            return self._unwatched(built)
        return self._watched(built, {} if before is None else before.ensembles, before)


def _shared(models: Iterable[LoadedModel]) -> tuple[LoadedModel, ...]:
    """Return a share of each model that is still open."""
    shared = (model.shared(model.config) for model in models)
    return tuple(model for model in shared if model is not None)


def _predecessor(model: LoadedModel, before: LoadedVersions) -> LoadedModel:
    """Return the same version of the predecessor, or its latest version."""
    return max(before.models, key=lambda old: (old.version == model.version, old.version))
