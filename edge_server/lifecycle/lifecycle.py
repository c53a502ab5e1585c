"""The model lifecycle: changes the records and the registry in one step."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING
from weakref import WeakSet

from edge_server.backends.contract import interrupt
from edge_server.errors import ModelConfigError, Unavailable
from edge_server.lifecycle.canary import Canary, find_suspects, fit_back
from edge_server.lifecycle.model_spec import LoadedVersions, LoadFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from edge_server.inference.canary_monitor import CanaryTerms
    from edge_server.lifecycle.build import Build
    from edge_server.lifecycle.canary import RollbackSet
    from edge_server.lifecycle.fit import Fit, InterfaceRule
    from edge_server.lifecycle.model_spec import ModelSpec
    from edge_server.lifecycle.model_table import ModelTable

log = logging.getLogger(__name__)

OUTDATED = (
    "Newer operation has been applied to the model lifecycle, current load operation is out-dated."
)


class ModelLifecycle:
    """Publishes, rolls back and unloads models.

    At any moment every ensemble in the registry fits its members. No method waits for a model.

    Args:
        table: the records of all models; the lifecycle decides what loads and serves of them.
        build: makes the ensembles, once their members are known.
        canary_terms: the terms of the canary of a version that replaces another; None runs no
            canary.
        quarantine: called with the spec of a version that failed its canary, and the reason, on a
            thread of the canary's own, before the predecessor is published again: a process that is
            killed once anybody knows of the rollback must not serve the version after its restart.
        on_rolled_back: called likewise, after the predecessor is published.
        on_passed: called with the spec of a version that passed its canary, likewise.
        take_down: True unloads an ensemble that no longer fits a new member; False refuses that
            member.
        interface: the rule that decides which model may replace which.
    """

    def __init__(
        self,
        table: ModelTable,
        build: Build,
        canary_terms: CanaryTerms | None,
        *,
        quarantine: Callable[[ModelSpec, str], None],
        on_rolled_back: Callable[[ModelSpec, str], None],
        on_passed: Callable[[ModelSpec], None],
        take_down: bool,
        interface: InterfaceRule,
    ) -> None:
        self._table = table
        self._interface = interface
        self._take_down = take_down
        self._canary = Canary(table, canary_terms, self.roll_back, on_passed, self.report_canary)
        self._quarantine = quarantine
        self._on_rolled_back = on_rolled_back
        self._build = build
        # What was unloaded while it loaded; the lock of the table guards it.
        self._unloaded: WeakSet[ModelSpec] = WeakSet()

    def begin(
        self, found: Mapping[str, ModelSpec | LoadFailure], explicit: Collection[str]
    ) -> dict[str, ModelSpec | LoadFailure]:
        """Publish the models of `found` that differ from the serving ones as LOADING; return them.

        Args:
            found: model name → the spec that was read, or the failure of reading it.
            explicit: the names that the caller requested directly, not as members.

        Raises:
            Unavailable: the lifecycle has ended.
        """
        due: dict[str, ModelSpec | LoadFailure] = {}
        changed = []
        with self._table.lock:
            if self._table.over:
                raise Unavailable("Server exiting")
            for name, read in found.items():
                if isinstance(read, LoadFailure):
                    due[name] = read
                    continue
                record = self._table[name]
                if record.begin(read, explicit=name in explicit):
                    due[name] = read
                if record.is_loading or name not in due:
                    changed.append(name)
            self._table.publish(changed)
        return due

    def expects(self, model_spec: ModelSpec) -> bool:
        """Whether the load of `model_spec` would be published if it ended now."""
        with self._table.lock:
            record = self._table.get(model_spec.name)
            return not self._table.over and model_spec in record.specs

    def report_progress(self, name: str, text: str) -> None:
        """Report the progress of the load of `name` on the index; without a load do nothing."""
        with self._table.lock:
            if self._table.get(name).report_progress(text):
                self._table.registry.give_reason(name, text)

    def publish(
        self, results: Mapping[str, LoadedVersions | LoadFailure]
    ) -> dict[str, LoadFailure]:
        """Publish the built models that fit, and the ensembles that waited for them.

        Args:
            results: model name → its loaded versions, or the failure of its load.

        What was unloaded meanwhile is closed, and its load has not failed.

        Returns:
            The failures of those `results` that were not published; the predecessor of each still
            serves.
        """
        outdated: dict[str, LoadFailure] = {}
        failed: dict[str, LoadFailure] = {}
        offered: dict[str, LoadedVersions] = {}
        with self._table.lock:
            for name, result in results.items():
                spec = result.model_spec
                if spec is not None and spec not in self._table.get(name).specs:
                    outdated.update(self._overtaken(spec, result))
                elif isinstance(result, LoadFailure):
                    failed[name] = result
                else:
                    offered[name] = result
            for model_spec in self._table.waiting(results.keys()):
                offered.setdefault(model_spec.name, LoadedVersions(model_spec))
            failed.update(self._breaking(offered))
            offered = {name: each for name, each in offered.items() if name not in failed}
            found = self._table.fit(offered, failed, take_down=self._take_down)
            for name, error in found.refused.items():
                spec = offered.pop(name).model_spec
                failed[name] = LoadFailure(error, model_spec=spec, misfit=True)
            former = self._former(found)
            changed = self._take_down_misfits(found)
            for built in self._made(offered, found):
                name = built.model_spec.name
                self._table[name].serve(self._with_canary(built, former))
                changed.add(name)
            for name, failure in failed.items():
                record = self._table[name]
                if name in results or record.is_loading:
                    record.fail(failure)
                    changed.add(name)
                elif name in changed:
                    record.reason = failure.reason
            self._table.publish(changed)
        for name, result in results.items():
            if isinstance(result, LoadedVersions) and offered.get(name) is not result:
                result.close()
        return {name: f for name, f in {**failed, **outdated}.items() if name in results}

    def roll_back(self, model_spec: ModelSpec, reason: str) -> bool:
        """Publish the predecessor of `model_spec` again, with its ensembles, in one step.

        The predecessor is open while `model_spec` is in its canary. If `model_spec` is an ensemble
        that did not change itself, the members that changed are rolled back. Models that changed
        together with a rolled-back model and do not fit its predecessor are rolled back too:
        ensembles, which then wait for members that fit, and members of ensembles. Ensembles that
        wait for the predecessor are published again.

        Args:
            model_spec: the version that failed its canary.
            reason: the reason of the failure, for the log and the quarantine.

        Returns:
            False if there is no predecessor, or it does not fit the ensembles that serve; in that
            case what serves stays.
        """
        with self._table.lock:
            if self._table.over:
                return False
            rollback_set = find_suspects(model_spec, reason, self._table, self._canary)
            faulty = [
                spec
                for name in rollback_set.back
                if (spec := self._table.get(name).spec) is not None
            ]
            rollback_set, offered, found = fit_back(
                model_spec, rollback_set, self._table, self._canary, take_down=self._take_down
            )
            back = rollback_set.back
            misfits = [error for name, error in found.refused.items() if name in back]
            if back and not misfits:
                for each in faulty:
                    self._quarantine(each, rollback_set.reason)
                self._go_back(rollback_set, offered, found)
            elif misfits:
                for name in back:
                    self._table[name].stay(rollback_set.reason, misfits[0])
                self._table.publish(back)
        for before in back.values():
            # An ensemble is made anew; a model's versions serve again.
            if misfits or before.built.model_spec.is_ensemble:
                before.close()
            else:
                before.close_members()
        for before in rollback_set.not_at_fault.values():
            before.close()
        if misfits:
            log.error("model %s: cannot be rolled back: %s", model_spec.name, misfits[0])
            return False
        for each in faulty:
            log.warning("model %s: rolled back: %s", each.name, rollback_set.reason)
            self._on_rolled_back(each, rollback_set.reason)
        return bool(back)

    def unload(self, name: str, *, with_members: bool = False) -> None:
        """Close `name`, and the ensembles that use it, to new requests; ignore an unknown name.

        The ensembles are published again when `name` is loaded again. A load of `name` that is in
        progress goes on, and its result is closed.

        Args:
            name: the model to unload.
            with_members: also unload the members that were not requested by name and that no other
                ensemble uses.
        """
        with self._table.lock:
            coming = {record.name: record.coming for record in self._table}
            gone, changed = self._table.unload(name, with_members=with_members)
            found = (coming.get(each) for each in gone if self._table.get(each).coming is None)
            self._unloaded.update(spec for spec in found if spec is not None)
            self._canary.forget(gone)
            for each in changed:
                log.info("model %s: unloading", each)
            self._table.publish(changed)

    def end(self, timeout_s: float = 5.0) -> None:
        """Clear the desired state and the registry for good; loads in progress are closed, and runs
        of requests that still go on are ended where their backends can do that.

        Args:
            timeout_s: the longest wait for all closing models together.
        """
        until = time.monotonic() + timeout_s
        with self._table.lock:
            self._table.end()
        if not self._table.registry.clear(timeout_s):
            log.warning("models: still closing after %.1f s", timeout_s)
        # A run of ONNX Runtime that goes on while the interpreter exits aborts the process.
        for loaded in self._table.registry.models_in_use():
            interrupt(loaded.model)
        self._canary.close(max(0.0, until - time.monotonic()))

    def report_canary(self, model_spec: ModelSpec, news: str) -> None:
        """Report the progress of the canary of `model_spec` on the index."""
        with self._table.lock:
            record = self._table.get(model_spec.name)
            if record.spec is model_spec and record.coming is None:
                record.reason = news
                self._table.publish([record.name])

    def _overtaken(
        self, model_spec: ModelSpec, result: LoadedVersions | LoadFailure
    ) -> dict[str, LoadFailure]:
        """Return the failure of a load whose model was unloaded, or loaded again, meanwhile; a load
        that was only to be closed has not failed."""
        name = model_spec.name
        if model_spec not in self._unloaded:
            # Another call's models may have published a waiting ensemble already.
            return {name: LoadFailure(Unavailable(OUTDATED), model_spec=model_spec)}
        log.info("model %s: was unloaded while it loaded", name)
        return {name: result} if isinstance(result, LoadFailure) else {}

    def _breaking(self, offered: Mapping[str, LoadedVersions]) -> dict[str, LoadFailure]:
        """Return the failures of the offered models that the interface rule refuses."""
        broken = {}
        for name, built in offered.items():
            serving = self._table.get(name).serving
            if serving is None:
                continue
            try:
                refusal = self._interface.refusal(serving, built)
            except ModelConfigError as error:
                refusal = error
            if refusal is not None:
                broken[name] = LoadFailure(refusal, model_spec=built.model_spec)
        return broken

    def _former(self, found: Fit) -> dict[str, ModelSpec]:
        """Return the serving specs of the ensembles that change."""
        names = found.ensembles.keys() | found.taken_down.keys()
        return {name: spec for name in names if (spec := self._table.get(name).spec) is not None}

    def _made(self, offered: Mapping[str, LoadedVersions], found: Fit) -> list[LoadedVersions]:
        """Return the versions to publish: models first, then each ensemble after its members."""
        models = [built for built in offered.values() if not built.model_spec.is_ensemble]
        # A serving ensemble is made again, too, when a member changes.
        return [*models, *(self._build.ensemble(part) for part in found.ensembles.values())]

    def _take_down_misfits(self, found: Fit) -> set[str]:
        self._canary.forget(found.taken_down.keys())
        for name, error in found.taken_down.items():
            self._table[name].take_down(error)
        return set(found.taken_down)

    def _with_canary(
        self, built: LoadedVersions, former: Mapping[str, ModelSpec]
    ) -> LoadedVersions:
        """Return `built` ready to publish; in a canary if the model or one of its members is new.

        Args:
            built: the loaded versions.
            former: the serving specs of the ensembles that change together with `built`.
        """
        model_spec = built.model_spec
        if model_spec is self._table.get(model_spec.name).spec and not self._is_new(model_spec):
            return self._canary.record(built)
        others = {name: each for name, each in former.items() if name != model_spec.name}
        return self._compared(built, others)

    def _with_canary_again(
        self, built: LoadedVersions, rollback_set: RollbackSet
    ) -> LoadedVersions:
        """Return `built` ready to publish in a rollback, which makes only ensembles again."""
        model_spec = built.model_spec
        if not model_spec.is_ensemble:
            return built
        before = {**rollback_set.not_at_fault, **rollback_set.back}.get(model_spec.name)
        was_new = before is not None and before.built.model_spec is not model_spec
        if not (was_new or self._is_new(model_spec)):
            return self._canary.record(built)
        if before is not None:
            return self._canary.begin(built, before.built, before.ensembles, before.members)
        return self._compared(built, {})

    def _compared(
        self, built: LoadedVersions, ensembles: Mapping[str, ModelSpec]
    ) -> LoadedVersions:
        """Return `built` in a canary beside the versions that serve, if any do."""
        serving = self._table.get(built.model_spec.name).serving
        members = () if serving is None else self._table.members(serving)
        return self._canary.begin(built, serving, ensembles, members)

    def _is_new(self, model_spec: ModelSpec) -> bool:
        """Return whether the model or one of its members is still in its canary."""
        names = self._table.below(model_spec)
        return self._table.get(model_spec.name).changed_canary(model_spec) is not None or any(
            self._table.get(name).canary is not None for name in names
        )

    def _go_back(
        self, rollback_set: RollbackSet, offered: Mapping[str, LoadedVersions], found: Fit
    ) -> None:
        changed = self._take_down_misfits(found)
        for built in self._made(offered, found):
            record = self._table[built.model_spec.name]
            spec, coming = record.spec, record.coming
            goes_back = record.name in rollback_set.back
            record.serve(
                self._with_canary_again(built, rollback_set),
                f"rolled back: {rollback_set.reason}" if goes_back else "",
            )
            if not goes_back and spec is not None and built.model_spec not in (spec, coming):
                # The ensemble is not at fault; it only does not fit these members.
                record.coming = record.coming or spec
            changed.add(record.name)
        self._table.publish(changed)
