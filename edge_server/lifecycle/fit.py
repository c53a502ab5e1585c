"""Checks which of the offered models fit the ensembles that use them."""

from __future__ import annotations

from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, NamedTuple

from edge_server.errors import ModelConfigError, ModelLoadError
from edge_server.lifecycle.model_spec import Part
from edge_server.model_config.ensemble_graph import resolve_graph

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from edge_server.lifecycle.model_spec import ModelSpec
    from edge_server.model_config.config import EnsembleStep, ModelConfig


class Fit(NamedTuple):
    """The models that can be published.

    Attributes:
        refused: the offered models that cannot be published, each with its error.
        taken_down: the serving ensembles that no longer fit, each with its error.
        ensembles: the ensembles to make, members first: the offered ensembles, and the serving
            ensembles of which a direct or indirect member changes.
    """

    refused: dict[str, ModelConfigError]
    taken_down: dict[str, ModelConfigError]
    ensembles: dict[str, Part]


def fit(
    offered: Mapping[str, Part],
    serving: Mapping[str, Part],
    reasons: Mapping[str, str],
    *,
    take_down: bool = False,
) -> Fit:
    """Choose from `offered` so that with the rest of `serving` every ensemble fits its members.

    An offered ensemble that does not fit is refused. An offered model that would break a serving
    ensemble is refused; with `take_down` the ensemble is taken down instead.

    Args:
        offered: the models that were loaded and not yet published.
        serving: the READY models; every ensemble among them fits.
        reasons: model name → the reason why the known model is not loaded.
        take_down: True takes a serving ensemble down rather than refuse a member.
    """
    left = dict(offered)
    refused: dict[str, ModelConfigError] = {}
    taken_down: dict[str, ModelConfigError] = {}
    while True:
        models = {**{n: part for n, part in serving.items() if n not in taken_down}, **left}
        gone = {name: str(error) for name, error in (refused | taken_down).items()}
        faults, ensembles = _resolved(
            dict(models), left.keys() | taken_down.keys(), {**reasons, **gone}
        )
        if not faults:
            return Fit(refused, taken_down, ensembles)
        for ensemble, error in faults.items():
            if ensemble in left:
                refused[ensemble] = error
            elif take_down:
                taken_down[ensemble] = error
            else:
                for name in _below(ensemble, models) & left.keys():
                    refused[name] = ModelConfigError(
                        f"ensemble '{ensemble}', which serves, uses model '{name}' and would no "
                        f"longer fit: {error}; change the ensemble too and load that, or unload "
                        "it first"
                    )
        left = {name: part for name, part in left.items() if name not in refused}


def _resolved(
    models: dict[str, Part], changed: Collection[str], reasons: Mapping[str, str]
) -> tuple[dict[str, ModelConfigError], dict[str, Part]]:
    """Return the faults in `models` (all cycles, or else the first fault) and the ensembles that
    change."""
    members = {name: sorted(part.model_spec.members) for name, part in models.items()}
    paths = {name: path for name in changed if (path := find_cycle(name, members))}
    if paths:
        return {
            name: ModelConfigError(
                f"{models[name].model_spec.files.shown_config_path}: circular dependency between "
                f"ensembles: {' -> '.join(path)}"
            )
            for name, path in paths.items()
        }, {}
    touched = set(changed)
    ensembles: dict[str, Part] = {}
    for name in TopologicalSorter(members).static_order():
        if not members.get(name) or touched.isdisjoint([name, *members[name]]):
            continue
        touched.add(name)
        try:
            models[name] = ensembles[name] = _resolve(models[name].model_spec, models, reasons)
        except ModelConfigError as error:
            return {name: error}, {}
    return {}, ensembles


def _resolve(model_spec: ModelSpec, models: Mapping[str, Part], reasons: Mapping[str, str]) -> Part:
    """Resolve an ensemble with the configurations of its members."""

    def find_member(step: EnsembleStep) -> ModelConfig:
        return _find_member(model_spec, step, models, reasons)

    config = resolve_graph(model_spec.config, model_spec.files.shown_config_path, find_member)
    return Part(model_spec, dict.fromkeys(model_spec.versions, config))


def _below(name: str, models: Mapping[str, Part]) -> set[str]:
    """Return the members of an ensemble, direct and indirect."""
    found: set[str] = set()
    todo = [name]
    for each in todo:  # grows while it is walked
        new = models[each].model_spec.members - found if each in models else frozenset[str]()
        found |= new
        todo += new
    return found


def _find_member(
    model_spec: ModelSpec,
    step: EnsembleStep,
    models: Mapping[str, Part],
    reasons: Mapping[str, str],
) -> ModelConfig:
    ensemble, path = model_spec.name, model_spec.files.shown_config_path
    member, version = step.model_name, step.model_version
    if member not in models:
        # A lasting fault of the member is reported with the member, so this error may pass.
        if member not in reasons:
            raise ModelLoadError(
                f"{path}: ensemble {ensemble} contains models that are not available or "
                f"ambiguous: {member}"
            )
        raise ModelLoadError(
            f"{path}: ensemble '{ensemble}' depends on '{member}' which has no loaded version. "
            f"Model '{member}' loading failed with error: {reasons[member]}"
        )
    configs = models[member].configs
    if version == -1:
        return configs[max(configs)]
    if version not in configs:
        raise ModelConfigError(
            f"{path}: ensemble '{ensemble}' depends on '{member}' whose required version "
            f"{version} is not loaded."
        )
    return configs[version]


def find_cycle(name: str, members: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the shortest cycle from `name` through members back to `name`, both ends included.

    The list is empty if there is no cycle.
    """
    paths, seen = [[name]], set[str]()
    for path in paths:  # grows while it is walked
        for member in members.get(path[-1], ()):
            if member == name:
                return [*path, name]
            if member not in seen:
                seen.add(member)
                paths.append([*path, member])
    return []
