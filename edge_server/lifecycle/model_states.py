"""What is wanted of each model, beside what the registry says of it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from edge_server.errors import may_pass
from edge_server.inference.snapshot import ModelEntry, ModelState
from edge_server.lifecycle.build import LoadedVersions, LoadFailure
from edge_server.lifecycle.desired_state import DesiredState
from edge_server.lifecycle.fit import Fit, Part, fit
from edge_server.model_config.validation import without_effect

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from edge_server.errors import ModelConfigError
    from edge_server.inference.registry import ModelRegistry
    from edge_server.inference.snapshot import LoadedModel
    from edge_server.model_config.config import ModelConfig

log = logging.getLogger(__name__)

# It may quote a configuration that a client sent, and is kept and told to everyone who asks.
_LONGEST_REASON = 4000


class ModelStates:
    """The wishes, and the entries that they make in the registry. The caller locks.

    Every method that gives entries has changed the wishes as if they were published already.
    """

    def __init__(self, registry: ModelRegistry) -> None:
        self.desired_state = DesiredState()
        self._registry = registry

    def serving(self, name: str) -> LoadedVersions | None:
        """What serves, open as long as it does."""
        model_spec = self.desired_state[name].serving
        return None if model_spec is None else LoadedVersions(model_spec, self._loaded(name))

    def members(self, serving: LoadedVersions) -> tuple[LoadedModel, ...]:
        """What an ensemble that serves uses, all the way down, as it is in the registry; open as
        long as it serves."""
        members: dict[str, tuple[LoadedModel, ...]] = {}
        todo = [step.model_name for model in serving.models for step in model.config.steps]
        for name in todo:  # grows while it is walked
            if name not in members:
                members[name] = self._loaded(name)
                todo += [step.model_name for m in members[name] for step in m.config.steps]
        return tuple(model for models in members.values() for model in models)

    def is_loading(self, name: str) -> bool:
        entries = self._registry.snapshot.entries.values()
        return any(e.name == name and e.state is ModelState.LOADING for e in entries)

    def fit(
        self,
        offered: Mapping[str, LoadedVersions],
        failed: Mapping[str, LoadFailure],
        *,
        take_down: bool = False,
    ) -> Fit:
        """What of `offered` can be published; see `fit`."""
        configs: dict[str, dict[int, ModelConfig]] = {}
        reasons: dict[str, str] = {}
        for entry in self._registry.snapshot.entries.values():
            if entry.loaded is not None:
                configs.setdefault(entry.name, {})[entry.version] = entry.loaded.config
            else:
                reasons[entry.name] = entry.reason or entry.state.value
        reasons.update((name, str(failure.error)) for name, failure in failed.items())
        serving = {n: Part(d, configs[n]) for n, d in self.desired_state.serving().items()}
        parts = {n: built.as_part() for n, built in offered.items()}
        return fit(parts, serving, reasons, take_down=take_down)

    def serve(self, built: LoadedVersions) -> list[ModelEntry]:
        """From now on it serves."""
        name = built.model_spec.name
        wish = self.desired_state[name]
        if built.model_spec is not wish.serving:
            coming = None if built.model_spec is wish.coming else wish.coming
            wish = replace(wish, serving=built.model_spec, coming=coming)
        self.desired_state[name] = wish
        for field, reason in without_effect(built.model_spec.message).items():
            log.warning("model %s: field '%s' has no effect here: %s", name, field, reason)
        log.info(
            "model %s: READY, version %s, %.0f ms",
            name,
            ", ".join(str(model.version) for model in built.models),
            1e3 * built.took_s,
        )
        return [ModelEntry(name, m.version, ModelState.READY, loaded=m) for m in built.models]

    def serve_on(self, name: str, reason: str) -> list[ModelEntry]:
        """As it does, with that reason beside it."""
        entries = self._registry.snapshot.entries.values()
        return [replace(e, reason=reason) for e in entries if e.name == name and e.loaded]

    def take_down(self, faults: Mapping[str, ModelConfigError]) -> dict[str, list[ModelEntry]]:
        """Ensembles that wait from now on for members which they fit; requests in flight end."""
        changes = {}
        for name, error in faults.items():
            wish, model_spec = self.desired_state[name], self.desired_state.serving()[name]
            self.desired_state[name] = replace(wish, serving=None, coming=wish.coming or model_spec)
            reason = model_spec.files.as_shown(str(error))[:_LONGEST_REASON]
            log.error("model %s: taken down: %s", name, reason)
            changes[name] = entries_of(name, model_spec.versions, ModelState.UNAVAILABLE, reason)
        return changes

    def fail(
        self, name: str, failure: LoadFailure, made_anew: list[ModelEntry] | None
    ) -> list[ModelEntry]:
        """What was to be does not serve; what serves does so on, as `made_anew` where it is.

        An ensemble waits for members that it fits.
        """
        wish, reason, model_spec = self.desired_state[name], told(failure), failure.model_spec
        if model_spec is not None:
            may_fit = wish.serving is None or (failure.misfit and not model_spec.is_overridden)
            waits = model_spec.is_ensemble and may_fit
            self.desired_state[name] = replace(wish, coming=model_spec if waits else None)
        if wish.serving is not None:
            log.error("model %s: serves on as it was, loading it anew failed: %s", name, reason)
            return self.still_fails(failure, made_anew or self.serve_on(name, ""))
        log.error("model %s: UNAVAILABLE: %s", name, reason)
        versions = (0,) if model_spec is None else model_spec.versions
        entries = entries_of(name, versions, ModelState.UNAVAILABLE, reason)
        return [replace(entry, may_pass=may_pass(failure.error)) for entry in entries]

    def still_fails(self, failure: LoadFailure, made_anew: list[ModelEntry]) -> list[ModelEntry]:
        """What serves, with the reason why what was to be does not."""
        return [replace(entry, reason=told(failure)) for entry in made_anew]

    def _loaded(self, name: str) -> tuple[LoadedModel, ...]:
        entries = self._registry.snapshot.entries.values()
        return tuple(e.loaded for e in entries if e.name == name and e.loaded is not None)


def entries_of(
    name: str, versions: Iterable[int], state: ModelState, reason: str = ""
) -> list[ModelEntry]:
    """One for each version; version 0 stands for a model that came to none."""
    return [ModelEntry(name, version, state, reason) for version in versions]


def told(failure: LoadFailure) -> str:
    """Why, in the paths that people know."""
    reason = str(failure.error)
    if failure.model_spec is not None:
        reason = failure.model_spec.files.as_shown(reason)
    # A model may raise any text, and every transport has to carry it.
    return reason.encode("utf-8", "backslashreplace").decode()[:_LONGEST_REASON]
