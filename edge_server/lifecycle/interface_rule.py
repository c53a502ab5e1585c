"""Whether a model may answer in place of the one that serves: what its callers rely on stays."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from edge_server.errors import ModelConfigError
from edge_server.model_config.interface import (
    ALLOW_INTERFACE_CHANGE,
    interface_break,
    tensor_break,
)
from edge_server.repository.manifest import NAME, says_interface_change

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from edge_server.lifecycle.build import LoadedVersions
    from edge_server.lifecycle.model_spec import ModelSpec
    from edge_server.model_config.config import ModelConfig


class InterfaceRule:
    """Refuses what would break the callers of a model, unless it says that they know.

    A model says so in config.pbtxt, with the parameter `allow_interface_change`, or in its
    manifest. What served before may always come back, and what is on disk in place of what a client
    sent. What cameras need of their models nothing may change. Whether the ensembles that use a
    model still fit it is asked after that, by `fit`.

    Args:
        of_cameras: model name → the tensors that cameras give it and read.
        has_served: whether a model is one that served before under its name.
    """

    def __init__(
        self,
        of_cameras: Mapping[str, Collection[str]] = MappingProxyType({}),
        has_served: Callable[[ModelSpec], bool] = lambda _: False,
    ) -> None:
        self._of_cameras = of_cameras
        self._has_served = has_served

    def refusal(self, serving: LoadedVersions, new: LoadedVersions) -> ModelConfigError | None:
        """Why `new` is not to take the place of `serving`; None where it may."""
        model_spec = new.model_spec
        kept = self._of_cameras.get(model_spec.name, ())
        for old_config, new_config in _pairs(serving, new):
            if change := tensor_break(old_config, new_config, kept) if kept else "":
                return ModelConfigError(
                    f"model '{model_spec.name}' sees lanes for a camera, which needs its tensors "
                    f"as they are: {change}; push it under another name, and let the camera use "
                    "that"
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
    """What callers get now and then: who asks for no version, and who asks for one."""
    old, coming = serving.as_part().configs, new.as_part().configs
    if old and coming:
        yield old[max(old)], coming[max(coming)]
    for version in sorted(old.keys() & coming.keys()):
        yield old[version], coming[version]


def _allows(model_spec: ModelSpec) -> bool:
    """Raises: ModelConfigError: its parameter is neither true nor false."""
    said = model_spec.config.parameters.get(ALLOW_INTERFACE_CHANGE)
    if said is not None and said not in ("true", "false"):
        raise ModelConfigError(
            f"{model_spec.files.config_path}: parameter {ALLOW_INTERFACE_CHANGE} is '{said}'; give "
            "'true' or 'false'"
        )
    # Of what a client sent instead of the configuration on disk the manifest says nothing.
    by_manifest = not model_spec.is_overridden and says_interface_change(
        model_spec.files.directory / NAME
    )
    return said == "true" or by_manifest
