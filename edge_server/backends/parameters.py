"""A backend's `parameters` in config.pbtxt: text values → a typed struct."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from edge_server.errors import ModelConfigError
from edge_server.model_config.interface import ALLOW_INTERFACE_CHANGE
from edge_server.settings.mistakes import value_mistake

if TYPE_CHECKING:
    from edge_server.model_config.config import ModelConfig
    from edge_server.model_config.files import ModelFiles


# Every model may have it, whatever its backend: how long its median request may take before it
# serves.
GOLDEN_MAX_LATENCY_MS = "golden_max_latency_ms"

_OF_EVERY_MODEL = frozenset({GOLDEN_MAX_LATENCY_MS, ALLOW_INTERFACE_CHANGE})


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names and types of a backend's parameters; the defaults are the backend's."""


P = TypeVar("P", bound=Parameters)


def check_parameters(files: ModelFiles, config: ModelConfig, kind: type[Parameters]) -> None:
    """Hold what the configuration says against `kind`, so that `read_parameters` will work.

    Raises:
        ModelConfigError: an unknown parameter, or a value that does not fit its type; names the
            file.
    """
    try:
        read_parameters(config, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_encode_fields__) or "none"
        mistake = value_mistake(str(error), config.parameters)
        raise ModelConfigError(
            f"{files.config_path}: parameters: {mistake}; backend '{config.backend}' knows: {known}"
        ) from error


def read_parameters(config: ModelConfig, kind: type[P]) -> P:
    """What the configuration says, as `kind`; `check_parameters` saw to it that it fits."""
    said = {k: v for k, v in config.parameters.items() if k not in _OF_EVERY_MODEL}
    return msgspec.convert(said, kind, strict=False)
