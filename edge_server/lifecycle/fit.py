"""Whether a new model fits those who use it: its callers, and the ensembles."""

from __future__ import annotations

from functools import partial
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, NamedTuple

from edge_server.errors import ModelConfigError, ModelLoadError
from edge_server.lifecycle.model_spec import Part
from edge_server.model_config.ensemble_graph import resolve_graph
from edge_server.model_config.parse import ALLOW_INTERFACE_CHANGE, interface_break
from edge_server.repository.manifest import NAME, allows_interface_change

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from edge_server.lifecycle.model_spec import LoadedVersions, ModelSpec
    from edge_server.model_config.config import EnsembleStep, ModelConfig


# Two ensembles, and the first one again.
_SHORT_CIRCLE = 3


class InterfaceRule:
    """Refuses a model that would break its callers, unless it allows the change itself, with the
    parameter `allow_interface_change` in config.pbtxt or in its manifest. Content that served
    before may always be loaded again, and so may the model on disk in place of a client's override.
    The model of a camera must stay a lane model that takes the camera's images in any case.

    Args:
        check_lane_model: raises ModelConfigError where the second configuration is of no lane
            model, or of one that does not take the images of cameras that use the first."""

    def __init__(
        self,
        of_cameras: Collection[str] = (),
        check_lane_model: Callable[[ModelConfig, ModelConfig], object] = lambda *_: None,
    ) -> None:
        self._of_cameras = of_cameras
        self._check_lane_model = check_lane_model

    def check(self, serving: LoadedVersions, new: LoadedVersions, *, has_served: bool) -> None:
        """Raises ModelConfigError where `new`, which `has_served` before, must not replace
        `serving`."""
        model_spec = new.model_spec
        old, coming = serving.as_part().configs, new.as_part().configs
        pairs = [(old[version], coming[version]) for version in sorted(old.keys() & coming.keys())]
        if old and coming:
            pairs.insert(0, (old[max(old)], coming[max(coming)]))
        for old_config, new_config in pairs:
            if model_spec.name in self._of_cameras:
                try:
                    self._check_lane_model(old_config, new_config)
                except ModelConfigError as error:
                    raise ModelConfigError(
                        f"a camera uses it: {error}; push it under another name, and let the "
                        "camera use that"
                    ) from error
            change = interface_break(old_config, new_config)
            if change and not (
                _allows(model_spec)
                or has_served
                or (serving.model_spec.is_overridden and not model_spec.is_overridden)
            ):
                raise ModelConfigError(
                    f"model '{model_spec.name}' would break those who call it: {change}; keep what "
                    "they call, or, when they know of it, push with --allow-interface-change, or "
                    f'put the parameter {ALLOW_INTERFACE_CHANGE}: "true" into config.pbtxt; in '
                    "mode explicit unloading it first does as well"
                )


USUAL_INTERFACE_RULE = InterfaceRule()


def _allows(model_spec: ModelSpec) -> bool:
    value = model_spec.config.parameters.get(ALLOW_INTERFACE_CHANGE)
    if value is not None and value not in ("true", "false"):
        raise ModelConfigError(
            f"{model_spec.files.config_path}: parameter {ALLOW_INTERFACE_CHANGE} is '{value}'; "
            "give 'true' or 'false'"
        )
    # The manifest describes the files on disk, not a client's override.
    by_manifest = not model_spec.is_overridden and allows_interface_change(
        model_spec.files.directory / NAME
    )
    return value == "true" or by_manifest


class Fit(NamedTuple):
    """The offered models that are `refused`, and the serving ensembles `taken_down`, each with its
    error; and the `ensembles` to make, members first: the offered ones, and the serving ones of
    which a direct or indirect member changes."""

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
    """Choose from `offered` so that with the rest of `serving` every ensemble fits its members. An
    offered ensemble that does not fit is refused, and so is an offered model that would break a
    serving ensemble; with `take_down` the ensemble is taken down instead. `reasons` say why other
    known models are not loaded."""
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
                f"ensembles: {path[0]} -> ... -> {path[-2]} -> {path[0]}"
                + (f" (by {', '.join(path[1:-2])})" if len(path) > _SHORT_CIRCLE else "")
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
            spec = models[name].model_spec
            find_member = partial(_find_member, spec, models, reasons)
            config = resolve_graph(spec.config, spec.files.shown_config_path, find_member)
            part = Part(spec, dict.fromkeys(spec.versions, config))
            models[name] = ensembles[name] = part
        except ModelConfigError as error:
            return {name: error}, {}
    return {}, ensembles


def _below(name: str, models: Mapping[str, Part]) -> set[str]:
    found: set[str] = set()
    todo = [name]
    for each in todo:  # grows while it is walked
        new = models[each].model_spec.members - found if each in models else frozenset[str]()
        found |= new
        todo += new
    return found


def _find_member(
    model_spec: ModelSpec,
    models: Mapping[str, Part],
    reasons: Mapping[str, str],
    step: EnsembleStep,
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
        # The traceback of a Python model is in its own reason.
        reason = reasons[member].partition("\n\nAt:\n")[0]
        raise ModelLoadError(
            f"{path}: ensemble '{ensemble}' depends on '{member}' which has no loaded version. "
            f"Model '{member}' loading failed with error: {reason}"
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
    """Return the shortest cycle from `name` through members back to `name`, both ends included. The
    list is empty if there is no cycle."""
    paths, seen = [[name]], set[str]()
    for path in paths:  # grows while it is walked
        for member in members.get(path[-1], ()):
            if member == name:
                return [*path, name]
            if member not in seen:
                seen.add(member)
                paths.append([*path, member])
    return []
