"""The desired state of every model, and the registry entries that result from it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from edge_server.errors import may_pass
from edge_server.inference.snapshot import ModelEntry, ModelState
from edge_server.lifecycle.build import LoadedVersions, LoadFailure
from edge_server.lifecycle.desired_state import DesiredState
from edge_server.lifecycle.fit import Fit, Part, fit
from edge_server.model_config.fields import without_effect

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from edge_server.errors import ModelConfigError
    from edge_server.inference.registry import ModelRegistry
    from edge_server.inference.snapshot import LoadedModel
    from edge_server.model_config.config import ModelConfig

log = logging.getLogger(__name__)

# A reason may quote a client's configuration; it is kept in memory and sent with every index.
_LONGEST_REASON = 4000


class ModelStates:
    """Keeps the desired state and computes the registry entries for it; the caller locks.

    A method that returns entries has already updated the desired state, so the caller must publish
    the entries.
    """

    def __init__(self, registry: ModelRegistry) -> None:
        self.desired_state = DesiredState()
        self._registry = registry

    def serving(self, name: str) -> LoadedVersions | None:
        """Return the serving versions of `name`, open as long as they serve."""
        model_spec = self.desired_state[name].serving
        return None if model_spec is None else LoadedVersions(model_spec, self._loaded(name))

    def members(self, serving: LoadedVersions) -> tuple[LoadedModel, ...]:
        """Return the registry's models that a serving ensemble uses, direct and indirect; open as
        long as the ensemble serves."""
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
        """Return which of the `offered` models can be published; see `fit`."""
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
        """Record `built` as serving and return its READY entries."""
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
        """Return the serving entries of `name` with `reason` in place of the former reason."""
        entries = self._registry.snapshot.entries.values()
        return [replace(e, reason=reason) for e in entries if e.name == name and e.loaded]

    def take_down(self, faults: Mapping[str, ModelConfigError]) -> dict[str, list[ModelEntry]]:
        """Return UNAVAILABLE entries for the ensembles in `faults`, which wait for members that
        fit; requests in flight complete."""
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
        """Record the failed load of `name` and return its entries; an ensemble waits for members.

        Args:
            name: the model whose load failed.
            failure: the failure, for the reason.
            made_anew: the entries of a serving ensemble that is made again in the same step; None
                keeps the serving entries, if there are any.
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
        """Return the serving entries with the reason of the failed load."""
        return [replace(entry, reason=told(failure)) for entry in made_anew]

    def _loaded(self, name: str) -> tuple[LoadedModel, ...]:
        entries = self._registry.snapshot.entries.values()
        return tuple(e.loaded for e in entries if e.name == name and e.loaded is not None)


def entries_of(
    name: str, versions: Iterable[int], state: ModelState, reason: str = ""
) -> list[ModelEntry]:
    """Return one entry per version; version 0 stands for a model without a known version."""
    return [ModelEntry(name, version, state, reason) for version in versions]


def told(failure: LoadFailure) -> str:
    """Return the reason of `failure`, with the paths of the repository instead of the copies."""
    reason = str(failure.error)
    if failure.model_spec is not None:
        reason = failure.model_spec.files.as_shown(reason)
    # A model may raise any text, and every transport must carry the reason.
    return reason.encode("utf-8", "backslashreplace").decode()[:_LONGEST_REASON]
