"""The interface rule: a new model must not break the callers of the model that it replaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.errors import ModelConfigError
from edge_server.model_config.interface import (
    ALLOW_INTERFACE_CHANGE,
    interface_break,
)
from edge_server.repository.manifest import NAME, allows_interface_change

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from edge_server.lifecycle.model_spec import LoadedVersions, ModelSpec
    from edge_server.model_config.config import ModelConfig


class InterfaceRule:
    """Refuses a model that would break its callers, unless the model allows the change itself.

    A model allows the change with the parameter `allow_interface_change` in config.pbtxt, or in its
    manifest. Content that served before may always be loaded again, and so may the model on disk in
    place of a client's override. The model of a camera must stay a lane model that takes the
    camera's images, whatever else is allowed. `fit` checks
    afterwards whether the ensembles that use the model still fit.

    Args:
        of_cameras: names of the models that detect lanes for cameras.
        check_lane_model: raises ModelConfigError where the second configuration is of no lane
            model, or of one that does not take the images of cameras that use the first.
        has_served: returns whether the content of a spec served before under its name.
    """

    def __init__(
        self,
        of_cameras: Collection[str] = (),
        check_lane_model: Callable[[ModelConfig, ModelConfig], object] = lambda *_: None,
        has_served: Callable[[ModelSpec], bool] = lambda _: False,
    ) -> None:
        self._of_cameras = of_cameras
        self._check_lane_model = check_lane_model
        self._has_served = has_served

    def refusal(self, serving: LoadedVersions, new: LoadedVersions) -> ModelConfigError | None:
        """Return the error that forbids `new` to replace `serving`; None if the rule allows it.

        Raises:
            ModelConfigError: the parameter `allow_interface_change` is neither true nor false.
        """
        model_spec = new.model_spec
        for old_config, new_config in _pairs(serving, new):
            if model_spec.name in self._of_cameras:
                try:
                    self._check_lane_model(old_config, new_config)
                except ModelConfigError as error:
                    return ModelConfigError(
                        f"a camera uses it: {error}; push it under another name, and let the "
                        "camera use that"
                    )
            change = interface_break(old_config, new_config)
            if change and not (
                _allows(model_spec)
                or self._has_served(model_spec)
                or (serving.model_spec.is_overridden and not model_spec.is_overridden)
            ):
                return ModelConfigError(
                    f"model '{model_spec.name}' would break those who call it: {change}; keep what "
                    "they call, or, when they know of it, push with --allow-interface-change, or "
                    f'put the parameter {ALLOW_INTERFACE_CHANGE}: "true" into config.pbtxt; in '
                    "mode explicit unloading it first does as well"
                )
        return None


USUAL_INTERFACE_RULE = InterfaceRule()


def _pairs(
    serving: LoadedVersions, new: LoadedVersions
) -> Iterator[tuple[ModelConfig, ModelConfig]]:
    """Yield old and new configuration of the latest version, then of each common version."""
    old, coming = serving.as_part().configs, new.as_part().configs
    if old and coming:
        yield old[max(old)], coming[max(coming)]
    for version in sorted(old.keys() & coming.keys()):
        yield old[version], coming[version]


def _allows(model_spec: ModelSpec) -> bool:
    """Return whether the model allows a change of its interface.

    Raises:
        ModelConfigError: the parameter is neither true nor false.
    """
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
