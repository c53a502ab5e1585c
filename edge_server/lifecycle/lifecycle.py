"""The model lifecycle: changes the desired state and the registry in one step."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from edge_server.errors import ModelConfigError, Unavailable
from edge_server.inference.snapshot import UNLOADED, ModelEntry, ModelState
from edge_server.lifecycle.build import LoadedVersions, LoadFailure
from edge_server.lifecycle.canary import Canary
from edge_server.lifecycle.interface_rule import USUAL_INTERFACE_RULE
from edge_server.lifecycle.model_states import ModelStates, entries_of
from edge_server.lifecycle.rollback import find_suspects, fit_back

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from edge_server.inference.canary_monitor import CanaryTerms
    from edge_server.inference.registry import ModelRegistry
    from edge_server.lifecycle.build import Build
    from edge_server.lifecycle.fit import Fit
    from edge_server.lifecycle.interface_rule import InterfaceRule
    from edge_server.lifecycle.model_spec import ModelSpec
    from edge_server.lifecycle.rollback import RollbackSet

log = logging.getLogger(__name__)

OUTDATED = (
    "Newer operation has been applied to the model lifecycle, current load operation is out-dated."
)


class ModelLifecycle:
    """Publishes, rolls back and unloads models; the only writer of the registry.

    At any moment every ensemble in the registry fits its members. No method waits for a model.

    Args:
        registry: the registry that the lifecycle publishes to.
        build: makes the ensembles, once their members are known.
        probation: the terms of the canary of a version that replaces another; None runs no
            canary.
        on_rolled_back: called with the spec of a version that failed its canary, and the reason,
            on a thread of the canary's own, after the predecessor is published again.
        on_passed: called with the spec of a version that passed its canary, likewise.
        take_down: True unloads an ensemble that no longer fits a new member; False refuses that
            member.
        interface: the rule that decides which model may replace which.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        build: Build,
        probation: CanaryTerms | None = None,
        on_rolled_back: Callable[[ModelSpec, str], None] = lambda *_: None,
        on_passed: Callable[[ModelSpec], None] = lambda _: None,
        *,
        take_down: bool = False,
        interface: InterfaceRule = USUAL_INTERFACE_RULE,
    ) -> None:
        self._registry = registry
        self._interface = interface
        self._take_down = take_down
        self._canary = Canary(probation, self.roll_back, on_passed, self._tell_of_trial)
        self._on_rolled_back = on_rolled_back
        self._build = build
        # Guards the fields below and every change of the registry.
        self._lock = threading.Lock()
        self._model_states = ModelStates(registry)
        self._over = False

    def serves(self, name: str) -> ModelSpec | None:
        """Return the spec of the READY versions of `name`; None if no version is READY."""
        with self._lock:
            return self._model_states.desired_state[name].serving

    def on_trial(self, name: str) -> bool:
        """Return whether the serving versions of `name` are in a canary."""
        return self._canary.has(name)

    def serving(self, name: str) -> LoadedVersions | None:
        """Return the serving versions of `name`, which the caller may share but never closes."""
        with self._lock:
            return self._model_states.serving(name)

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
        changes: dict[str, list[ModelEntry]] = {}
        with self._lock:
            if self._over:
                raise Unavailable("Server exiting")
            for name, read in found.items():
                if isinstance(read, LoadFailure):
                    due[name] = read
                    continue
                wish = self._model_states.desired_state[name]
                wish = replace(wish, explicit=wish.explicit or name in explicit)
                if wish.serving is not None and read.is_same_as(wish.serving):
                    changes[name] = self._model_states.serve_on(name, "")
                    wish = replace(wish, coming=None)
                else:
                    due[name] = read
                    wish = replace(wish, coming=read)
                    if wish.serving is None:
                        changes[name] = entries_of(name, read.versions, ModelState.LOADING)
                self._model_states.desired_state[name] = wish
            self._registry.publish(changes)
        return due

    def tell(self, name: str, text: str) -> None:
        """Report the progress of the load of `name` on the index; without a load do nothing."""
        with self._lock:
            if self._model_states.desired_state[name].coming is not None:
                self._registry.give_reason(name, text)

    def publish(
        self, results: Mapping[str, LoadedVersions | LoadFailure]
    ) -> dict[str, LoadFailure]:
        """Publish the built models that fit, and the ensembles that waited for them.

        Args:
            results: model name → its loaded versions, or the failure of its load.

        Returns:
            The failures of those `results` that were not published; the predecessor of each still
            serves.
        """
        outdated: dict[str, LoadFailure] = {}
        failed: dict[str, LoadFailure] = {}
        offered: dict[str, LoadedVersions] = {}
        with self._lock:
            for name, result in results.items():
                if result.model_spec is not None and self._is_outdated(result.model_spec):
                    outdated[name] = LoadFailure(
                        Unavailable(OUTDATED), model_spec=result.model_spec
                    )
                elif isinstance(result, LoadFailure):
                    failed[name] = result
                else:
                    offered[name] = result
            for model_spec in self._model_states.desired_state.waiting(results.keys()):
                offered.setdefault(model_spec.name, LoadedVersions(model_spec))
            failed.update(self._breaking(offered))
            offered = {name: each for name, each in offered.items() if name not in failed}
            found = self._model_states.fit(offered, failed, take_down=self._take_down)
            for name, error in found.refused.items():
                failed[name] = LoadFailure(
                    error, model_spec=offered.pop(name).model_spec, misfit=True
                )
            former = self._former(found)
            changes = self._taken_down(found)
            for built in self._made(offered, found):
                changes[built.model_spec.name] = self._model_states.serve(
                    self._tried(built, former)
                )
            for name, failure in failed.items():
                if name in results or self._model_states.is_loading(name):
                    changes[name] = self._model_states.fail(name, failure, changes.get(name))
                elif name in changes:
                    changes[name] = self._model_states.still_fails(failure, changes[name])
            self._registry.publish(changes)
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
            case nothing has changed.
        """
        with self._lock:
            if self._over:
                return False
            rollback_set = find_suspects(model_spec, reason, self._model_states, self._canary)
            desired_state = self._model_states.desired_state
            guilty = [
                d for name in rollback_set.back if (d := desired_state[name].serving) is not None
            ]
            rollback_set, offered, found = fit_back(
                model_spec,
                rollback_set,
                self._model_states,
                self._canary,
                take_down=self._take_down,
            )
            back = rollback_set.back
            misfits = [error for name, error in found.refused.items() if name in back]
            if back and not misfits:
                self._go_back(rollback_set, offered, found)
        for before in back.values():
            if misfits:
                before.close()
            else:
                before.close_members()
        for before in rollback_set.spared.values():
            before.close()
        if misfits:
            log.error("model %s: cannot be rolled back: %s", model_spec.name, misfits[0])
            return False
        for each in guilty:
            log.warning("model %s: rolled back: %s", each.name, rollback_set.reason)
            self._on_rolled_back(each, rollback_set.reason)
        return bool(back)

    def unload(self, name: str, *, with_members: bool) -> None:
        """Close `name`, and the ensembles that use it, to new requests; ignore an unknown name.

        The ensembles are published again when `name` is loaded again. A load of `name` that is in
        progress fails.

        Args:
            name: the model to unload.
            with_members: also unload the members that were not requested by name and that no other
                ensemble uses.
        """
        with self._lock:
            gone = self._model_states.desired_state.forget(name, with_members=with_members)
            gone += self._model_states.desired_state.suspend_users(gone)
            self._canary.forget(gone)
            changes: dict[str, list[ModelEntry]] = {}
            for entry in self._registry.snapshot.entries.values():
                if entry.name in gone:
                    entries = changes.setdefault(entry.name, [])
                    # A loaded entry is left out: the registry reports it when it has closed.
                    if entry.loaded is None and entry.state is not ModelState.UNLOADING:
                        state = ModelState.UNAVAILABLE
                        entries.append(replace(entry, state=state, reason=UNLOADED))
            for each in changes:
                log.info("model %s: unloading", each)
            self._registry.publish(changes)

    def end(self, timeout_s: float = 5.0) -> None:
        """Clear the desired state and the registry for good; loads in progress are closed.

        Args:
            timeout_s: the longest wait for all closing models together.
        """
        until = time.monotonic() + timeout_s
        with self._lock:
            self._over = True
            self._model_states = ModelStates(self._registry)
        if not self._registry.clear(timeout_s):
            log.warning("models: still closing after %.1f s", timeout_s)
        self._canary.close(max(0.0, until - time.monotonic()))

    def _tell_of_trial(self, model_spec: ModelSpec, news: str) -> None:
        """Report the progress of the canary of `model_spec` on the index."""
        with self._lock:
            wish = self._model_states.desired_state[model_spec.name]
            if not self._over and wish.serving is model_spec and wish.coming is None:
                self._registry.publish(
                    {model_spec.name: self._model_states.serve_on(model_spec.name, news)}
                )

    def _is_outdated(self, model_spec: ModelSpec) -> bool:
        wish = self._model_states.desired_state[model_spec.name]
        # Another call's models may have published a waiting ensemble already.
        return model_spec is not wish.coming and model_spec is not wish.serving

    def _breaking(self, offered: Mapping[str, LoadedVersions]) -> dict[str, LoadFailure]:
        """Return the failures of the offered models that the interface rule refuses."""
        broken = {}
        for name, built in offered.items():
            serving = self._model_states.serving(name)
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
        serving = self._model_states.desired_state.serving()
        names = found.ensembles.keys() | found.taken_down.keys()
        return {name: serving[name] for name in names if name in serving}

    def _made(self, offered: Mapping[str, LoadedVersions], found: Fit) -> list[LoadedVersions]:
        """Return the versions to publish: models first, then each ensemble after its members."""
        models = [built for built in offered.values() if not built.model_spec.is_ensemble]
        # A serving ensemble is made again, too, when a member changes.
        return [*models, *(self._build.ensemble(part) for part in found.ensembles.values())]

    def _taken_down(self, found: Fit) -> dict[str, list[ModelEntry]]:
        self._canary.forget(found.taken_down.keys())
        return self._model_states.take_down(found.taken_down)

    def _tried(self, built: LoadedVersions, former: Mapping[str, ModelSpec]) -> LoadedVersions:
        """Return `built` ready to publish; in a canary if the model or one of its members is new.

        Args:
            built: the loaded versions.
            former: the serving specs of the ensembles that change together with `built`.
        """
        model_spec = built.model_spec
        serving = self._model_states.serving(model_spec.name)
        if (
            serving is not None
            and model_spec is serving.model_spec
            and not self._is_new(model_spec)
        ):
            return self._canary.record(built)
        others = {name: each for name, each in former.items() if name != model_spec.name}
        members = () if serving is None else self._model_states.members(serving)
        return self._canary.begin(built, serving, others, members)

    def _watched_on(self, built: LoadedVersions, rollback_set: RollbackSet) -> LoadedVersions:
        """Return `built` ready to publish in a rollback, which makes only ensembles again."""
        model_spec = built.model_spec
        if not model_spec.is_ensemble:
            return built
        before = {**rollback_set.spared, **rollback_set.back}.get(model_spec.name)
        was_new = before is not None and before.built.model_spec is not model_spec
        if not (was_new or self._is_new(model_spec)):
            return self._canary.record(built)
        if before is not None:
            return self._canary.begin(built, before.built, before.ensembles, before.members)
        serving = self._model_states.serving(model_spec.name)
        members = () if serving is None else self._model_states.members(serving)
        return self._canary.begin(built, serving, {}, members)

    def _is_new(self, model_spec: ModelSpec) -> bool:
        """Return whether the model or one of its members is still in its canary."""
        return self._canary.has_change(model_spec) or any(
            self._canary.has(member)
            for member in self._model_states.desired_state.below(model_spec)
        )

    def _go_back(
        self, rollback_set: RollbackSet, offered: Mapping[str, LoadedVersions], found: Fit
    ) -> None:
        back, reason = rollback_set.back, f"rolled back: {rollback_set.reason}"
        changes = self._taken_down(found)
        for built in self._made(offered, found):
            name, wish = (
                built.model_spec.name,
                self._model_states.desired_state[built.model_spec.name],
            )
            changes[name] = self._model_states.serve(self._watched_on(built, rollback_set))
            if name in back:
                changes[name] = [replace(entry, reason=reason) for entry in changes[name]]
            elif wish.serving is not None and built.model_spec not in (wish.serving, wish.coming):
                # The ensemble is not at fault; it only does not fit these members.
                self._model_states.desired_state.wait(wish.serving)
        self._registry.publish(changes)
