"""Convert a backend's `parameters` in config.pbtxt from text to a typed struct."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import msgspec

from edge_server.errors import ModelConfigError
from edge_server.model_config.interface import ALLOW_INTERFACE_CHANGE
from edge_server.settings.mistakes import value_mistake

if TYPE_CHECKING:
    from edge_server.model_config.config import ModelConfig
    from edge_server.model_config.files import ModelFiles


# Valid for every model, whatever its backend: the limit on the median latency of the model's golden
# requests; a slower version is not published.
GOLDEN_MAX_LATENCY_MS = "golden_max_latency_ms"

OF_EVERY_MODEL = frozenset({GOLDEN_MAX_LATENCY_MS, ALLOW_INTERFACE_CHANGE})


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The names, types and defaults of a backend's parameters."""


P = TypeVar("P", bound=Parameters)


def check_parameters(files: ModelFiles, config: ModelConfig, kind: type[Parameters]) -> None:
    """Check the configuration's parameters against `kind`, so that `read_parameters` succeeds.

    Raises:
        ModelConfigError: a parameter is unknown, or its value does not fit its type; the text names
            the file.
    """
    try:
        read_parameters(config, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_encode_fields__) or "none"
        mistake = value_mistake(str(error), config.parameters)
        raise ModelConfigError(
            f"{files.config_path}: parameters: {mistake}; backend '{config.backend}' knows: {known}"
        ) from error


def ours(config: ModelConfig, kind: type[Parameters]) -> ModelConfig:
    """Return the configuration without the parameters of others, which `kind` does not know: other
    backends, the plan builder, clients."""
    known = kind.__struct_encode_fields__
    return replace(config, parameters={k: v for k, v in config.parameters.items() if k in known})


def read_parameters(config: ModelConfig, kind: type[P]) -> P:
    """Return the configuration's parameters as `kind`; `check_parameters` has validated them."""
    own = {k: v for k, v in config.parameters.items() if k not in OF_EVERY_MODEL}
    return msgspec.convert(own, kind, strict=False)


def own_parameters(config: ModelConfig, kind: type[P]) -> P:
    """Return the parameters that `kind` knows; all others belong to somebody else."""
    return read_parameters(ours(config, kind), kind)
