"""What is wanted of each model and what serves, changed together and in one step."""

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
    """Takes models from wanted to READY and away again; the only one that writes the registry.

    What it publishes fits together: at any moment every ensemble in the registry fits its members.
    No call waits for a model.

    Args:
        probation: of versions that replace others; None is none.
        take_down: an ensemble gives way to a member that it does not fit any more; else that
            member is refused.
        interface: which models may take the place of others.
        on_rolled_back: hears what a version was made of that failed on probation, and why, on a
            thread of its own, when its predecessor serves again.
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
        # Guards what follows and every change of the registry.
        self._lock = threading.Lock()
        self._model_states = ModelStates(registry)
        self._over = False

    def serves(self, name: str) -> ModelSpec | None:
        """What the READY versions of `name` were made of."""
        with self._lock:
            return self._model_states.desired_state[name].serving

    def on_trial(self, name: str) -> bool:
        """Whether what serves of `name` is on probation."""
        return self._canary.has(name)

    def serving(self, name: str) -> LoadedVersions | None:
        """What serves now, to be looked at and shared; nobody else closes it."""
        with self._lock:
            return self._model_states.serving(name)

    def begin(
        self, found: Mapping[str, ModelSpec | LoadFailure], explicit: Collection[str]
    ) -> dict[str, ModelSpec | LoadFailure]:
        """Those of `found` that are not what serves already; from now on they are LOADING.

        Args:
            explicit: those that somebody asked for by name.

        Raises:
            Unavailable: it is over.
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
        """Show what the load of `name` is at, until it ends; none is under way: nothing."""
        with self._lock:
            if self._model_states.desired_state[name].coming is not None:
                self._registry.give_reason(name, text)

    def publish(
        self, results: Mapping[str, LoadedVersions | LoadFailure]
    ) -> dict[str, LoadFailure]:
        """Make what was built serve as far as it fits, and the ensembles that waited for it.

        Returns:
            Those of `results` that do not serve. What served before them still does.
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
        """Let what served before `draft` serve again, and the ensembles with it, at once.

        It is still open while `draft` is on probation. Of an ensemble that is what it was, the
        members that are not go back. What changed together with what goes back, and does not fit
        what served before, goes back too: ensembles, which then wait for members that they fit, and
        members of ensembles. Ensembles that wait for what served before come back.

        Returns:
            False where there is nothing to go back to, or it does not fit the ensembles that serve:
            then nothing has changed.
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
        """Let nobody new use `name` and the ensembles that use it; unknown is fine.

        The ensembles come back when it is loaded again. A load of it that is under way fails.

        Args:
            with_members: nor its members, if nobody asked for them by name and no other ensemble
                uses them.
        """
        with self._lock:
            gone = self._model_states.desired_state.forget(name, with_members=with_members)
            gone += self._model_states.desired_state.suspend_users(gone)
            self._canary.forget(gone)
            changes: dict[str, list[ModelEntry]] = {}
            for entry in self._registry.snapshot.entries.values():
                if entry.name in gone:
                    entries = changes.setdefault(entry.name, [])
                    # What is loaded is left out: the registry tells when it is really gone.
                    if entry.loaded is None and entry.state is not ModelState.UNLOADING:
                        state = ModelState.UNAVAILABLE
                        entries.append(replace(entry, state=state, reason=UNLOADED))
            for each in changes:
                log.info("model %s: unloading", each)
            self._registry.publish(changes)

    def end(self, timeout_s: float = 5.0) -> None:
        """Nothing is wanted any more, and nothing will be; what is on its way is closed.

        All that closes is waited for that long together.
        """
        until = time.monotonic() + timeout_s
        with self._lock:
            self._over = True
            self._model_states = ModelStates(self._registry)
        if not self._registry.clear(timeout_s):
            log.warning("models: still closing after %.1f s", timeout_s)
        self._canary.close(max(0.0, until - time.monotonic()))

    def _tell_of_trial(self, model_spec: ModelSpec, news: str) -> None:
        """Show what is known by now of what serves on probation."""
        with self._lock:
            wish = self._model_states.desired_state[model_spec.name]
            if not self._over and wish.serving is model_spec and wish.coming is None:
                self._registry.publish(
                    {model_spec.name: self._model_states.serve_on(model_spec.name, news)}
                )

    def _is_outdated(self, model_spec: ModelSpec) -> bool:
        wish = self._model_states.desired_state[model_spec.name]
        # Another call's models may have brought a waiting ensemble along.
        return model_spec is not wish.coming and model_spec is not wish.serving

    def _breaking(self, offered: Mapping[str, LoadedVersions]) -> dict[str, LoadFailure]:
        """Those that would break the callers of what serves."""
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
        """What the ensembles that change were made of."""
        serving = self._model_states.desired_state.serving()
        names = found.ensembles.keys() | found.taken_down.keys()
        return {name: serving[name] for name in names if name in serving}

    def _made(self, offered: Mapping[str, LoadedVersions], found: Fit) -> list[LoadedVersions]:
        """What is to serve: models, then every ensemble after its members."""
        models = [built for built in offered.values() if not built.model_spec.is_ensemble]
        # Those that serve are made anew with their members, too.
        return [*models, *(self._build.ensemble(part) for part in found.ensembles.values())]

    def _taken_down(self, found: Fit) -> dict[str, list[ModelEntry]]:
        self._canary.forget(found.taken_down.keys())
        return self._model_states.take_down(found.taken_down)

    def _tried(self, built: LoadedVersions, former: Mapping[str, ModelSpec]) -> LoadedVersions:
        """As it is to be published; on probation where it, or what it uses, is new.

        Args:
            former: what the ensembles are made of that change together with it.
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
        """As it is to be published when something goes back: only ensembles are made anew then."""
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
        """Whether it has still to show what it is worth, or something that it uses has."""
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
                # It is as good as it was, but not for these members.
                self._model_states.desired_state.wait(wish.serving)
        self._registry.publish(changes)
