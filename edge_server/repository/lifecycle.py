"""What is wanted of each model and what serves, changed together and in one step."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from edge_server.errors import Unavailable
from edge_server.model_config.validation import without_effect
from edge_server.repository.build import Built, Failure
from edge_server.repository.fit import Fit, Part, fit
from edge_server.repository.trials import Trials
from edge_server.repository.wishes import Wishes
from edge_server.serving.snapshot import UNLOADED, ModelEntry, ModelState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from edge_server.model_config.config import ModelConfig
    from edge_server.repository.build import Build
    from edge_server.repository.draft import Draft
    from edge_server.serving.probation import ProbationTerms
    from edge_server.serving.registry import ModelRegistry
    from edge_server.serving.snapshot import LoadedModel

log = logging.getLogger(__name__)

OUTDATED = (
    "Newer operation has been applied to the model lifecycle, current load operation is out-dated."
)

# It may quote a configuration that a client sent, and is kept and told to everyone who asks.
_LONGEST_REASON = 4000


class ModelLifecycle:
    """Takes models from wanted to READY and away again; the only one that writes the registry.

    What it publishes fits together: at any moment every ensemble in the registry fits its members.
    No call waits for a model.

    Args:
        probation: of versions that replace others; None is none.
        on_rolled_back: hears what a version was made of that failed on probation, and why, on a
            thread of its own, when its predecessor serves again.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        build: Build,
        probation: ProbationTerms | None = None,
        on_rolled_back: Callable[[Draft, str], None] = lambda *_: None,
        on_passed: Callable[[Draft], None] = lambda _: None,
    ) -> None:
        self._registry = registry
        self._trials = Trials(probation, self.roll_back, on_passed)
        self._on_rolled_back = on_rolled_back
        self._build = build
        # Guards what follows and every change of the registry.
        self._lock = threading.Lock()
        self._wishes = Wishes()
        self._over = False

    def serves(self, name: str) -> Draft | None:
        """What the READY versions of `name` were made of."""
        with self._lock:
            return self._wishes[name].serving

    def on_trial(self, name: str) -> bool:
        """Whether what serves of `name` is on probation."""
        return self._trials.has(name)

    def serving(self, name: str) -> Built | None:
        """What serves now, to be looked at and shared; nobody else closes it."""
        with self._lock:
            return self._serving(name)

    def begin(
        self, found: Mapping[str, Draft | Failure], explicit: Collection[str]
    ) -> dict[str, Draft | Failure]:
        """Those of `found` that are not what serves already; from now on they are LOADING.

        Args:
            explicit: those that somebody asked for by name.

        Raises:
            Unavailable: it is over.
        """
        due: dict[str, Draft | Failure] = {}
        changes: dict[str, list[ModelEntry]] = {}
        with self._lock:
            if self._over:
                raise Unavailable("Server exiting")
            for name, read in found.items():
                if isinstance(read, Failure):
                    due[name] = read
                    continue
                wish = self._wishes[name]
                wish = replace(wish, explicit=wish.explicit or name in explicit)
                if wish.serving is not None and read.is_same_as(wish.serving):
                    changes[name] = self._serving_entries(name, reason="")
                else:
                    due[name] = read
                    wish = replace(wish, coming=read)
                    if wish.serving is None:
                        changes[name] = _entries(name, read, ModelState.LOADING)
                self._wishes[name] = wish
            self._registry.publish(changes)
        return due

    def publish(self, results: Mapping[str, Built | Failure]) -> dict[str, Failure]:
        """Make what was built serve as far as it fits, and the ensembles that waited for it.

        Returns:
            Those of `results` that do not serve. What served before them still does.
        """
        outdated: dict[str, Failure] = {}
        failed: dict[str, Failure] = {}
        offered: dict[str, Built] = {}
        with self._lock:
            for name, result in results.items():
                if result.draft is not None and self._is_outdated(result.draft):
                    outdated[name] = Failure(Unavailable(OUTDATED), draft=result.draft)
                elif isinstance(result, Failure):
                    failed[name] = result
                else:
                    offered[name] = result
            for draft in self._wishes.waiting(results.keys()):
                offered.setdefault(draft.name, Built(draft))
            refused, ensembles = self._fit(offered, failed)
            for name, error in refused.items():
                failed[name] = Failure(error, draft=offered.pop(name).draft, misfit=True)
            # Those that serve are made anew with their members, too.
            for name, part in ensembles.items():
                offered[name] = self._build.ensemble(part)
            former = self._former(ensembles)
            changes = {n: self._serve(self._tried(b, former)) for n, b in offered.items()}
            for name, failure in failed.items():
                if name in results or self._is_loading(name):
                    changes[name] = self._fail(name, failure, changes.get(name))
            self._registry.publish(changes)
        for name, result in results.items():
            if isinstance(result, Built) and offered.get(name) is not result:
                result.close()
        return {name: f for name, f in {**failed, **outdated}.items() if name in results}

    def roll_back(self, draft: Draft, reason: str) -> bool:
        """Let what served before `draft` serve again, and the ensembles with it, at once.

        It is still open while `draft` is on probation. Ensembles that changed together with it, and
        do not fit what served before, go back too.

        Returns:
            False where there is nothing to go back to, or it does not fit the ensembles that serve:
            then nothing has changed.
        """
        name = draft.name
        with self._lock:
            before = None if self._over else self._trials.take(draft)
            if before is None:
                return False
            offered = {name: before.built}
            refused, ensembles = self._fit(offered, {})
            if refused:
                offered.update((n, Built(d)) for n, d in before.ensembles.items())
                refused, ensembles = self._fit(offered, {})
            if not refused:
                for ensemble, part in ensembles.items():
                    offered[ensemble] = self._build.ensemble(part)
                changes = {n: self._serve(built) for n, built in offered.items()}
                why = f"rolled back: {reason}"
                changes[name] = [replace(entry, reason=why) for entry in changes[name]]
                self._registry.publish(changes)
        if refused:
            log.error("model %s: cannot be rolled back: %s", name, next(iter(refused.values())))
            before.built.close()
            return False
        log.warning("model %s: rolled back: %s", name, reason)
        self._on_rolled_back(draft, reason)
        return True

    def unload(self, name: str, *, with_members: bool) -> None:
        """Let nobody new use `name` and the ensembles that use it; unknown is fine.

        The ensembles come back when it is loaded again. A load of it that is under way fails.

        Args:
            with_members: nor its members, if nobody asked for them by name and no other ensemble
                uses them.
        """
        with self._lock:
            gone = self._wishes.forget(name, with_members=with_members)
            gone += self._wishes.suspend_users(gone)
            self._trials.forget(gone)
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

        What was kept for versions on probation is waited for that long.
        """
        with self._lock:
            self._over = True
            self._wishes = Wishes()
        self._registry.clear()
        self._trials.close(timeout_s)

    def _is_outdated(self, draft: Draft) -> bool:
        wish = self._wishes[draft.name]
        # Another call's models may have brought a waiting ensemble along.
        return draft is not wish.coming and draft is not wish.serving

    def _serving(self, name: str) -> Built | None:
        draft = self._wishes[name].serving
        return None if draft is None else Built(draft, self._loaded(name))

    def _former(self, ensembles: Collection[str]) -> dict[str, Draft]:
        """What those of them that serve were made of."""
        serving = self._wishes.serving()
        return {name: serving[name] for name in ensembles if name in serving}

    def _tried(self, built: Built, ensembles: Mapping[str, Draft]) -> Built:
        if built.draft.is_ensemble:
            return built
        return self._trials.begin(built, self._serving(built.draft.name), ensembles)

    def _loaded(self, name: str) -> tuple[LoadedModel, ...]:
        entries = self._registry.snapshot.entries.values()
        return tuple(e.loaded for e in entries if e.name == name and e.loaded is not None)

    def _is_loading(self, name: str) -> bool:
        entries = self._registry.snapshot.entries.values()
        return any(e.name == name and e.state is ModelState.LOADING for e in entries)

    def _fit(self, offered: Mapping[str, Built], failed: Mapping[str, Failure]) -> Fit:
        configs: dict[str, dict[int, ModelConfig]] = {}
        reasons: dict[str, str] = {}
        for entry in self._registry.snapshot.entries.values():
            if entry.loaded is not None:
                configs.setdefault(entry.name, {})[entry.version] = entry.loaded.config
            else:
                reasons[entry.name] = entry.reason or entry.state.value
        reasons.update((name, str(failure.error)) for name, failure in failed.items())
        serving = {n: Part(d, configs[n]) for n, d in self._wishes.serving().items()}
        return fit({n: built.as_part() for n, built in offered.items()}, serving, reasons)

    def _serve(self, built: Built) -> list[ModelEntry]:
        name = built.draft.name
        wish = self._wishes[name]
        if built.draft is not wish.serving:
            coming = None if built.draft is wish.coming else wish.coming
            wish = replace(wish, serving=built.draft, coming=coming)
        self._wishes[name] = wish
        for field, reason in without_effect(built.draft.message).items():
            log.warning("model %s: field '%s' has no effect here: %s", name, field, reason)
        log.info(
            "model %s: READY, version %s, %.0f ms",
            name,
            ", ".join(str(model.version) for model in built.models),
            1e3 * built.took_s,
        )
        return [ModelEntry(name, m.version, ModelState.READY, loaded=m) for m in built.models]

    def _fail(
        self, name: str, failure: Failure, made_anew: list[ModelEntry] | None
    ) -> list[ModelEntry]:
        wish, reason = self._wishes[name], str(failure.error)
        if failure.draft is not None:
            reason = failure.draft.files.as_shown(reason)
        reason = reason[:_LONGEST_REASON]
        if failure.draft is not None:
            waits = failure.draft.is_ensemble and wish.serving is None
            self._wishes[name] = replace(wish, coming=failure.draft if waits else None)
        if wish.serving is not None:
            log.error("model %s: serves on as it was, loading it anew failed: %s", name, reason)
            entries = made_anew or self._serving_entries(name, reason)
            return [replace(entry, reason=reason) for entry in entries]
        log.error("model %s: UNAVAILABLE: %s", name, reason)
        return _entries(name, failure.draft, ModelState.UNAVAILABLE, reason)

    def _serving_entries(self, name: str, reason: str) -> list[ModelEntry]:
        entries = self._registry.snapshot.entries.values()
        return [replace(e, reason=reason) for e in entries if e.name == name and e.loaded]


def _entries(
    name: str, draft: Draft | None, state: ModelState, reason: str = ""
) -> list[ModelEntry]:
    """One for each version, or for version 0 where it came to none."""
    versions = (0,) if draft is None else draft.versions
    return [ModelEntry(name, version, state, reason) for version in versions]
