"""Which of the models that are about to be published fit the ensembles that use them."""

from __future__ import annotations

from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, NamedTuple

from edge_server.errors import ModelConfigError, ModelLoadError
from edge_server.lifecycle.dependency_cycle import circle_through
from edge_server.model_config.ensemble_graph import resolve_graph

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from edge_server.lifecycle.model_spec import ModelSpec
    from edge_server.model_config.config import EnsembleStep, ModelConfig


class Part(NamedTuple):
    """A model as ensembles see it: what it was made of, and its versions' configurations."""

    model_spec: ModelSpec
    configs: Mapping[int, ModelConfig]


class Fit(NamedTuple):
    """What can be published.

    Attributes:
        refused: the offered models that cannot be, and why.
        taken_down: the ensembles which serve and cannot any more, and why.
        ensembles: those that are to be made, members first: the offered ones, and those which
            serve and of which a member changes, near or far.
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
    """Choose of `offered` so that with the rest of `serving` every ensemble fits its members.

    An offered ensemble that does not is refused, and so is an offered model that would break an
    ensemble which serves; with `take_down` it is that ensemble which goes.

    Args:
        offered: what was loaded, beside the registry.
        serving: what is READY; every ensemble of it fits.
        reasons: of models that are known and not loaded: why.
    """
    left = dict(offered)
    refused: dict[str, ModelConfigError] = {}
    taken_down: dict[str, ModelConfigError] = {}
    while True:
        world = {**{n: part for n, part in serving.items() if n not in taken_down}, **left}
        gone = {name: str(error) for name, error in (refused | taken_down).items()}
        faults, ensembles = _resolved(
            dict(world), left.keys() | taken_down.keys(), {**reasons, **gone}
        )
        if not faults:
            return Fit(refused, taken_down, ensembles)
        for ensemble, error in faults.items():
            if ensemble in left:
                refused[ensemble] = error
            elif take_down:
                taken_down[ensemble] = error
            else:
                for name in _below(ensemble, world) & left.keys():
                    refused[name] = ModelConfigError(
                        f"ensemble '{ensemble}', which serves, uses model '{name}' and would no "
                        f"longer fit: {error}; change the ensemble too and load that, or unload "
                        "it first"
                    )
        left = {name: part for name, part in left.items() if name not in refused}


def _resolved(
    world: dict[str, Part], changed: Collection[str], reasons: Mapping[str, str]
) -> tuple[dict[str, ModelConfigError], dict[str, Part]]:
    """The faults of `world`, all circles or else the first; and the ensembles that change."""
    members = {name: sorted(part.model_spec.members) for name, part in world.items()}
    ways = {name: way for name in changed if (way := circle_through(name, members))}
    if ways:
        return {
            name: ModelConfigError(
                f"{world[name].model_spec.files.shown_config_path}: circular dependency between "
                f"ensembles: {' -> '.join(way)}"
            )
            for name, way in ways.items()
        }, {}
    touched = set(changed)
    ensembles: dict[str, Part] = {}
    for name in TopologicalSorter(members).static_order():
        if not members.get(name) or touched.isdisjoint([name, *members[name]]):
            continue
        touched.add(name)
        try:
            world[name] = ensembles[name] = _resolve(world[name].model_spec, world, reasons)
        except ModelConfigError as error:
            return {name: error}, {}
    return {}, ensembles


def _resolve(model_spec: ModelSpec, world: Mapping[str, Part], reasons: Mapping[str, str]) -> Part:
    """An ensemble held against its members."""

    def find_member(step: EnsembleStep) -> ModelConfig:
        return _find_member(model_spec, step, world, reasons)

    config = resolve_graph(model_spec.config, model_spec.files.shown_config_path, find_member)
    return Part(model_spec, dict.fromkeys(model_spec.versions, config))


def _below(name: str, world: Mapping[str, Part]) -> set[str]:
    """The members of an ensemble, theirs, and so on."""
    found: set[str] = set()
    todo = [name]
    for each in todo:  # grows while it is walked
        new = world[each].model_spec.members - found if each in world else frozenset[str]()
        found |= new
        todo += new
    return found


def _find_member(
    model_spec: ModelSpec, step: EnsembleStep, world: Mapping[str, Part], reasons: Mapping[str, str]
) -> ModelConfig:
    ensemble, path = model_spec.name, model_spec.files.shown_config_path
    member, version = step.model_name, step.model_version
    if member not in world:
        # The member's own fault, where it is one that stays, is told with the member.
        if member not in reasons:
            raise ModelLoadError(
                f"{path}: ensemble {ensemble} contains models that are not available or "
                f"ambiguous: {member}"
            )
        raise ModelLoadError(
            f"{path}: ensemble '{ensemble}' depends on '{member}' which has no loaded version. "
            f"Model '{member}' loading failed with error: {reasons[member]}"
        )
    configs = world[member].configs
    if version == -1:
        return configs[max(configs)]
    if version not in configs:
        raise ModelConfigError(
            f"{path}: ensemble '{ensemble}' depends on '{member}' whose required version "
            f"{version} is not loaded."
        )
    return configs[version]
